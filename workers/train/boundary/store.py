"""Write checkpoints and metrics in the background, in order, and never after the fence.

The training thread copies the state into host memory and continues; one thread per attempt writes.
If a keeper has the snapshots, it stores most states instead. The metrics of a step are written
before its state, so every committed step has its line.

On an object store a write is a request, so lines are held back and written together. Unwritten
lines go into each snapshot (``unwritten``); the attempt that resumes from it writes them.
"""

import itertools
import json
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, Final, cast

from ucp_core.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    StorageError,
    SupersededError,
    UcpError,
)
from ucp_core.native import (
    Collector,
    checkpoint_name,
    open_checkpoint,
    save_rank,
)
from ucp_core.storage import RECENT_S, Buffer, Owner, Store, is_full, join
from workers.collectives import AbortedError, CollectiveError
from workers.protocol import CHECKPOINTS, RESULT, Assignment
from workers.repeated import Repeated
from workers.settings import CheckpointSettings
from workers.snapshot import source_of

#: How often a wait checks whether the attempt was fenced.
_LOOK_S: Final = 0.02
#: Longest pause between two looks for the commit of others in an object store.
_LOOK_REMOTE_S: Final = 1.0
#: How long closing waits for a write that was under way at the fence.
_CLOSE_S_MAX: Final = 5.0
#: Pause between two tries to write to a full storage.
_FULL_PAUSE_S: Final = 2.0
#: If a write is a request, lines are held back until there are this many, or they are this old.
_HELD_LINES: Final = 10
_HELD_S: Final = 10.0
#: Limit of ``unwritten``: the room in a snapshot, and the lines on their way to storage.
_UNWRITTEN_BYTES_MAX: Final = 32 << 10
_UNWRITTEN_LINES_MAX: Final = 4 * _HELD_LINES

log = logging.getLogger(__name__)


class StorageWriter:
    """Writes for one rank of one attempt. The training thread calls it and closes it.

    It raises ``AbortedError`` once the attempt is fenced, and ``SupersededError`` if a later claim
    on the directory counts. ``moved`` is called with the size of each write.
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
        self._owner = Owner(store, directory, assignment.claim)
        guarded = partial(_FencedStore, store, attempt=assignment.attempt, moved=moved)
        self._store = cast("Store", guarded(fenced))
        self._line_store = cast("Store", guarded(self._is_closed_to_lines))
        self._late_until_s = float("-inf")
        #: Pairs of a path and a line without its end; a rank that writes none keeps only the last
        #: ones.
        self._lines: deque[tuple[str, str]] = deque()
        self._held_since_s = float("inf")
        self.holds_lines = not store.appends
        self._writes_lines = not self.holds_lines or assignment.rank == 0
        self._directory = directory
        self._assignment = assignment
        self._settings = settings
        self._committed_step = 0
        self._collector: Collector | None = None
        if assignment.rank == 0 and settings.keep:
            checkpoints = join(directory, CHECKPOINTS)
            self._collector = Collector(self._store, checkpoints, keep=settings.keep)
        self._fenced = fenced
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._error: Exception | None = None
        self._ended, self._moved = threading.Event(), moved
        #: Why nothing can be saved now.
        self.trouble = ""
        self._ends_line: set[str] = set()
        self._late_lines, self._full = Repeated(log), Repeated(log)
        self._thread = threading.Thread(target=self._run, name="storing", daemon=True)
        self._thread.start()

    def append(self, path: str, line: Mapping[str, Any]) -> None:
        """Append a JSON line to a file of the run directory, in the background and in order.

        Every rank may call it with the same line if ``holds_lines`` is set: the others only
        remember it.
        """
        self.append_text(path, json.dumps(line))

    def append_text(self, path: str, line: str) -> None:
        """Append a line that is already JSON; see ``append``."""
        if isinstance(self._error, SupersededError):
            raise self._error
        self._lines.append((path, line))
        if self._writes_lines:
            self._tasks.put(self._try_due_lines if self.holds_lines else self._try_lines)
        elif len(self._lines) > _UNWRITTEN_LINES_MAX:
            self._lines.popleft()

    def write(self, path: str, chunks: Iterable[Buffer]) -> None:
        """Write a file of the run directory now; it appears when the last chunk is written.

        Call it in the training thread.
        """
        try:
            self._owner.require(within_s=RECENT_S)
            self._store.write_file(join(self._directory, path), chunks, fsync=self._settings.fsync)
        except _WriteRefused as refused:
            raise AbortedError(
                f"attempt {self._assignment.attempt} was fenced while {path} was written",
                attempt=self._assignment.attempt,
            ) from refused

    def read(self, path: str, timeout_s: float) -> bytes | None:
        """Return a file of the run directory; None if storage does not answer in time."""
        answers: queue.SimpleQueue[bytes | Exception] = queue.SimpleQueue()

        def read() -> None:
            try:
                answers.put(self._store.read(join(self._directory, path)))
            except Exception as error:  # noqa: BLE001  raised again in the training thread
                answers.put(error)

        self._tasks.put(read)
        try:
            found = answers.get(timeout=timeout_s if timeout_s < math.inf else None)
        except queue.Empty:
            return None
        if isinstance(found, Exception):
            raise found
        return found

    def write_once(self, folder: str, files: Mapping[str, bytes]) -> None:
        """Write the missing files of a folder of the run directory, in the background.

        If storage refuses a version, the next attempt writes it.
        """

        def write() -> None:
            path = join(self._directory, folder)
            try:
                there = self._store.list(path)
                self._owner.require(within_s=RECENT_S)
                for name in sorted(files.keys() - set(there)):
                    self._store.write_atomic(join(path, name), files[name], fsync=False)
            except StorageError as error:
                log.warning("%s is not written, left to the next attempt: %s", folder, error)

        self._tasks.put(write)

    def unwritten(self) -> list[tuple[str, str]]:
        """Return the path and the text of the newest lines that may not be written yet."""
        lines = list(self._lines)[-_UNWRITTEN_LINES_MAX:]
        while sum(len(path) + len(line) for path, line in lines) > _UNWRITTEN_BYTES_MAX:
            lines.pop(0)
        return lines

    def wait_appended(self, timeout_s: float) -> None:
        """Wait at most ``timeout_s`` until all lines so far are written or held back."""
        if not self.holds_lines and not self._is_closed_to_lines():
            written = threading.Event()
            self._tasks.put(written.set)
            written.wait(timeout_s)

    def append_late(self, until_s: float) -> None:
        """Write lines until ``until_s`` even after the fence, because their steps may count.

        Call it before the rank reports that it has left. Writes held-back lines too.
        """
        self._late_until_s = until_s
        self._tasks.put(self._try_lines)

    def save(self, step: int, **state: Any) -> None:
        """Write a ``state``, with the tensors, extra and param_groups of ``save_rank``.

        Do not change its tensors before ``wait_idle`` returns.
        """
        self._idle.clear()
        what = f"step {step}"
        self._tasks.put(lambda: self._when_there_is_room(what, lambda: self._save(step, state)))

    def write_result(self, document: bytes) -> None:
        """Write the result of the run; return when that is done."""
        path = join(self._directory, RESULT)
        self._idle.clear()

        def write() -> None:
            self._store.write_atomic(path, document, fsync=False)
            self._idle.set()

        self._tasks.put(lambda: self._when_there_is_room("the result", write))
        self.wait_idle()

    @property
    def is_idle(self) -> bool:
        """Return whether no save is under way."""
        return self._idle.is_set()

    def wait_idle(self) -> None:
        """Wait until no save is under way."""
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
        """Wait until this attempt has committed the checkpoint of ``step``."""
        self.wait_idle()
        directory = join(self._directory, CHECKPOINTS, checkpoint_name(step))
        deadline_s = time.monotonic() + timeout_s
        pause_s = _LOOK_S / 4
        while self._committed_step != step and not self._is_committed(directory):
            self.wait_idle()
            if time.monotonic() > deadline_s:
                raise CollectiveError(
                    f"the checkpoint of step {step} was not committed within {timeout_s} s: a "
                    "rank has not written its part",
                    attempt=self._assignment.attempt,
                    op="commit",
                )
            time.sleep(pause_s)
            if self.holds_lines:
                # Every look costs a request.
                pause_s = min(2 * pause_s, _LOOK_REMOTE_S)

    def close(self) -> bool:
        """End the thread; return whether it has released its tensors.

        Queued lines are written first, unless the attempt is fenced.
        """
        self._ended.set()
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
        while (task := self._next_task()) is not None:
            try:
                task()
            except _WriteRefused:
                log.info("write_refused", extra={"attempt": self._assignment.attempt})
            except Exception as error:  # noqa: BLE001  raised again in the training thread
                self._error = error
                self._idle.set()
            self.trouble = ""

    def _next_task(self) -> Callable[[], None] | None:
        try:
            left_s = max(self._held_since_s + _HELD_S - time.monotonic(), 0.0)
            return self._tasks.get(timeout=left_s if left_s < math.inf else None)
        except queue.Empty:
            return self._try_lines

    def _is_closed_to_lines(self) -> bool:
        return self._fenced() and time.monotonic() > self._late_until_s

    def _try_due_lines(self) -> None:
        """Write the lines if there are many; otherwise note when the wait for more began."""
        if len(self._lines) >= _HELD_LINES or time.monotonic() < self._late_until_s:
            self._try_lines()
        elif self._held_since_s == math.inf:
            self._held_since_s = time.monotonic()

    def _try_lines(self) -> None:
        """Write the lines not written yet; if storage refuses, retry with the next line."""
        self._held_since_s = math.inf
        try:
            self._write_lines()
        except StorageError as error:
            self._late_lines.failed("lines of metrics are not written", error)
        else:
            self._late_lines.passed()

    def _write_lines(self) -> None:
        while self._lines and self._writes_lines and not self._is_closed_to_lines():
            name = self._lines[0][0]
            path = join(self._directory, name)
            # A full disk may take half of the text. If it is one line, that line is written again.
            ahead = self._lines.copy() if self.holds_lines else [self._lines[0]]
            _, first = next(itertools.groupby(ahead, key=itemgetter(0)))
            lines = [text for _, text in first]
            if path not in self._ends_line and not self.holds_lines:
                _end_line(self._line_store, path)
            self._ends_line.discard(path)
            self._owner.require(within_s=RECENT_S)
            self._line_store.append(path, "".join(f"{line}\n" for line in lines).encode())
            self._ends_line.add(path)
            for _ in lines:
                self._lines.popleft()

    def _when_there_is_room(self, what: str, write: Callable[[], None]) -> None:
        """Write; while the storage is full, wait until people make room."""
        while True:
            try:
                write()
            except StorageError as error:
                if not is_full(error):
                    raise
                self.trouble = f"{what} is not stored; trying again: {error}"
                self._full.failed(f"{what} is not stored", error)
            else:
                self._full.passed()
                return
            # The wait has a reason, so the watch must not judge this rank to hang.
            self._moved(1)
            if self._ended.wait(_FULL_PAUSE_S) or self._fenced():
                raise _WriteRefused("the attempt ended before there was room")

    def _save(self, step: int, state: Mapping[str, Any]) -> None:
        if self._fenced():
            return
        assignment = self._assignment
        checkpoints = join(self._directory, CHECKPOINTS)
        # One look per attempt is enough for parts: no later claimant reuses the number of this
        # attempt, so it writes no files with these names.
        self._owner.require(within_s=math.inf)
        self._write_lines()
        saved = save_rank(
            self._store,
            join(checkpoints, checkpoint_name(step)),
            step=step,
            attempt=assignment.attempt,
            rank=assignment.rank,
            world_size=assignment.layout.world_size,
            **state,
            source=source_of(assignment),
            fsync=self._settings.fsync,
            require_owner=self._owner.require,
        )
        if saved.committed:
            self._committed_step = step
        # If the write failed, ``_run`` sets the error before it sets idle.
        self._idle.set()
        if self._collector is not None:
            try:
                self._collector.collect_sometimes(
                    assignment.lineage, require_owner=self._owner.require
                )
            except SupersededError:
                raise
            except UcpError as error:
                # The checkpoint is committed anyway; the next one retries.
                log.warning(
                    "old checkpoints are not deleted; the next checkpoint tries again: %s", error
                )


def _end_line(store: Store, path: str) -> None:
    """End the last line of the file if its writer died in the middle of it."""
    size_bytes = store.size(path) if store.exists(path) else 0
    if size_bytes and store.read_range(path, size_bytes - 1, 1) != b"\n":
        store.append(path, b"\n")


class _WriteRefused(Exception):  # noqa: N818  not an error: the fence has worked
    """The attempt was fenced before a write."""


#: Methods of a store that change it.
_WRITES: Final = frozenset({"write_atomic", "append", "delete", "delete_files", "makedirs"})


@dataclass(frozen=True, slots=True)
class _FencedStore:
    """A store that refuses to write once the attempt is fenced, but still reads."""

    store: Store
    fenced: Callable[[], bool]
    attempt: int
    moved: Callable[[int], None]

    def __getattr__(self, name: str) -> Any:
        """Forward; before a write look for the fence."""
        if name in _WRITES:
            self._check()
        return getattr(self.store, name)

    def write_file(self, path: str, chunks: Iterable[Buffer], *, fsync: bool) -> int:
        """Forward; stop between two chunks after the fence."""
        return self.store.write_file(path, self._while_allowed(chunks), fsync=fsync)

    def _while_allowed(self, chunks: Iterable[Buffer]) -> Iterator[Buffer]:
        for chunk in chunks:
            self._check()
            yield chunk
            self.moved(len(chunk))
        self._check()

    def _check(self) -> None:
        if self.fenced():
            raise _WriteRefused(f"attempt {self.attempt} was fenced")
