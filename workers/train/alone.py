"""Train in this process, with nobody around it who chooses the version to resume from.

The newest checkpoint that can be loaded is gone on from. One that is damaged is passed over, with
a warning; one that the model does not fit, or that cannot be read now, ends the training: to go
on without it would throw work away that nothing is wrong with. Where none can be loaded that was
committed, training begins anew only if no more than one interval of checkpoints is lost.
"""

from __future__ import annotations

import logging
import re
import tempfile
from pathlib import Path

import torch.distributed as dist

from ucp_core.layout import ParallelLayout
from ucp_core.native import MANIFEST_NAME, Found, checkpoint_name, find_committed, unloadable
from ucp_core.storage import Store, join, open_store
from workers.errors import StateError
from workers.protocol import Assignment, FoundBad, Outcome, Unloadable
from workers.records import ProgressPage
from workers.settings import Settings
from workers.train.boundary import CHECKPOINTS
from workers.train.loop import WorkerContext, run_attempt
from workers.train.script import Task

__all__ = ["run_alone"]

log = logging.getLogger(__name__)


def run_alone(train: Task, settings: Settings, directory: str) -> Outcome:
    """Train as the only worker; return how that ended, which is never ``Unloadable``.

    Args:
        train: Called once for every version that is tried.
        settings: What to train.
        directory: Run directory, a path or an fsspec URL.

    Raises:
        StateError: There are checkpoints, and none that can be gone on from.
        StorageError: The storage refused to show what there is.
    """
    store, path = open_store(directory)
    checkpoints = join(path, CHECKPOINTS)
    passed: dict[str, str] = {}
    while True:
        found = find_committed(store, checkpoints, lineage=(), exclude=frozenset(passed))
        _pass_over(store, checkpoints, found, passed, settings.checkpoint.first_every)
        outcome = _attempt(train, settings, store, path, found)
        if not isinstance(outcome, Unloadable):
            return outcome
        assert found is not None, f"nothing was to be loaded: {outcome}"
        _raise_if_sound(found.directory, outcome.found)
        name = found.directory.rpartition("/")[2]
        reasons = (reason.removeprefix(f"{name}: ") for reason in outcome.found.reasons)
        _warn(name, "; ".join(reasons), passed)


def _pass_over(
    store: Store, checkpoints: str, found: Found | None, passed: dict[str, str], at_stake: int
) -> None:
    """Tell of what is newer than ``found`` and damaged; raise if that is all there is.

    But for what was committed within the first ``at_stake`` steps: the work of one interval is
    what the user puts at stake, and training begins anew without it.
    """
    lost = unloadable(store, checkpoints, lineage=()) if found is None else ()
    rows = [(checkpoint_name(step), reason) for step, reason in lost]
    for name, reason in found.skipped if found is not None else rows:
        # A save that was cut short never counted, and nothing is lost with it.
        if name not in passed and store.exists(join(checkpoints, name, MANIFEST_NAME)):
            _warn(name, reason, passed)
    if max((step for step, _ in lost), default=0) > at_stake:
        told = "; ".join(f"{name}: {reason}" for name, reason in passed.items())
        raise StateError(
            f"no checkpoint in {checkpoints} can be loaded ({told}); put a sound copy of one "
            f"back, or delete {checkpoints} to begin anew",
            path=checkpoints,
            passed=dict(passed),
        )


def _warn(name: str, reason: str, passed: dict[str, str]) -> None:
    passed[name] = reason
    # Who runs alone has configured no log: the message is all that is shown.
    log.warning("passed over the damaged checkpoint %s: %s", name, reason)


def _raise_if_sound(directory: str, bad: FoundBad) -> None:
    """Raise ``StateError`` unless the checkpoint is proven to be damaged."""
    if bad.misfits:
        raise StateError(
            f"{directory} is a checkpoint of another model or optimizer: "
            f"{'; '.join(bad.misfits)}. Nothing was changed: go on with the model and optimizer "
            "that made it, or train this one in another directory",
            path=directory,
            misfits=bad.misfits,
        )
    if not bad.damaged:
        raise StateError(
            f"{directory} cannot be read now, and may be sound ({'; '.join(bad.reasons)}); run "
            "again when it can be read, or delete it to go on from an older one",
            path=directory,
        )


def _attempt(
    train: Task, settings: Settings, store: Store, path: str, found: Found | None
) -> Outcome:
    step, before = (found.step, found.attempt) if found is not None else (0, 0)
    # Above every attempt that wrote anything: what was passed over is written anew some day.
    attempt = _last_attempt(store, join(path, CHECKPOINTS), found) + 1
    rendezvous = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="everstep-") as scratch:
        page = ProgressPage.create(Path(scratch) / "page", worker="alone")
        context = WorkerContext(
            worker="alone",
            settings=settings,
            store=store,
            directory=path,
            page=page,
            ring_path=str(Path(scratch) / "ring"),
            yield_requested=lambda _attempt: False,
            fenced=lambda _attempt: False,
            same_weights=True,
        )
        assignment = Assignment(
            attempt=attempt,
            rank=0,
            layout=ParallelLayout(),
            store_host="127.0.0.1",
            store_port=rendezvous.port,
            resume_step=step,
            resume_attempt=before,
            lineage=((attempt, step),),
        )
        try:
            return run_attempt(assignment, context, train)
        finally:
            page.close()


def _last_attempt(store: Store, checkpoints: str, found: Found | None) -> int:
    """Return the highest attempt of which there is a file; 0 if there is none."""
    if found is None:
        directories, highest = list(store.list(checkpoints)), 0
    else:
        directories, highest = [name for name, _ in found.skipped], found.attempt
    for name in directories:
        for file in store.list(join(checkpoints, name)):
            match = re.match(r"a(\d+)-r\d+\.", file)
            highest = max(highest, int(match[1]) if match else 0)
    return highest
