"""Copy the output of a script to ``RUN_DIR/logs/``, one log per attempt and rank.

A local file system gets ``logs/attempt-0001/rank0.log``, to which text is appended. Object stores
rewrite a file to append to it, so they get numbered pieces: ``rank0-0001.log``, ``rank0-0002.log``,
...

A separate thread writes. Printing never waits for storage and never fails because of it: refused
output is retried, and output beyond ``PENDING_BYTES_MAX`` is dropped and counted.
"""

import atexit
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any, Final, TextIO

from ucp_core.storage import LocalStore, Store, join
from workers.protocol import LOGS

#: Limit for a rank's output that waits for storage.
PENDING_BYTES_MAX: Final = 1 << 20
#: Time between two writes: a person at a terminal notices no delay, and if each step prints a line,
#: one write has those of about ten steps.
LOCAL_S: Final = 0.2
#: Time between two pieces: each is a request, which costs money.
PIECE_S: Final = 10.0
#: How long the end of an attempt, or of the process, waits for the last write.
_CLOSE_S_MAX: Final = 2.0

log = logging.getLogger(__name__)


class OutputLog:
    """The log of one rank in one attempt.

    ``interval_s`` is the time between two writes; None for the store's default.
    """

    def __init__(
        self,
        store: Store,
        directory: str,
        *,
        attempt: int,
        rank: int,
        interval_s: float | None = None,
    ) -> None:
        self._store = store
        self._path = join(directory, LOGS, f"attempt-{attempt:04d}", f"rank{rank}")
        self._appends = isinstance(store, LocalStore)
        self._interval_s = interval_s or (LOCAL_S if self._appends else PIECE_S)
        self._lock = threading.Lock()
        self._pending = bytearray()
        self._num_dropped = self._num_pieces = 0
        self._was_refused = False
        self._pid = os.getpid()
        self._has_more, self._is_closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._write_all, name="output", daemon=True)
        self._thread.start()
        # An exception may end the process during an attempt.
        atexit.register(self.close)

    def add(self, text: str) -> None:
        """Have ``text`` written soon. Any thread may call this; it does not block."""
        if os.getpid() != self._pid:
            # A forked process does not have the writing thread, and may have inherited a held lock.
            return
        data = text.encode(errors="backslashreplace")
        with self._lock:
            if len(self._pending) + len(data) > PENDING_BYTES_MAX:
                self._num_dropped += len(data)
                return
            self._pending += data
        self._has_more.set()

    def close(self, wait_s: float = _CLOSE_S_MAX) -> None:
        """Write the rest and end the thread; return after ``wait_s`` at the latest."""
        atexit.unregister(self.close)
        self._is_closed.set()
        self._has_more.set()
        self._thread.join(wait_s)

    def _write_all(self) -> None:
        while not self._is_closed.is_set():
            self._has_more.wait()
            self._write()
            self._is_closed.wait(self._interval_s)
        self._write()

    def _write(self) -> None:
        self._has_more.clear()
        with self._lock:
            data, self._pending = self._pending, bytearray()
            num_dropped, self._num_dropped = self._num_dropped, 0
        if num_dropped:
            data += f"[{num_dropped} bytes of output were dropped: storage is slow]\n".encode()
        if not data:
            return
        try:
            if self._appends:
                self._store.append(f"{self._path}.log", data)
            else:
                name = f"{self._path}-{self._num_pieces + 1:04d}.log"
                self._store.write_atomic(name, data, fsync=False)
                self._num_pieces += 1
            self._was_refused = False
        except Exception as error:  # noqa: BLE001  output is not worth a run
            if not self._was_refused:
                log.warning("output is not written to %s; trying again: %s", self._path, error)
            self._was_refused = True
            with self._lock:
                self._pending[:0] = data
            self._has_more.set()


class HeldOutput:
    """Output from before there was a log; the first log gets it."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def add(self, text: str) -> None:
        """Keep ``text``."""
        self._texts.append(text)

    def hand_over(self, output: OutputLog) -> None:
        """Pass everything to ``output``."""
        texts, self._texts = self._texts, []
        output.add("".join(texts))


class _Copied:
    """A text stream whose output also goes to the log of the attempt, while there is one."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.log: OutputLog | HeldOutput | None = None

    def write(self, text: str) -> int:
        count = self.stream.write(text)
        if (output := self.log) is not None:
            output.add(text)
        return count

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


#: The wrapped streams by their name in ``sys``. A script's logging handlers keep the stream of
#: their first attempt, so each stream is wrapped only once.
_copied: Final[dict[str, _Copied]] = {}


@contextlib.contextmanager
def log_of(output: OutputLog | HeldOutput) -> Iterator[None]:
    """Copy to ``output`` what any thread prints while the block runs."""
    before = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    for name, stream in before.items():
        if name not in _copied or _copied[name].stream is not stream:
            _copied[name] = _Copied(stream)
        _copied[name].log = output
        setattr(sys, name, _copied[name])
    try:
        yield
    finally:
        for name, stream in before.items():
            _copied[name].log = None
            setattr(sys, name, stream)
