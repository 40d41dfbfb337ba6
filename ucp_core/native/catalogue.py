"""Find the valid checkpoints of a run, and delete old ones."""

from __future__ import annotations

import itertools
import json
import math
import re
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from errno import EIO
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from ucp_core.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    StorageError,
    UcpError,
)
from ucp_core.lineage import counts
from ucp_core.manifest import from_bytes
from ucp_core.native.opening import MANIFEST_NAME, Checkpoint, open_checkpoint
from ucp_core.native.saving import try_commit
from ucp_core.storage import Store, is_link, join

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ucp_core.lineage import Lineage

#: How long a withdrawn checkpoint stays: longer than it takes to read 1 TB at 300 MB/s.
GRACE_S = 3600.0
#: Key in ``extra`` if weights are not finite; its ``sound_step`` is the newest step with finite
#: ones.
NOT_FINITE = "not_finite"

#: Key in ``extra`` for the best steps so far by a value: ``kept`` has rows of step and value.
BEST = "best"

#: Key in ``extra`` for the newest step whose state the machines have provably computed right.
RECHECKED = "rechecked"

_STEP_NAME = re.compile(r"step-(\d{8,})")
#: A rank's complete data file, or its record.
_RANK_FILE = re.compile(r"a(\d{4,})-r\d{5,}\.(?:bin|json)")
_WITHDRAWN_NAME = "withdrawn.json"


def checkpoint_name(step: int) -> str:
    """Return the directory name of ``step`` under ``checkpoints/``."""
    return f"step-{step:08d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The newest valid checkpoint."""

    step: int
    attempt: int  #: The attempt that committed it.
    directory: str
    checkpoint: Checkpoint = field(repr=False, compare=False)
    #: ``(name, reason)`` of every newer directory that is not valid.
    skipped: tuple[tuple[str, str], ...]
    #: Steps that were committed but whose bytes have changed since.
    damaged: tuple[int, ...] = ()


def find_committed(
    store: Store,
    checkpoints_directory: str,
    *,
    lineage: Lineage,
    exclude: frozenset[str] = frozenset(),
) -> Found | None:
    """Return the newest checkpoint that is committed, valid under ``lineage`` and complete.

    Reads the manifest and one listing of each directory, newest first, until one is valid. Loading
    verifies the bytes of tensors. It deletes nothing.

    Args:
        checkpoints_directory: Directory of ``step-00001200``, ...
        lineage: See ``ucp_core.lineage``.
        exclude: Names of directories that could not be loaded.

    Raises:
        StorageError: The storage refused to show a checkpoint, and no newer one is valid.
    """
    skipped: list[tuple[str, str]] = []
    damaged: list[int] = []
    for name in step_names(store, checkpoints_directory):
        step = int(name.removeprefix("step-"))
        if name in exclude:
            skipped.append((name, "excluded: it could not be loaded before"))
            damaged.append(step)
            continue
        directory = join(checkpoints_directory, name)
        try:
            checkpoint = _open_valid(store, directory, lineage)
            _check_files(checkpoint)
        except UcpError as error:
            is_storage = isinstance(error, StorageError) and error.facts.get("errno") != EIO
            if is_storage and not error.facts.get("missing"):
                # An expired password must not send the run back to an older step, or to none.
                raise
            skipped.append((name, str(error)))
            is_gone = is_storage or isinstance(error, CheckpointNotFoundError)
            if not is_gone and "overtaken_by" not in error.facts:
                damaged.append(step)
            continue
        return Found(
            step=checkpoint.step,
            attempt=checkpoint.attempt,
            directory=directory,
            checkpoint=checkpoint,
            skipped=tuple(skipped),
            damaged=tuple(damaged),
        )
    return None


def unloadable(
    store: Store, checkpoints_directory: str, *, lineage: Lineage, with_data: bool = False
) -> tuple[tuple[int, str], ...]:
    """Return ``(step, reason)`` of committed, unfenced checkpoints, newest first.

    Call it when ``find_committed`` finds nothing: a run must not restart beside these, because
    somebody may repair one. The reason is empty if only loading the bytes reveals the damage.

    Args:
        checkpoints_directory: See ``find_committed``.
        lineage: See ``ucp_core.lineage``.
        with_data: Also return those that have data but no manifest. An interrupted save leaves the
            same, so ask for them only if something was committed.

    Raises:
        StorageError: The storage refused to show a checkpoint.
    """
    found: list[tuple[int, str]] = []
    for name in step_names(store, checkpoints_directory):
        reason = ""
        try:
            checkpoint = open_checkpoint(store, join(checkpoints_directory, name))
            if not counts(step=checkpoint.step, attempt=checkpoint.attempt, lineage=lineage):
                continue
            _check_files(checkpoint)
        except CheckpointNotFoundError:
            if not with_data or not _attempts(store, join(checkpoints_directory, name)):
                continue
            reason = f"it has data and no {MANIFEST_NAME}"
        except StorageError:
            raise
        except UcpError as error:
            reason = str(error)
        found.append((int(name.removeprefix("step-")), reason))
    return tuple(found)


def newest_finite(store: Store, checkpoints_directory: str, *, lineage: Lineage) -> tuple[int, int]:
    """Return the newest valid step, and the newest one with finite weights.

    0 if there is none. A later checkpoint may say that an earlier one is not finite.

    Raises:
        StorageError: The storage refused to show a checkpoint.
    """
    found: list[tuple[str, tuple[int, int]]] = []
    for name in step_names(store, checkpoints_directory):
        try:
            checkpoint = _open_valid(store, join(checkpoints_directory, name), lineage)
            _check_files(checkpoint)
        except StorageError as error:
            if not error.facts.get("missing"):
                raise
            continue
        except UcpError:
            continue
        found.append((name, (checkpoint.step, _sound_step(checkpoint))))
        finite = _newest_finite(found)
        if finite:
            return found[0][1][0], checkpoint.step
    return (found[0][1][0], 0) if found else (0, 0)


def _newest_finite(newest_first: Iterable[tuple[str, tuple[int, int]]]) -> str:
    """Return the name of the newest checkpoint with finite weights; "" without one.

    Args:
        newest_first: Name and step of each, and the newest finite step that it records.
    """
    bound = math.inf
    for name, (step, sound_step) in newest_first:
        bound = min(bound, sound_step)
        if step <= bound:
            return name
    return ""


def _sound_step(checkpoint: Checkpoint) -> int:
    told = checkpoint.manifest.extra.get(NOT_FINITE)
    found = told.get("sound_step") if isinstance(told, dict) else None
    return found if isinstance(found, int) else checkpoint.step


def _checked_step(checkpoint: Checkpoint) -> int:
    found = checkpoint.manifest.extra.get(RECHECKED)
    return found if isinstance(found, int) else checkpoint.step


def best_steps(checkpoint: Checkpoint) -> list[int]:
    """Return the steps up to this one that a run keeps for their value, best first."""
    told = checkpoint.manifest.extra.get(BEST)
    rows = told.get("kept", ()) if isinstance(told, dict) else ()
    return [row[0] for row in rows if isinstance(row, list) and row and isinstance(row[0], int)]


def last_attempt(store: Store, checkpoints_directory: str, names: Iterable[str]) -> int:
    """Return the highest attempt with a file in the directories ``names``; 0 if there is none.

    A later attempt needs a higher number: with the same one it would take the files for its own.
    """
    found = (_attempts(store, join(checkpoints_directory, name)) for name in names)
    return max((attempt for attempts in found for attempt in attempts), default=0)


def _attempts(store: Store, directory: str) -> set[int]:
    """Return the attempts with a file in a checkpoint's directory."""
    matches = map(_RANK_FILE.fullmatch, store.list(directory))
    return {int(match[1]) for match in matches if match}


def step_names(store: Store, checkpoints_directory: str) -> list[str]:
    """Return the names of checkpoint directories, newest step first, committed or not."""
    names = store.list(checkpoints_directory)
    found = [(int(match[1]), match[0]) for match in map(_STEP_NAME.fullmatch, names) if match]
    return [name for _, name in sorted(found, reverse=True)]


def _open_valid(store: Store, directory: str, lineage: Lineage) -> Checkpoint:
    checkpoint = open_checkpoint(store, directory)
    if counts(step=checkpoint.step, attempt=checkpoint.attempt, lineage=lineage):
        return checkpoint
    # A slow fenced process can replace a newer attempt's manifest between its check and its write.
    # The newer records still exist and commit again.
    for attempt, world_size in _complete_attempts(store, directory):
        step = checkpoint.step
        if (
            attempt > checkpoint.attempt
            and counts(step=step, attempt=attempt, lineage=lineage)
            and try_commit(store, directory, step=step, attempt=attempt, world_size=world_size)
        ):
            return open_checkpoint(store, directory)
    overtaken = min(
        a for a, resume in lineage if a > checkpoint.attempt and resume < checkpoint.step
    )
    raise CheckpointCorruptError(
        f"attempt {checkpoint.attempt} committed it after it was fenced: attempt {overtaken} "
        "resumed from an older step",
        attempt=checkpoint.attempt,
        overtaken_by=overtaken,
    )


def _complete_attempts(store: Store, directory: str) -> list[tuple[int, int]]:
    """Return ``(attempt, world_size)`` from the records of rank 0, newest first."""
    found: list[tuple[int, int]] = []
    for name in store.list(directory):
        match = re.fullmatch(r"a(\d+)-r00000\.json", name)
        if match:
            path = join(directory, name)
            try:
                found.append((int(match[1]), from_bytes(store.read(path), where=path).world_size))
            except CheckpointCorruptError:
                continue
    return sorted(found, reverse=True)


def _check_files(checkpoint: Checkpoint) -> None:
    sizes = checkpoint.store.sizes(checkpoint.directory)
    for name, entry in checkpoint.manifest.files.items():
        if "/" in name:
            path = join(checkpoint.directory, name)
            size = checkpoint.store.size(path) if checkpoint.store.exists(path) else None
        else:
            size = sizes.get(name)
        if size != entry.num_bytes:
            what = "is missing" if size is None else f"has {size} bytes, not {entry.num_bytes}"
            raise CheckpointCorruptError(f"file {name} {what}", file=name)


def collect_garbage(
    store: Store,
    checkpoints_directory: str,
    *,
    keep: int,
    lineage: Lineage,
    grace_s: float = GRACE_S,
    now_s: Callable[[], float] = time.time,  # noqa: TID251  processes share no other clock
    require_owner: Callable[[], None] = lambda: None,
) -> list[str]:
    """Delete old checkpoints once; see ``Collector``."""
    collector = Collector(store, checkpoints_directory, keep=keep, grace_s=grace_s, now_s=now_s)
    return collector.collect(lineage, require_owner=require_owner)


class _Seen(NamedTuple):
    """The facts about a complete checkpoint that retention needs."""

    attempt: int
    step: int
    sound_step: int  #: The newest step with finite weights, as this checkpoint records it.
    best: tuple[int, ...]  #: The best steps up to it.
    checked_step: int  #: The newest step known to be computed right, as it records.


class Collector:
    """Deletes directories older than the ``keep`` newest valid checkpoints.

    Newer directories may be unfinished and stay. With fewer than ``keep`` valid checkpoints it
    deletes nothing. It never deletes the newest one with finite weights, nor the newest one up to
    the last check of the machines (``RECHECKED``), nor the best ones that the newest names
    (``best_steps``). A checkpoint that a reader holds (``reading``) stays until the next call. On
    storage without locks a checkpoint is first withdrawn, so that no reader opens it; a call at
    least ``grace_s`` later deletes it.

    It never deletes what the next claimant of the run resumes from: that is at least as new as the
    newest checkpoint here, because the claimant begins after the call of ``require_owner``.

    It remembers what it saw, so that it looks at each checkpoint once. Not thread-safe.

    Args:
        checkpoints_directory: See ``find_committed``.
        keep: At least 1.
        grace_s: How long a withdrawn checkpoint can still be read.
        now_s: The wall clock.
    """

    def __init__(
        self,
        store: Store,
        checkpoints_directory: str,
        *,
        keep: int,
        grace_s: float = GRACE_S,
        now_s: Callable[[], float] = time.time,  # noqa: TID251  processes share no other clock
    ) -> None:
        assert keep >= 1, f"keep={keep} would delete the last committed checkpoint"
        self._store, self._directory = store, checkpoints_directory
        self._keep, self._grace_s, self._now_s = keep, grace_s, now_s
        #: Checkpoints seen to be complete.
        self._complete: dict[str, _Seen] = {}
        #: When checkpoints were withdrawn that are not yet deleted.
        self._withdrawn_s: dict[str, float] = {}
        self._collected_s = -math.inf

    def collect(
        self,
        lineage: Lineage,
        *,
        require_owner: Callable[[], None] = lambda: None,
    ) -> list[str]:
        """Delete the checkpoints that are due, and return their names.

        Args:
            lineage: See ``ucp_core.lineage``.
            require_owner: See ``try_commit``; called after the search, before anything is deleted.
        """
        self._collected_s = self._now_s()
        names = step_names(self._store, self._directory)
        valid = ((name, one) for name in names if (one := self._look(name, lineage)))
        kept = list(islice(valid, self._keep))
        if len(kept) < self._keep:
            return []
        spared = {checkpoint_name(step) for step in kept[0][1].best}
        finite, checked = itertools.tee(itertools.chain(kept, valid))
        spared.add(_newest_finite((name, one[1:3]) for name, one in finite))
        bound = kept[0][1].checked_step
        spared.add(next((name for name, one in checked if one.step <= bound), ""))
        doomed = [name for name in names[names.index(kept[-1][0]) + 1 :] if name not in spared]
        if doomed:
            require_owner()
        return [name for name in doomed if self._delete(name)]

    def collect_sometimes(self, lineage: Lineage, *, require_owner: Callable[[], None]) -> None:
        """Call ``collect``; where each look costs a request, at most every ``grace_s / 60``.

        A withdrawn checkpoint stays for ``grace_s`` anyway, so this delay matters little.
        """
        is_recent = self._now_s() - self._collected_s < self._grace_s / 60
        if self._store.appends or not is_recent:
            self.collect(lineage, require_owner=require_owner)

    def _look(self, name: str, lineage: Lineage) -> _Seen | None:
        """Return the facts about a checkpoint; None if it is not valid."""
        found = self._complete.get(name)
        if found is None or not counts(step=found.step, attempt=found.attempt, lineage=lineage):
            try:
                checkpoint = _open_valid(self._store, join(self._directory, name), lineage)
                _check_files(checkpoint)
            except UcpError:
                self._complete.pop(name, None)
                return None
            found = _Seen(
                checkpoint.attempt,
                checkpoint.step,
                _sound_step(checkpoint),
                tuple(best_steps(checkpoint)),
                _checked_step(checkpoint),
            )
            if not self._store.appends:
                self._complete[name] = found
            self._withdrawn_s.pop(name, None)
        return found

    def _delete(self, name: str) -> bool:
        """Delete one checkpoint if no reader can hold it; return whether it is gone.

        A link stays: somebody made it, and its target does not belong to the run.
        """
        store, directory, now_s = self._store, join(self._directory, name), self._now_s()
        if is_link(store, directory):
            return False
        withdrawn_path = join(directory, _WITHDRAWN_NAME)
        self._complete.pop(name, None)
        if name not in self._withdrawn_s:
            with suppress(_GoneError), _locked(store, join(directory, MANIFEST_NAME)) as held:
                if held is False:
                    return False
                if held is None:
                    # The note comes first: a crash after it leaves a whole checkpoint.
                    note = json.dumps({"withdrawn_s": now_s}).encode()
                    store.write_atomic(withdrawn_path, note, fsync=False)
                # The manifest goes first: a half-deleted checkpoint is not committed.
                store.delete_files([join(directory, MANIFEST_NAME)])
                if held:
                    store.delete(directory)
                    return True
                self._withdrawn_s[name] = now_s
        if name not in self._withdrawn_s:
            self._withdrawn_s[name] = _withdrawn_s(store, withdrawn_path)
        if now_s < self._withdrawn_s[name] + self._grace_s:
            return False
        store.delete(directory)
        del self._withdrawn_s[name]
        return True


class _GoneError(Exception):
    """Nothing is committed there."""


@contextmanager
def _locked(store: Store, path: str) -> Iterator[bool | None]:
    with ExitStack() as stack:
        try:
            # Storage without locks does not check that the file exists.
            if not store.exists(path):
                raise _GoneError
            held = stack.enter_context(store.lock(path, shared=False))
        except StorageError as error:
            if not error.facts.get("missing"):
                raise
            raise _GoneError from error
        yield held


def _withdrawn_s(store: Store, path: str) -> float:
    """Return when the checkpoint was withdrawn; long ago if it was never committed."""
    try:
        return float(json.loads(store.read(path))["withdrawn_s"])
    except StorageError as error:
        if not error.facts.get("missing"):
            raise
        return -math.inf
    except (ValueError, KeyError, TypeError):
        return -math.inf
