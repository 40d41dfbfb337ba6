"""The journal on storage: a segment per incarnation of the controller, a JSON object per line."""

import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from orchestrator.core import JournalPlace, is_event, without_late_lines
from orchestrator.report import JOURNAL
from orchestrator.shell.storage.sender import PAUSE_S, Sender
from ucp_core.errors import StorageError
from ucp_core.storage import (
    Store,
    appended_sizes,
    is_full,
    join,
    read_all_appended,
    read_appended,
)

log = logging.getLogger(__name__)

#: A segment is scanned in pieces of this size.
CHUNK_BYTES = 64 << 10


def read_segments(store: Store, run_path: str) -> list[bytes]:
    """Return the valid part of every segment in the run directory, oldest first."""
    found = read_all_appended(store, join(run_path, JOURNAL))
    return without_late_lines([found[name] for name in _segments(found)])


def segment_sizes(store: Store, run_path: str) -> list[int]:
    """Return the size of every segment in the run directory in bytes, oldest first."""
    sizes = appended_sizes(store, join(run_path, JOURNAL))
    return [sizes[name] for name in _segments(sizes)]


def read_from(store: Store, run_path: str, *, number: int, offset_bytes: int) -> list[bytes]:
    """Return the valid part of segment ``number`` (from 1) from an offset on, and of later ones."""
    directory = join(run_path, JOURNAL)
    first = _segments(appended_sizes(store, directory))[number - 1]
    found = read_all_appended(store, directory, first=first, offset_bytes=offset_bytes)
    return without_late_lines([found[name] for name in _segments(found)])


def read_chunks(store: Store, run_path: str, *, number: int) -> Iterator[bytes]:
    """Yield segment ``number`` (from 1) chunk by chunk."""
    directory = join(run_path, JOURNAL)
    sizes = appended_sizes(store, directory)
    name = _segments(sizes)[number - 1]
    for begin in range(0, sizes[name], CHUNK_BYTES):
        yield read_appended(store, join(directory, name), begin, CHUNK_BYTES)


def _segments(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if name.endswith(".jsonl"))


def segment_path(run_path: str, incarnation: int) -> str:
    """Return the path of the segment of an incarnation."""
    return join(run_path, JOURNAL, f"{incarnation:06d}.jsonl")


class JournalFile:
    """Appends to the segment of this incarnation; earlier segments never change.

    A line is in the operating system's hands before its actions run, so it survives the
    controller's process. It is not synced to the disk. If the machine dies with its page cache, the
    last events are lost, and the survey of living workers replaces them.
    """

    def __init__(
        self,
        store: Store,
        run_path: str,
        *,
        incarnation: int,
        before_bytes: int,
        sender: Sender | None = None,
    ) -> None:
        self._store = store
        self._path = segment_path(run_path, incarnation)
        self._sender = sender
        self._incarnation = incarnation
        self._before_bytes = before_bytes
        self._size_bytes = 0
        self._last_line = b""
        #: The last record; empty before this incarnation has one.
        self.last: Mapping[str, Any] = {}
        #: Why nothing can be written now, "" if it can. No decisions are made in the meantime.
        self.trouble = ""

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Append ``records``, at least one."""
        lines = [json.dumps(record, separators=(",", ":")).encode() + b"\n" for record in records]
        data = b"".join(lines)
        if self._sender is None:
            self._append(data)
        else:
            self._sender.add(data, hurry=not all(map(is_event, records)))
        self._size_bytes += len(data)
        self._last_line, self.last = lines[-1], records[-1]

    def _append(self, data: bytes) -> None:
        """Append; while the disk is full, wait for somebody to make room."""
        there = self._size_bytes
        while True:
            try:
                self._store.append(self._path, data[there - self._size_bytes :])
            except StorageError as error:
                if not is_full(error):
                    raise
                if not self.trouble:
                    log.warning("the run waits for room for its journal: %s", error)
                self.trouble = str(error)
            else:
                self.trouble = ""
                return
            time.sleep(PAUSE_S)
            # A part may already be written.
            there = self._store.size(self._path) if self._store.exists(self._path) else 0

    @property
    def journal_bytes(self) -> int:
        """Return the size of the whole journal."""
        return self._before_bytes + self._size_bytes

    @property
    def place(self) -> JournalPlace:
        """Return where the last record ends; this incarnation must have one."""
        return JournalPlace(
            segment=self._incarnation,
            before_bytes=self._before_bytes,
            end_bytes=self._size_bytes,
            line=self._last_line.decode(),
        )
