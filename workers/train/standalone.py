"""Run a training script without a controller: alone in its process, or on a launcher's ranks.

Training resumes from the newest checkpoint that loads. A damaged one is skipped with a warning.
A checkpoint that does not fit the model, or cannot be read now, ends the training: skipping it
would lose good work. If no committed checkpoint loads, training restarts only if that loses at
most one checkpoint interval.
"""

import logging
import secrets
import socket
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ucp_core.errors import SupersededError
from ucp_core.native import (
    MANIFEST_NAME,
    Found,
    checkpoint_name,
    find_committed,
    last_attempt,
    unloadable,
)
from ucp_core.storage import Store, claim, held, join, next_claim, open_store
from workers.errors import MisfitError, SettingsError, StateError, TaskError
from workers.launchers import take_place
from workers.protocol import (
    CHECKPOINTS,
    Assignment,
    Completed,
    FoundBad,
    Outcome,
    PeerLost,
    Raised,
    Superseded,
    Unloadable,
)
from workers.settings import Settings, problems
from workers.telemetry import ProgressRecord
from workers.train.launched import Ranks, layout_for
from workers.train.loop import WorkerContext, run_attempt
from workers.train.script import Task, hand_over

log = logging.getLogger(__name__)


def run(
    train: Task,
    *,
    directory: str | None = None,
    settings: Settings | None = None,
    init_from: str = "",
    **train_settings: Any,
) -> None:
    """Train in this process, or in all that torchrun started; under everstep, pass on ``train``.

    Code after the call runs once, when the run is complete. Under everstep, rank 0 runs the script
    for that from its top again, and this returns at once. Under torchrun, the other ranks exit.

    Without everstep, training resumes from the newest checkpoint in ``directory``; delete that to
    restart. A damaged checkpoint is skipped with a warning, and ``train`` is called again with an
    older one.

    Args:
        train: Called with a session; ``everstep`` documents the contract.
        directory: Run directory, a path or an fsspec URL; overrides the one in ``settings``.
        settings: All settings; None for the defaults.
        init_from: A checkpoint to start from; overrides ``settings.run.init_from``.
        **train_settings: Override fields of ``settings.train``, such as ``steps`` or ``lr``.

    Raises:
        SettingsError: The settings cannot work; names every problem.
        StateError: The newest checkpoint is of another model, or no checkpoint can be loaded.
        HeldError: Another process trains in the directory.
        SupersededError: Another process took over the directory, in a storage without locks.
        StorageError: The storage refused to list the checkpoints.
        TaskError: ``train`` raised; the message ends with its traceback. Or a rank was lost.
        SystemExit: On ranks above 0 of torchrun, when the run is complete.
    """

    def given() -> Settings:
        return _given(settings or Settings(), directory, init_from, train_settings)

    if hand_over(train, given):
        return
    settings = given()
    found = problems(settings)
    if found:
        raise SettingsError("; ".join(found), problems=found)
    if settings.train.deterministic:
        # More threads sum in another order, and a worker has one unless configured otherwise.
        torch.set_num_threads(1)
    if dist.is_initialized():
        raise TaskError(
            "torch.distributed has a group before everstep.run: leave out init_process_group, the "
            "session forms the groups of each attempt"
        )
    directory = settings.run.directory
    store, path = open_store(directory)
    ranks = Ranks(take_place(), timeout_s=settings.parallel.patient_timeout_s)
    layout = layout_for(ranks.num_ranks, settings.parallel)
    if ranks.rank == 0 and layout.dp > 1 and settings.train.recheck:
        log.warning(settings.train.recheck_cost(layout.dp))
    _agree_on_settings(settings, ranks)
    if ranks.rank:
        outcome = _follow(train, settings, store, path, ranks)
    else:
        with held(store, path, shared=False):
            outcome = _train(train, settings, store, path, ranks)
    _raise_unless_completed(outcome, directory)
    if ranks.rank:
        # Only one process runs the code after the call.
        raise SystemExit(0)


def _raise_unless_completed(outcome: Outcome, directory: str) -> None:
    if isinstance(outcome, Raised):
        raise TaskError(f"training failed in step {outcome.step}\n{outcome.traceback}")
    if isinstance(outcome, PeerLost):
        # Another rank was lost, or the script has its own group, or a device's transport failed.
        raise TaskError(f"training failed after step {outcome.step}: {outcome.detail}")
    if isinstance(outcome, Superseded):
        raise SupersededError(outcome.why, path=directory)
    assert isinstance(outcome, Completed), f"an attempt that runs alone cannot be fenced: {outcome}"


def _given(
    settings: Settings, directory: str | None, init_from: str, train_settings: dict[str, Any]
) -> Settings:
    """Return the settings, overridden by the other arguments of ``run``."""
    run = settings.run
    try:
        return replace(
            settings,
            train=replace(settings.train, **train_settings),
            run=replace(
                run,
                directory=directory or run.directory,
                init_from=init_from or run.init_from,
            ),
        )
    except TypeError as error:
        raise SettingsError(f"run: {error}", problems=[str(error)]) from error


def _agree_on_settings(settings: Settings, ranks: Ranks) -> None:
    """Wait for every rank; raise ``SettingsError`` if one has other settings."""
    every = ranks.gather({key: repr(value) for key, value in asdict(settings).items()})
    for rank, theirs in enumerate(every):
        other = ", ".join(key for key, value in theirs.items() if value != every[0][key])
        if other:
            problem = f"rank {rank} has other settings than rank 0 ({other}); give all the same"
            raise SettingsError(problem, problems=[problem])


def _follow(train: Task, settings: Settings, store: Store, path: str, ranks: Ranks) -> Outcome:
    """Train as a rank above 0, in the attempts that rank 0 plans; return the outcome."""
    while True:
        outcome = _attempt(ranks.tell(), settings, store, path, train, ranks)
        if isinstance(outcome, Completed | Unloadable | Raised):
            # At the end rank 0 waits for each rank, even if the rank's script has failed.
            ranks.gather(asdict(outcome))
        if not isinstance(outcome, Unloadable):
            return outcome


def _merged(reports: Iterable[Mapping[str, Any]]) -> FoundBad:
    """Return the sources that any rank has found bad, from the outcomes of all."""
    every = [report["found"] for report in reports]
    return FoundBad(
        damaged=tuple(tuple(source) for found in every for source in found["damaged"]),
        misfits=tuple(dict.fromkeys(line for found in every for line in found["misfits"])),
        reasons=tuple(dict.fromkeys(line for found in every for line in found["reasons"])),
    )


def _train(train: Task, settings: Settings, store: Store, path: str, ranks: Ranks) -> Outcome:
    """Train as rank 0, from the newest checkpoint that loads; return the outcome."""
    claimed = _claimed(store, path)
    checkpoints = join(path, CHECKPOINTS)
    skipped: dict[str, str] = {}
    while True:
        found = find_committed(store, checkpoints, lineage=(), exclude=frozenset(skipped))
        _skip_damaged(store, checkpoints, found, skipped, settings.checkpoint.first_every)
        # It must be above every attempt that has files, because a later commit rewrites the skipped
        # checkpoints.
        names = [name for name, _ in found.skipped] if found else store.list(checkpoints)
        known = found.attempt if found else 0
        attempt = ranks.next_attempt(max(known, last_attempt(store, checkpoints, names)))
        resume = (found.step, found.attempt) if found is not None else (0, 0)
        if found is not None:
            # This is a warning because a script that runs alone has set up no logging.
            log.warning("resumes at step %s from %s", found.step, path)
        plan = ranks.tell({"attempt": attempt, "claim": claimed, "resume": resume})
        outcome = _attempt(plan, settings, store, path, train, ranks)
        if isinstance(outcome, Completed):
            # The store may end with this process, so every rank must have left the attempt.
            ranks.gather(asdict(outcome))
        if not isinstance(outcome, Unloadable):
            return outcome
        bad = _merged(ranks.gather(asdict(outcome)))
        assert found is not None, f"there was nothing to load: {outcome}"
        _raise_unless_damaged(found.directory, bad)
        name = found.directory.rpartition("/")[2]
        reasons = (reason.removeprefix(f"{name}: ") for reason in bad.reasons)
        _warn(name, "; ".join(reasons), skipped)


def _claimed(store: Store, path: str) -> int:
    """Claim the directory and return the number, so that older claims commit nothing more."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    record = {"token": secrets.token_hex(8), "host": socket.gethostname(), "since": now}
    number = next_claim(store, path)
    claim(store, path, number, record)
    return number


def _skip_damaged(
    store: Store,
    checkpoints: str,
    found: Found | None,
    skipped: dict[str, str],
    steps_lost_max: int,
) -> None:
    lost = unloadable(store, checkpoints, lineage=(), with_data=True) if found is None else ()
    rows = [(checkpoint_name(step), reason) for step, reason in lost]
    for name, reason in found.skipped if found is not None else rows:
        # An interrupted save after a complete one never counted, so nothing is lost with it.
        is_known = found is None or store.exists(join(checkpoints, name, MANIFEST_NAME))
        if is_known and name not in skipped:
            _warn(name, reason, skipped)
    if max((step for step, _ in lost), default=0) > steps_lost_max:
        told = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
        raise StateError(
            f"no checkpoint in {checkpoints} can be loaded ({told}); restore a sound copy of one, "
            f"or delete {checkpoints} to restart from step 0",
            path=checkpoints,
            passed=dict(skipped),
        )


def _warn(name: str, reason: str, skipped: dict[str, str]) -> None:
    skipped[name] = reason
    # A script that runs alone has set up no logging: the message is its only output.
    log.warning("skipped the damaged checkpoint %s: %s", name, reason)


def _raise_unless_damaged(directory: str, bad: FoundBad) -> None:
    if bad.misfits:
        raise MisfitError.of(directory, bad.misfits)
    if not bad.damaged:
        raise StateError(
            f"{directory} cannot be read now, and may be sound ({'; '.join(bad.reasons)}); run "
            "again when it can be read, or delete it to resume from an older one",
            path=directory,
        )


def attempt_alone(
    settings: Settings, store: Store, directory: str, *, attempt: int, task: Task | None = None
) -> Outcome:
    """Run one attempt from step 0 as its only worker, in this process; return its outcome.

    Without a ``task`` it trains that of the settings' script, or the built-in one.
    """
    ranks = Ranks(None, timeout_s=settings.parallel.patient_timeout_s)
    plan = {"attempt": attempt, "claim": 0, "resume": (0, 0)}
    return _attempt(plan, settings, store, directory, task, ranks)


def _attempt(
    plan: Mapping[str, Any],
    settings: Settings,
    store: Store,
    directory: str,
    task: Task | None,
    ranks: Ranks,
) -> Outcome:
    step, resumed_attempt = plan["resume"]
    assignment = Assignment(
        attempt=plan["attempt"],
        claim=plan["claim"],
        rank=ranks.rank,
        layout=layout_for(ranks.num_ranks, settings.parallel),
        store_host=ranks.host,
        store_port=ranks.port,
        resume_step=step,
        resume_attempt=resumed_attempt,
        lineage=((plan["attempt"], step),),
    )
    worker = "alone" if ranks.num_ranks == 1 else f"rank{ranks.rank}"
    with tempfile.TemporaryDirectory(prefix="everstep-") as scratch:
        progress = ProgressRecord.create(Path(scratch) / "progress", worker=worker)
        context = WorkerContext(
            worker=worker,
            settings=settings,
            store=store,
            directory=directory,
            progress=progress,
            ring_path=str(Path(scratch) / "ring"),
            yield_requested=lambda _attempt: False,
            fenced=lambda _attempt: False,
            node=ranks.node,
        )
        try:
            return run_attempt(assignment, context, task)
        finally:
            progress.close()
