"""A store in this process's memory; tests compare other stores with it."""

from __future__ import annotations

import hashlib
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ucp_core.errors import StorageError
from ucp_core.storage.base import Stamp, is_temporary

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ucp_core.storage.base import Buffer, ReadRange


class MemoryStore:
    """Files in a dict; ``fsync`` does nothing."""

    request_bytes = 32 << 20
    appends = True

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}
        self._holders: dict[str, int] = {}
        self._lock = threading.Lock()

    def read(self, path: str) -> bytes:
        """Return the whole file."""
        try:
            return self._files[_key(path)]
        except KeyError:
            raise _missing(path) from None

    def read_range(self, path: str, offset_bytes: int, size_bytes: int) -> bytes:
        """Return exactly ``size_bytes`` from ``offset_bytes``."""
        data = self.read(path)
        if offset_bytes + size_bytes > len(data):
            raise StorageError(
                f"{path} ends at byte {len(data)}, before {offset_bytes + size_bytes}: truncated",
                path=path,
            )
        return data[offset_bytes : offset_bytes + size_bytes]

    def read_ranges(self, path: str, ranges: Sequence[ReadRange]) -> None:
        """Fill the buffers of every range."""
        for start, buffers in ranges:
            offset_bytes = start
            for buffer in buffers:
                buffer[:] = self.read_range(path, offset_bytes, len(buffer))
                offset_bytes += len(buffer)

    def write_atomic(
        self, path: str, data: Buffer, *, fsync: bool, exclusive: bool = False
    ) -> bool:
        """Replace the file at ``path`` atomically."""
        del fsync
        with self._lock:
            if exclusive and _key(path) in self._files:
                return False
            self._files[_key(path)] = bytes(data)
            return True

    def write_file(self, path: str, chunks: Iterable[Buffer], *, fsync: bool) -> int:
        """Write ``chunks`` in order and return the total size."""
        data = b"".join(bytes(chunk) for chunk in chunks)
        self.write_atomic(path, data, fsync=fsync)
        return len(data)

    def append(self, path: str, data: Buffer, *, fsync: bool = False) -> None:
        """Append ``data`` to the file."""
        del fsync
        with self._lock:
            self._files[_key(path)] = self._files.get(_key(path), b"") + bytes(data)

    def list(self, directory: str) -> tuple[str, ...]:
        """Return the names in ``directory``, sorted."""
        inside = _inside(directory)
        with self._lock:
            names = {k[len(inside) :].split("/")[0] for k in self._files if k.startswith(inside)}
        return tuple(sorted(name for name in names if not is_temporary(name)))

    def sizes(self, directory: str) -> dict[str, int]:
        """Return the size of every file of ``list``."""
        inside = _inside(directory)
        with self._lock:
            return {
                key[len(inside) :]: len(self._files[key])
                for key in sorted(self._files)
                if key.startswith(inside)
                and "/" not in key[len(inside) :]
                and not is_temporary(key[len(inside) :])
            }

    def exists(self, path: str) -> bool:
        """Return whether a file or directory exists."""
        inside = _inside(path)
        with self._lock:
            return _key(path) in self._files or any(k.startswith(inside) for k in self._files)

    def size(self, path: str) -> int:
        """Return the size of a file."""
        return len(self.read(path))

    def stamp(self, path: str) -> Stamp:
        """Return a stamp that changes if another file takes the place of this one."""
        data = self.read(path)
        text = hashlib.sha256(data).hexdigest()
        return Stamp(size_bytes=len(data), text=text, is_of_content=True)

    def delete(self, path: str) -> None:
        """Remove a file, or a directory with its content."""
        with self._lock:
            doomed = [k for k in self._files if k == _key(path) or k.startswith(_inside(path))]
            for key in doomed:
                del self._files[key]

    def delete_files(self, paths: Sequence[str]) -> None:
        """Remove files."""
        with self._lock:
            for path in paths:
                self._files.pop(_key(path), None)

    def makedirs(self, path: str) -> None:
        """Do nothing: directories exist where files are."""

    @contextmanager
    def lock(self, path: str, *, shared: bool) -> Iterator[bool | None]:
        """Lock a file among the threads of this process."""
        key = _key(path)
        with self._lock:
            if key not in self._files:
                raise _missing(path)
            holders = self._holders.get(key, 0)
            # -1: one exclusive holder.
            held = holders >= 0 if shared else holders == 0
            if held:
                self._holders[key] = holders + 1 if shared else -1
        try:
            yield held
        finally:
            if held:
                with self._lock:
                    self._holders[key] -= 1 if shared else -1


def _key(path: str) -> str:
    return path.strip("/")


def _inside(directory: str) -> str:
    return f"{_key(directory)}/" if _key(directory) else ""


def _missing(path: str) -> StorageError:
    return StorageError(f"{path} does not exist", path=path, missing=True)
