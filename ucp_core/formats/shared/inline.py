"""Serves small values that only the pickles of a foreign checkpoint hold as files.

A fragment must name bytes in a file. If a pickle holds a step count as a Python number, no file has
its bytes. So they are put into a file in memory, whose name begins with ``@``.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

from ucp_core.errors import StorageError
from ucp_core.storage import ReadRange, Store, kept_open

#: The usual name of this file.
INLINE_NAME = "@inline"


def overlay(store: Store, files: Mapping[str, bytes]) -> Store:
    """Return a store that reads ``files``, named ``@...``, from memory in any directory.

    ``store`` does everything else, including writes.
    """
    assert all(name.startswith("@") for name in files), sorted(files)
    return cast("Store", _Overlay(store, files))


class _Overlay:
    def __init__(self, store: Store, files: Mapping[str, bytes]) -> None:
        self._store = self.below = store
        self._files = dict(files)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._store, name)

    def _inline(self, path: str) -> bytes | None:
        return self._files.get(path.rsplit("/", 1)[-1])

    def read(self, path: str) -> bytes:
        data = self._inline(path)
        return self._store.read(path) if data is None else data

    def read_range(self, path: str, offset_bytes: int, size_bytes: int) -> bytes:
        data = self._inline(path)
        if data is None:
            return self._store.read_range(path, offset_bytes, size_bytes)
        stop = offset_bytes + size_bytes
        if stop > len(data):
            raise StorageError(f"{path} ends at byte {len(data)}, before {stop}", path=path)
        return data[offset_bytes:stop]

    def read_ranges(self, path: str, ranges: Sequence[ReadRange]) -> None:
        if self._inline(path) is None:
            self._store.read_ranges(path, ranges)
            return
        for start, buffers in ranges:
            offset_bytes = start
            for buffer in buffers:
                buffer[:] = self.read_range(path, offset_bytes, len(buffer))
                offset_bytes += len(buffer)

    def kept_open(self, path: str) -> AbstractContextManager[None]:
        return nullcontext() if self._inline(path) is not None else kept_open(self._store, path)

    def exists(self, path: str) -> bool:
        return self._inline(path) is not None or self._store.exists(path)

    def size(self, path: str) -> int:
        data = self._inline(path)
        return self._store.size(path) if data is None else len(data)
