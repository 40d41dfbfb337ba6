"""Checkpoints and metrics leave in the background, in order, and never after the fence.

The training thread copies the state into host memory and goes on; one thread per attempt writes.
Where a keeper holds snapshots only few states come this way: the keeper stores the others.
Lines of metrics go the same way before the state that they tell of, so a committed step always
has its line.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ucp_core.errors import CheckpointCorruptError, CheckpointNotFoundError, StorageError, UcpError
from ucp_core.native import (
    LocalTensor,
    checkpoint_name,
    collect_garbage,
    open_checkpoint,
    save_rank,
)
from ucp_core.storage import Buffer, ReadRange, Store, join
from workers.collectives import AbortedError, CollectiveError
from workers.protocol import Assignment
from workers.settings import CHECKPOINTS, CheckpointSettings
from workers.snapshot import source_of

__all__ = ["CHECKPOINTS", "SavedState", "StorageWriter", "append_json"]

#: How often a wait looks whether the attempt was fenced.
_LOOK_S: Final = 0.02
#: A fenced thread that is in the middle of a write gets this long to notice.
_CLOSE_S_MAX: Final = 5.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """A state on its way to storage; see ``ucp_core.native.save_rank``."""

    step: int
    tensors: Sequence[LocalTensor]
    extra: Mapping[str, Any]
    param_groups: Sequence[Mapping[str, Any]]


class StorageWriter:
    """Writes for one rank of one attempt. The training thread calls it and closes it.

    Args:
        store: Where the run directory is.
        directory: Its path.
        assignment: Attempt, rank and layout that the checkpoints are saved under.
        settings: How often, how many, how safe.
        fenced: Whether the attempt may write no more.
        moved: Called with the size of what was written.
    """

    def __init__(
        self,
        *,
        store: Store,
        directory: str,
        assignment: Assignment,
        settings: CheckpointSettings,
        fenced: Callable[[], bool],
        moved: Callable[[int], None],
    ) -> None:
        self._store = _FencedStore(store, fenced, assignment.attempt, moved)
        self._told = _FencedStore(store, self._is_mute, assignment.attempt, moved)
        self._told_until_s = float("-inf")
        self._untold: deque[tuple[str, Mapping[str, Any]]] = deque()
        self._directory = directory
        self._assignment = assignment
        self._settings = settings
        self._fenced = fenced
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._error: Exception | None = None
        self._whole: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="storing", daemon=True)
        self._thread.start()

    def append(self, path: str, line: Mapping[str, Any]) -> None:
        """Add a JSON line to a file of the run directory, behind what was asked for before."""
        self._tasks.put(lambda: self._append(join(self._directory, path), line))

    def wait_appended(self, timeout_s: float) -> None:
        """Return when what was to be added so far is written, or after ``timeout_s``."""
        if not self._is_mute():
            told = threading.Event()
            self._tasks.put(told.set)
            told.wait(timeout_s)

    def append_late(self, until_s: float) -> None:
        """Add lines until then, though the attempt be fenced: those of steps that may yet count.

        Call it before the rank says that it has left; also what was held back is written.
        """
        self._told_until_s = until_s
        self._tasks.put(self._tell)

    def save(self, state: SavedState) -> None:
        """Write ``state``; its tensors are left alone until ``wait_idle`` returns."""
        self._idle.clear()
        self._tasks.put(lambda: self._save(state))

    @property
    def is_idle(self) -> bool:
        """Return whether no save is under way."""
        return self._idle.is_set()

    def wait_idle(self) -> None:
        """Return when no save is under way.

        Raises:
            AbortedError: The attempt was fenced.
            UcpError: A write failed.
        """
        while not self._idle.wait(_LOOK_S):
            if self._fenced():
                break
        if self._fenced():
            raise AbortedError(
                f"attempt {self._assignment.attempt} was fenced while a checkpoint was written",
                attempt=self._assignment.attempt,
            )
        if self._error is not None:
            raise self._error

    def wait_committed(self, step: int, *, timeout_s: float) -> None:
        """Return when the checkpoint of ``step`` is committed by this attempt.

        Raises:
            AbortedError: The attempt was fenced.
            CollectiveError: The other ranks' parts did not appear in time.
        """
        self.wait_idle()
        directory = join(self._directory, CHECKPOINTS, checkpoint_name(step))
        deadline_s = time.monotonic() + timeout_s
        while not self._is_committed(directory):
            self.wait_idle()
            if time.monotonic() > deadline_s:
                raise CollectiveError(
                    f"the checkpoint of step {step} was not committed within {timeout_s} s: a "
                    "rank has not written its part",
                    attempt=self._assignment.attempt,
                    op="commit",
                )
            time.sleep(_LOOK_S / 4)

    def close(self) -> bool:
        """End the thread; return whether it has let go of the tensors it was given.

        What is queued is still written, unless the attempt is fenced.
        """
        self._tasks.put(self._tell)
        self._tasks.put(None)
        self._thread.join(_CLOSE_S_MAX)
        return not self._thread.is_alive()

    def _is_committed(self, directory: str) -> bool:
        try:
            return open_checkpoint(self._store, directory).attempt == self._assignment.attempt
        except (CheckpointNotFoundError, CheckpointCorruptError):
            # What an older attempt left may be damaged; the commit puts a sound one in its place.
            return False

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except _WriteRefused:
                log.info("write_refused", extra={"attempt": self._assignment.attempt})
            except Exception as error:  # noqa: BLE001  raised again in the training thread
                self._error = error
                self._idle.set()

    def _is_mute(self) -> bool:
        return self._fenced() and time.monotonic() > self._told_until_s

    def _append(self, path: str, line: Mapping[str, Any]) -> None:
        self._untold.append((path, line))
        self._tell()

    def _tell(self) -> None:
        """Write the lines that are not written yet; what cannot be is tried with the next one."""
        try:
            self._tell_all()
        except StorageError as error:
            log.warning("line_untold", extra={"line": self._untold[0], "error": str(error)})

    def _tell_all(self) -> None:
        while self._untold and not self._is_mute():
            path, line = self._untold[0]
            if path not in self._whole:
                _end_line(self._told, path)
            # A storage that is full may take half a line.
            self._whole.discard(path)
            append_json(self._told, path, line)
            self._whole.add(path)
            self._untold.popleft()

    def _save(self, state: SavedState) -> None:
        if self._fenced():
            return
        assignment = self._assignment
        checkpoints = join(self._directory, CHECKPOINTS)
        self._tell_all()
        save_rank(
            self._store,
            join(checkpoints, checkpoint_name(state.step)),
            step=state.step,
            attempt=assignment.attempt,
            rank=assignment.rank,
            world_size=assignment.layout.world_size,
            tensors=state.tensors,
            extra=state.extra,
            param_groups=state.param_groups,
            source=source_of(assignment),
            fsync=self._settings.fsync,
        )
        # A write that fails is known before anybody waits no longer: see ``_run``.
        self._idle.set()
        if assignment.rank == 0 and self._settings.keep:
            try:
                collect_garbage(
                    self._store,
                    checkpoints,
                    keep=self._settings.keep,
                    lineage=assignment.lineage,
                )
            except UcpError as error:
                # What was written is committed all the same; the next one tries again.
                log.warning("not_collected", extra={"reason": str(error)})


def append_json(store: Store, path: str, line: Mapping[str, Any]) -> None:
    """Add one JSON line to the file at ``path``."""
    store.append(path, (json.dumps(line) + "\n").encode())


def _end_line(store: Store, path: str) -> None:
    """End the last line of the file, if there is one and whoever wrote it died within it."""
    size_bytes = store.size(path) if store.exists(path) else 0
    if size_bytes and store.read_range(path, size_bytes - 1, 1) != b"\n":
        store.append(path, b"\n")


class _WriteRefused(Exception):  # noqa: N818  not an error: the fence did what it is for
    """The attempt was fenced before a write."""


class _FencedStore:
    """A store that changes nothing once the attempt is fenced; reading goes on."""

    def __init__(
        self,
        store: Store,
        fenced: Callable[[], bool],
        attempt: int,
        moved: Callable[[int], None],
    ) -> None:
        self._store = store
        self._fenced = fenced
        self._attempt = attempt
        self._moved = moved
        self.request_bytes = store.request_bytes
        self.read = store.read
        self.read_range = store.read_range
        self.list = store.list
        self.sizes = store.sizes
        self.exists = store.exists
        self.size = store.size
        self.lock = store.lock

    def read_ranges(self, path: str, ranges: Sequence[ReadRange]) -> None:
        """Do as the store does."""
        self._store.read_ranges(path, ranges)

    def write_atomic(
        self, path: str, data: Buffer, *, fsync: bool, exclusive: bool = False
    ) -> bool:
        """Do as the store does."""
        self._check()
        return self._store.write_atomic(path, data, fsync=fsync, exclusive=exclusive)

    def write_file(self, path: str, chunks: Iterable[Buffer], *, fsync: bool) -> int:
        """Do as the store does; stops between two chunks."""
        return self._store.write_file(path, self._while_allowed(chunks), fsync=fsync)

    def append(self, path: str, data: Buffer, *, fsync: bool = False) -> None:
        """Do as the store does."""
        self._check()
        self._store.append(path, data, fsync=fsync)

    def delete(self, path: str) -> None:
        """Do as the store does."""
        self._check()
        self._store.delete(path)

    def makedirs(self, path: str) -> None:
        """Do as the store does."""
        self._check()
        self._store.makedirs(path)

    def _while_allowed(self, chunks: Iterable[Buffer]) -> Iterator[Buffer]:
        for chunk in chunks:
            self._check()
            yield chunk
            self._moved(len(chunk))
        self._check()

    def _check(self) -> None:
        if self._fenced():
            raise _WriteRefused(f"attempt {self._attempt} was fenced")
