"""Write to storage in the background: the controller continues to decide while storage stalls.

If each write is a request, the lines of the journal first go into the spool, a file in the memory
of the controller's machine. A thread sends the collected lines from there as one piece. A restarted
controller finds the spool and sends the rest. If the machine is lost, so are the unsent lines: the
run resumes from what storage holds.
"""

import logging
import posixpath
import threading
import time
from typing import Final

from orchestrator.report import JOURNAL
from ucp_core.errors import StorageError
from ucp_core.storage import LocalStore, PieceWriter, Store, appended_sizes, join

log = logging.getLogger(__name__)

#: Lines on which no decision depends wait this long, and are sent with later ones.
PIECE_S: Final = 10.0
#: Pause after storage has refused and the store's own retries are used up.
PAUSE_S: Final = 1.0
#: How long the end of a run waits for storage. If that fails, Ray restarts the controller.
CLOSE_S: Final = 60.0


class Sender:
    """Writes documents, and the pieces of one file, in a separate thread until ``close``.

    Args:
        journal_path: The file to which ``add`` appends, in pieces; it must have no other writer.
        spool: Folder for unsent lines; it outlives the process.
        piece_s: How long lines that are not urgent may wait.
        pause_s: Pause after a write that failed.
    """

    def __init__(
        self,
        store: Store,
        *,
        journal_path: str,
        spool: str,
        piece_s: float = PIECE_S,
        pause_s: float = PAUSE_S,
    ) -> None:
        self._store = store
        self._journal = PieceWriter(store, journal_path, number=1)
        self._spool_path = join(spool, posixpath.basename(journal_path))
        self._spool = LocalStore()
        self._piece_s, self._pause_s = piece_s, pause_s
        self._changed = threading.Condition()
        self._lines = bytearray()
        self._documents: dict[str, bytes] = {}
        self._due_s = float("inf")
        self._is_busy = self._is_closing = self._is_failing = False
        self._refusal: StorageError | None = None
        threading.Thread(target=self._run, name="sender", daemon=True).start()

    def add(self, lines: bytes, *, hurry: bool) -> None:
        """Append to the journal, at once if ``hurry``, else within ``piece_s``.

        Raise ``StorageError`` if the spool is full, or another process writes the same journal.
        """
        if self._refusal is not None:
            raise self._refusal
        self._spool.append(self._spool_path, lines)
        with self._changed:
            self._lines += lines
            due_s = time.monotonic() + (0.0 if hurry else self._piece_s)
            if due_s < self._due_s:
                self._due_s = due_s
                self._changed.notify_all()

    def put(self, path: str, document: bytes) -> None:
        """Write or replace a file; a newer document for the same path replaces a pending one."""
        with self._changed:
            self._documents[path] = document
            self._changed.notify_all()

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Write what is left, and end the thread."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
            is_done = self._changed.wait_for(lambda: not self._has_more(), timeout_s)
        if self._refusal is not None:
            raise self._refusal
        if not is_done:
            raise StorageError(f"the run's last lines could not be written within {timeout_s:g} s")
        self._spool.delete(posixpath.dirname(self._spool_path))

    def _has_more(self) -> bool:
        is_over = self._refusal is not None
        return not is_over and bool(self._lines or self._documents or self._is_busy)

    def _run(self) -> None:
        while self._refusal is None:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
                while not (self._is_due() or self._documents):
                    if self._is_closing:
                        return
                    left_s = self._due_s - time.monotonic()
                    self._changed.wait(left_s if left_s < float("inf") else None)
                self._is_busy = True
                lines, documents = b"", self._documents
                self._documents = {}
                if self._is_due():
                    lines, self._lines = bytes(self._lines), bytearray()
                    self._due_s = float("inf")
            for path, document in documents.items():
                self._write(path, document)
            while lines and not self._send(lines):
                time.sleep(self._pause_s)

    def _is_due(self) -> bool:
        return bool(self._lines) and (self._is_closing or time.monotonic() >= self._due_s)

    def _write(self, path: str, document: bytes) -> None:
        try:
            self._store.write_atomic(path, document, fsync=False)
            self._is_failing = False
        except StorageError as error:
            self._failed(path, error)
            with self._changed:
                self._documents.setdefault(path, document)
            time.sleep(self._pause_s)

    def _send(self, lines: bytes) -> bool:
        """Send a piece; return whether no retry is needed."""
        try:
            self._journal.append(lines)
            self._is_failing = False
        except StorageError as error:
            if error.facts.get("taken"):
                log.critical("another controller writes the journal: %s", error)
                self._refusal = error
                return True
            self._failed("journal", error)
            return False
        return True

    def _failed(self, what: str, error: StorageError) -> None:
        if not self._is_failing:
            log.warning("the %s is not written yet; trying again: %s", what, error)
        self._is_failing = True


def send_rest(store: Store, run_path: str, spool: str) -> None:
    """Send the lines that a dead controller left in the spool, and empty it.

    Raise ``StorageError`` if they cannot be sent or read.
    """
    local = LocalStore()
    directory = join(run_path, JOURNAL)
    spooled = local.sizes(spool)
    sent = appended_sizes(store, directory) if spooled else {}
    for name, num_bytes in spooled.items():
        sent_bytes = sent.get(name, 0)
        if num_bytes > sent_bytes:
            path = join(spool, name)
            rest = local.read_range(path, sent_bytes, num_bytes - sent_bytes)
            PieceWriter(store, join(directory, name)).append(rest)
    local.delete(spool)
