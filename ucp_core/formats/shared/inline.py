"""Small values of a foreign checkpoint that are known only from its pickles, served as files.

A fragment must name bytes in a file. Those of a step count that a pickle holds as a Python number
are in no file as such, so they are put into one in memory, whose name begins with ``@``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucp_core.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from ucp_core.storage import Buffer, ReadRange, Store

#: The file of values that need no other name.
INLINE_NAME = "@inline"


class OverlayStore:
    """A store in which files named ``@...``, in any directory, are read from memory.

    All else goes to the store below. The overlay itself cannot be written.
    """

    def __init__(self, store: Store, files: Mapping[str, bytes]) -> None:
        assert all(name.startswith("@") for name in files), sorted(files)
        self._store = store
        self._files = dict(files)
        self.request_bytes = store.request_bytes

    @property
    def below(self) -> Store:
        """Return the store that everything else is in."""
        return self._store

    def _inline(self, path: str) -> bytes | None:
        name = path.rsplit("/", 1)[-1]
        if not name.startswith("@"):
            return None
        return self._files.get(name)

    def read(self, path: str) -> bytes:
        """Return the whole file."""
        data = self._inline(path)
        return self._store.read(path) if data is None else data

    def read_range(self, path: str, offset_bytes: int, size_bytes: int) -> bytes:
        """Return exactly ``size_bytes`` from ``offset_bytes``."""
        data = self._inline(path)
        if data is None:
            return self._store.read_range(path, offset_bytes, size_bytes)
        return _cut(path, data, offset_bytes, size_bytes)

    def read_ranges(self, path: str, ranges: Sequence[ReadRange]) -> None:
        """Fill the buffers of every range."""
        data = self._inline(path)
        if data is None:
            self._store.read_ranges(path, ranges)
            return
        for start, buffers in ranges:
            offset_bytes = start
            for buffer in buffers:
                buffer[:] = _cut(path, data, offset_bytes, len(buffer))
                offset_bytes += len(buffer)

    def write_atomic(
        self, path: str, data: Buffer, *, fsync: bool, exclusive: bool = False
    ) -> bool:
        """Put ``data`` at ``path`` at once."""
        return self._store.write_atomic(path, data, fsync=fsync, exclusive=exclusive)

    def write_file(self, path: str, chunks: Iterable[Buffer], *, fsync: bool) -> int:
        """Write ``chunks`` one after the other and return the size."""
        return self._store.write_file(path, chunks, fsync=fsync)

    def append(self, path: str, data: Buffer, *, fsync: bool = False) -> None:
        """Add ``data`` at the end of the file."""
        self._store.append(path, data, fsync=fsync)

    def list(self, directory: str) -> tuple[str, ...]:
        """Return the names in ``directory``, sorted; not those in memory."""
        return self._store.list(directory)

    def lock(self, path: str, *, shared: bool) -> AbstractContextManager[bool | None]:
        """Lock a file of the store below."""
        return self._store.lock(path, shared=shared)

    def sizes(self, directory: str) -> dict[str, int]:
        """Return the size of every file of ``list``."""
        return self._store.sizes(directory)

    def exists(self, path: str) -> bool:
        """Return whether a file or directory is there."""
        return self._inline(path) is not None or self._store.exists(path)

    def size(self, path: str) -> int:
        """Return the size of a file."""
        data = self._inline(path)
        return self._store.size(path) if data is None else len(data)

    def delete(self, path: str) -> None:
        """Remove a file, or a directory with all in it."""
        self._store.delete(path)

    def makedirs(self, path: str) -> None:
        """Make a directory and its parents where the storage has such a thing."""
        self._store.makedirs(path)


def _cut(path: str, data: bytes, offset_bytes: int, size_bytes: int) -> bytes:
    if offset_bytes + size_bytes > len(data):
        raise StorageError(
            f"{path} ends at byte {len(data)}, before {offset_bytes + size_bytes}", path=path
        )
    return data[offset_bytes : offset_bytes + size_bytes]
