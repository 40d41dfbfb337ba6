"""Files that grow line by line, even on storage that cannot append.

An object cannot grow, and writing it again costs more with every line. On such storage a file
``a/b.jsonl`` is kept in numbered pieces, ``a/b-000001.jsonl``, ``a/b-000002.jsonl`` and so on. A
writer knows the number of its next piece, so it lists nothing; it never replaces a piece, so it
notices a second writer. From time to time it merges pieces: those from 1 to 64 become
``a/b-000001-000064.jsonl``. Readers list once and join the pieces of each file.
"""

from __future__ import annotations

import posixpath
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from ucp_core.errors import StorageError
from ucp_core.storage.base import join

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ucp_core.storage.base import Store

#: Merge pieces once there are this many, or they are this large together: one listing shows 1,000
#: names.
_MERGED_PIECES = 64
_MERGED_BYTES = 1 << 20
_READS_AT_ONCE = 8
#: How often to look again for pieces that are merged during a read.
_LOOKS = 5
_ALL_BYTES = sys.maxsize
_PIECE = re.compile(r"(.+?)-(\d{6,})(?:-(\d{6,}))?(\.\w+)")


class _Piece(NamedTuple):
    """Pieces ``first`` to ``last`` of a file; number 0 is the file itself."""

    first: int
    last: int
    name: str
    num_bytes: int


def appended_sizes(store: Store, directory: str) -> dict[str, int]:
    """Return the bytes of every file in ``directory``, sorted by name; pieces are added up."""
    files = _files(store.sizes(directory))
    return {name: sum(piece.num_bytes for piece in files[name]) for name in sorted(files)}


def read_appended(
    store: Store, path: str, offset_bytes: int = 0, size_bytes: int = _ALL_BYTES
) -> bytes:
    """Return what was appended to the file at ``path``, or a range of it.

    Args:
        offset_bytes: First byte.
        size_bytes: Read at most this much.
    """
    directory, name = posixpath.split(path)

    def wanted(names: Iterable[str]) -> dict[str, tuple[int, int]]:
        return {name: (offset_bytes, size_bytes)} if name in names else {}

    found = _read_files(store, directory, wanted)
    if name not in found:
        raise StorageError(f"{path} does not exist", path=path, missing=True)
    return found[name]


def read_all_appended(
    store: Store, directory: str, *, first: str = "", offset_bytes: int = 0
) -> dict[str, bytes]:
    """Return the content of the files in ``directory``, sorted by name.

    Args:
        first: Leave out files with smaller names.
        offset_bytes: Where to start in ``first``.
    """

    def wanted(names: Iterable[str]) -> dict[str, tuple[int, int]]:
        ranges = {name: (0, _ALL_BYTES) for name in sorted(names) if name >= first}
        return ranges | ({first: (offset_bytes, _ALL_BYTES)} if first in ranges else {})

    return _read_files(store, directory, wanted)


def _read_files(
    store: Store,
    directory: str,
    wanted: Callable[[Iterable[str]], Mapping[str, tuple[int, int]]],
) -> dict[str, bytes]:
    """Return ranges of files; ``wanted`` gets all names and returns the first byte and size."""
    for look in range(1, _LOOKS + 1):
        files = _files(store.sizes(directory))
        try:
            return {
                name: _read(store, directory, files[name], *each)
                for name, each in wanted(files).items()
            }
        except StorageError as error:
            if look == _LOOKS or not error.facts.get("missing"):
                raise
    raise AssertionError("the last attempt returns or raises")


def _read(
    store: Store, directory: str, pieces: Sequence[_Piece], offset_bytes: int, size_bytes: int
) -> bytes:
    wanted: list[tuple[str, int, int]] = []
    for piece in pieces:
        skipped_bytes = min(offset_bytes, piece.num_bytes)
        rest_bytes = min(piece.num_bytes - skipped_bytes, size_bytes)
        offset_bytes -= skipped_bytes
        size_bytes -= rest_bytes
        if rest_bytes:
            wanted.append((join(directory, piece.name), skipped_bytes, rest_bytes))
    if len(wanted) <= 1:
        return b"".join(store.read_range(*each) for each in wanted)
    with ThreadPoolExecutor(_READS_AT_ONCE, "read-pieces") as pool:
        return b"".join(pool.map(lambda each: store.read_range(*each), wanted))


def _files(sizes: Mapping[str, int]) -> dict[str, list[_Piece]]:
    """Return the pieces of every file in order, without those that are merged."""
    found: dict[str, list[_Piece]] = {}
    for name, num_bytes in sizes.items():
        match = _PIECE.fullmatch(name)
        whole, first, last = name, 0, 0
        if match:
            whole, first, last = match[1] + match[4], int(match[2]), int(match[3] or match[2])
        found.setdefault(whole, []).append(_Piece(first, last, name, num_bytes))
    for whole, pieces in found.items():
        kept: list[_Piece] = []
        for piece in sorted(pieces, key=lambda piece: (piece.first, -piece.last)):
            if not kept or piece.first > kept[-1].last:
                kept.append(piece)
        found[whole] = kept
    return found


class PieceWriter:
    """Appends to the file at ``path`` by writing pieces. Several threads may call it.

    Args:
        store: Writes exclusively (``write_atomic``).
        number: Number of the first piece; None to write after what is there.
    """

    def __init__(self, store: Store, path: str, *, number: int | None = None) -> None:
        self._store = store
        self._directory, self._name = posixpath.split(path)
        self._number = number
        self._unmerged: list[bytes] = []
        self._lock = threading.Lock()

    def append(self, data: bytes) -> None:
        """Write the next piece.

        Raises:
            StorageError: The storage refused, but ``data`` may be there nonetheless: append the
                same again. If another writer has written the piece, ``facts["taken"]`` is set.
        """
        with self._lock:
            if self._number is None:
                pieces = _files(self._store.sizes(self._directory)).get(self._name, ())
                self._number = max((piece.last for piece in pieces), default=0) + 1
            path = self._path(self._number)
            if not self._store.write_atomic(path, data, fsync=True, exclusive=True):
                raise StorageError(
                    f"{path} was written by another process: two processes write the same file",
                    path=path,
                    taken=True,
                )
            self._number += 1
            self._unmerged.append(data)
            num_bytes = sum(map(len, self._unmerged))
            if len(self._unmerged) >= _MERGED_PIECES or num_bytes >= _MERGED_BYTES:
                # Merging only saves readers time: if storage refuses, the next ones are merged.
                with suppress(StorageError):
                    self._merge(self._number - len(self._unmerged), self._number - 1)
                self._unmerged.clear()

    def _merge(self, first: int, last: int) -> None:
        data = b"".join(self._unmerged)
        if first == last:
            return
        # Write the merged piece first, so that everything is there at any time.
        if self._store.write_atomic(self._path(first, last), data, fsync=True, exclusive=True):
            self._store.delete_files([self._path(number) for number in range(first, last + 1)])

    def _path(self, first: int, last: int | None = None) -> str:
        stem, suffix = posixpath.splitext(self._name)
        numbers = f"{first:06d}" if last is None else f"{first:06d}-{last:06d}"
        return join(self._directory, f"{stem}-{numbers}{suffix}")
