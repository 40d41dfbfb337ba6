"""The journal on storage: one segment per life of the controller, one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from zlib import crc32

from orchestrator.core import Place
from ucp_core.storage import Store, join

DIRECTORY = "journal"
#: A segment is looked into by so much at a time.
CHUNK_BYTES = 64 << 10


def read_segments(store: Store, run_path: str) -> list[bytes]:
    """Return the content of every segment in the run directory, oldest first."""
    directory = join(run_path, DIRECTORY)
    return [store.read(join(directory, name)) for name in _segments(store.list(directory))]


def segment_sizes(store: Store, run_path: str) -> list[int]:
    """Return the size of every segment in the run directory in bytes, oldest first."""
    sizes = store.sizes(join(run_path, DIRECTORY))
    return [sizes[name] for name in _segments(sizes)]


def read_from(store: Store, run_path: str, *, number: int, offset_bytes: int) -> list[bytes]:
    """Return what is behind an offset in segment ``number``, from 1, and all later segments."""
    directory = join(run_path, DIRECTORY)
    first, *others = _segments(store.list(directory))[number - 1 :]
    path = join(directory, first)
    rest_bytes = store.size(path) - offset_bytes
    rest = store.read_range(path, offset_bytes, rest_bytes)
    return [rest, *(store.read(join(directory, name)) for name in others)]


def read_chunks(store: Store, run_path: str, *, number: int) -> Iterator[bytes]:
    """Yield segment ``number``, from 1, piece by piece."""
    directory = join(run_path, DIRECTORY)
    path = join(directory, _segments(store.list(directory))[number - 1])
    size = store.size(path)
    for begin in range(0, size, CHUNK_BYTES):
        yield store.read_range(path, begin, min(CHUNK_BYTES, size - begin))


def _segments(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if name.endswith(".jsonl"))


class JournalFile:
    """Appends to the segment of this life; earlier segments are never written again.

    A line is handed to the operating system before its actions run, so it survives the
    controller's process. It is not synced to the disk: the loss of the controller's machine
    and of its page cache costs the last events, which the survey of living workers replaces.

    Args:
        store: Where the run directory is.
        run_path: Its path there.
        life: Which life of the controller this is, from 1.
        before_bytes: Size of all segments of earlier lives.
    """

    def __init__(self, store: Store, run_path: str, *, life: int, before_bytes: int) -> None:
        self._store = store
        self._path = join(run_path, DIRECTORY, f"{life:06d}.jsonl")
        self._life = life
        self._before_bytes = before_bytes
        self._size_bytes = 0
        self._last_line = b""
        self._last: Mapping[str, Any] = {}

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Write ``records``, at least one, behind what is there."""
        lines = [json.dumps(record, separators=(",", ":")).encode() + b"\n" for record in records]
        data = b"".join(lines)
        self._store.append(self._path, data)
        self._size_bytes += len(data)
        self._last_line, self._last = lines[-1], records[-1]

    @property
    def last(self) -> Mapping[str, Any]:
        """Return the last record; there must be one of this life."""
        return self._last

    @property
    def journal_bytes(self) -> int:
        """Return the size of the whole journal."""
        return self._before_bytes + self._size_bytes

    @property
    def place(self) -> Place:
        """Return where the last record ends; there must be one of this life."""
        return Place(
            segment=self._life,
            before_bytes=self._before_bytes,
            end_bytes=self._size_bytes,
            line_bytes=len(self._last_line),
            line_crc32=crc32(self._last_line),
        )
