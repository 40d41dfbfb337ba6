"""Write checkpoints and metrics in the background, in order, and never after the fence.

The training thread copies the state into host memory and continues; one thread per attempt writes.
If a keeper has the snapshots, it stores most states instead. The metrics of a step are written
before its state, so every committed step has its line.
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
from typing import Any, Final, ParamSpec, TypeVar

from ucp_core.errors import CheckpointCorruptError, CheckpointNotFoundError, StorageError, UcpError
from ucp_core.native import (
    LocalTensor,
    checkpoint_name,
    collect_garbage,
    open_checkpoint,
    save_rank,
)
from ucp_core.storage import Buffer, Store, join
from workers.collectives import AbortedError, CollectiveError
from workers.protocol import Assignment
from workers.settings import CHECKPOINTS, CheckpointSettings
from workers.snapshot import source_of

__all__ = ["CHECKPOINTS", "SavedState", "StorageWriter", "append_json"]

#: How often a wait checks whether the attempt was fenced.
_LOOK_S: Final = 0.02
#: How long closing waits for a write that was under way at the fence.
_CLOSE_S_MAX: Final = 5.0

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """A state to write; see ``ucp_core.native.save_rank``."""

    step: int
    tensors: Sequence[LocalTensor]
    extra: Mapping[str, Any]
    param_groups: Sequence[Mapping[str, Any]]


class StorageWriter:
    """Writes for one rank of one attempt. The training thread calls it and closes it.

    Args:
        store: The store of the run directory.
        directory: Its path.
        assignment: Attempt, rank and layout of the checkpoints.
        settings: Settings of checkpoints.
        fenced: Returns whether the attempt was fenced.
        moved: Called with the size of each write.
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
        self._line_store = _FencedStore(store, self._is_closed_to_lines, assignment.attempt, moved)
        self._late_until_s = float("-inf")
        self._lines: deque[tuple[str, Mapping[str, Any]]] = deque()
        self._directory = directory
        self._assignment = assignment
        self._settings = settings
        self._fenced = fenced
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._error: Exception | None = None
        self._ends_line: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="storing", daemon=True)
        self._thread.start()

    def append(self, path: str, line: Mapping[str, Any]) -> None:
        """Append a JSON line to a file of the run directory, in the background and in order."""
        self._tasks.put(lambda: self._append(join(self._directory, path), line))

    def wait_appended(self, timeout_s: float) -> None:
        """Return when all lines so far are written, or after ``timeout_s``."""
        if not self._is_closed_to_lines():
            written = threading.Event()
            self._tasks.put(written.set)
            written.wait(timeout_s)

    def append_late(self, until_s: float) -> None:
        """Write lines until ``until_s`` even after the fence, because their steps may count.

        Call it before the rank reports that it has left. Writes the lines held back, too.
        """
        self._late_until_s = until_s
        self._tasks.put(self._try_lines)

    def save(self, state: SavedState) -> None:
        """Write ``state``. Do not change its tensors before ``wait_idle`` returns."""
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
        """End the thread; return whether it has released the tensors that it was given.

        What is queued is written first, unless the attempt is fenced.
        """
        self._tasks.put(self._try_lines)
        self._tasks.put(None)
        self._thread.join(_CLOSE_S_MAX)
        return not self._thread.is_alive()

    def _is_committed(self, directory: str) -> bool:
        try:
            return open_checkpoint(self._store, directory).attempt == self._assignment.attempt
        except (CheckpointNotFoundError, CheckpointCorruptError):
            # An older attempt may have left a damaged one, which the commit replaces.
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

    def _is_closed_to_lines(self) -> bool:
        return self._fenced() and time.monotonic() > self._late_until_s

    def _append(self, path: str, line: Mapping[str, Any]) -> None:
        self._lines.append((path, line))
        self._try_lines()

    def _try_lines(self) -> None:
        """Write the lines not written yet; if storage refuses, retry with the next line."""
        try:
            self._write_lines()
        except StorageError as error:
            log.warning("line_not_written", extra={"line": self._lines[0], "error": str(error)})

    def _write_lines(self) -> None:
        while self._lines and not self._is_closed_to_lines():
            path, line = self._lines[0]
            if path not in self._ends_line:
                _end_line(self._line_store, path)
            # Full storage may take half a line.
            self._ends_line.discard(path)
            append_json(self._line_store, path, line)
            self._ends_line.add(path)
            self._lines.popleft()

    def _save(self, state: SavedState) -> None:
        if self._fenced():
            return
        assignment = self._assignment
        checkpoints = join(self._directory, CHECKPOINTS)
        self._write_lines()
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
        # If the write failed, ``_run`` sets the error before it sets idle.
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
                # The checkpoint is committed all the same; the next one retries.
                log.warning("not_collected", extra={"reason": str(error)})


def append_json(store: Store, path: str, line: Mapping[str, Any]) -> None:
    """Append a JSON line to the file at ``path``."""
    store.append(path, (json.dumps(line) + "\n").encode())


def _end_line(store: Store, path: str) -> None:
    """End the last line of the file if its writer died in the middle of it."""
    size_bytes = store.size(path) if store.exists(path) else 0
    if size_bytes and store.read_range(path, size_bytes - 1, 1) != b"\n":
        store.append(path, b"\n")


class _WriteRefused(Exception):  # noqa: N818  not an error: the fence did what it is for
    """The attempt was fenced before a write."""


class _FencedStore:
    """A store that refuses to write once the attempt is fenced, and still reads."""

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
        self.read_ranges = store.read_ranges
        self.list = store.list
        self.sizes = store.sizes
        self.exists = store.exists
        self.size = store.size
        self.lock = store.lock
        self.write_atomic = self._unless_fenced(store.write_atomic)
        self.append = self._unless_fenced(store.append)
        self.delete = self._unless_fenced(store.delete)
        self.makedirs = self._unless_fenced(store.makedirs)

    def write_file(self, path: str, chunks: Iterable[Buffer], *, fsync: bool) -> int:
        """Forward; stop between two chunks after the fence."""
        return self._store.write_file(path, self._while_allowed(chunks), fsync=fsync)

    def _unless_fenced(self, write: Callable[P, T]) -> Callable[P, T]:
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            self._check()
            return write(*args, **kwargs)

        return checked

    def _while_allowed(self, chunks: Iterable[Buffer]) -> Iterator[Buffer]:
        for chunk in chunks:
            self._check()
            yield chunk
            self._moved(len(chunk))
        self._check()

    def _check(self) -> None:
        if self._fenced():
            raise _WriteRefused(f"attempt {self._attempt} was fenced")
