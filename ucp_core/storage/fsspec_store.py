"""Any storage that fsspec knows: object stores, remote file systems, ``memory://``."""

from __future__ import annotations

import builtins
import posixpath
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ucp_core.errors import StorageError
from ucp_core.storage.base import is_temporary, temporary_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import fsspec

    from ucp_core.storage.base import Buffer, ReadRange

#: Object stores: a file appears when it is complete, so no temporary name is needed. fsspec's
#: own memory is not among them: it shows a file from its opening on.
_ATOMIC_PROTOCOLS = {"s3", "s3a", "gs", "gcs", "abfs", "az", "oss"}


class FsspecStore:
    """Files of an fsspec file system; paths are what ``fsspec.core.url_to_fs`` returns.

    ``fsync`` is what the storage makes of a closed file: object stores acknowledge durable data.
    ``request_bytes`` is large, because every request waits for an answer first; not measured.
    """

    request_bytes = 32 << 20

    def __init__(self, filesystem: fsspec.AbstractFileSystem) -> None:
        self._fs = filesystem
        protocol = filesystem.protocol
        names = {protocol} if isinstance(protocol, str) else set(protocol)
        self._is_atomic = bool(names & _ATOMIC_PROTOCOLS)

    def read(self, path: str) -> bytes:
        """Return the whole file."""
        with _named(path):
            data: bytes = self._fs.cat_file(path)
            return data

    def read_range(self, path: str, offset_bytes: int, size_bytes: int) -> bytes:
        """Return exactly ``size_bytes`` from ``offset_bytes``."""
        if size_bytes == 0:
            return b""
        with _named(path):
            data: bytes = self._fs.cat_file(path, start=offset_bytes, end=offset_bytes + size_bytes)
        if len(data) != size_bytes:
            raise StorageError(
                f"{path} ends {size_bytes - len(data)} bytes before {offset_bytes + size_bytes}: "
                "truncated",
                path=path,
            )
        return data

    def read_ranges(self, path: str, ranges: Sequence[ReadRange]) -> None:
        """Fill the buffers of every range, by one request a range."""
        for item in ranges:
            data = memoryview(self.read_range(path, item.offset_bytes, sum(map(len, item.buffers))))
            low = 0
            for buffer in item.buffers:
                buffer[:] = data[low : low + len(buffer)]
                low += len(buffer)

    def write_atomic(
        self, path: str, data: Buffer, *, fsync: bool, exclusive: bool = False
    ) -> bool:
        """Put ``data`` at ``path`` at once."""
        if not exclusive:
            self.write_file(path, [data], fsync=fsync)
            return True
        with _named(path):
            if self._fs.exists(path):
                return False
            try:
                # S3 and GCS refuse by themselves; for others fsspec looks first.
                self._fs.makedirs(posixpath.dirname(path), exist_ok=True)
                self._fs.pipe_file(path, bytes(data), mode="create")
            except FileExistsError:
                return False
            return True

    def write_file(self, path: str, chunks: Iterable[Buffer], *, fsync: bool) -> int:
        """Write ``chunks`` one after the other and return the size."""
        del fsync
        folder, name = posixpath.split(path)
        goal = path if self._is_atomic else f"{folder}/{temporary_name(name)}"
        size_bytes = 0
        with _named(path):
            self._fs.makedirs(folder, exist_ok=True)
            # Where files appear whole, only ``commit`` makes it appear.
            options = {"autocommit": False} if self._is_atomic else {}
            file: Any = self._fs.open(goal, "wb", **options)
            try:
                for chunk in chunks:
                    file.write(chunk)
                    size_bytes += memoryview(chunk).nbytes
                file.close()
            except BaseException:
                self._abandon(file, goal)
                raise
            if self._is_atomic:
                file.commit()
            else:
                self._fs.mv(goal, path)
        return size_bytes

    def append(self, path: str, data: Buffer, *, fsync: bool = False) -> None:
        """Add ``data`` at the end of the file; object stores rewrite it."""
        del fsync
        with _named(path):
            self._fs.makedirs(posixpath.dirname(path), exist_ok=True)
            if self._is_atomic:
                old = self._fs.cat_file(path) if self._fs.exists(path) else b""
                self._fs.pipe_file(path, old + bytes(data))
                return
            with self._fs.open(path, "ab") as file:
                file.write(data)

    def list(self, directory: str) -> tuple[str, ...]:
        """Return the names in ``directory``, sorted."""
        return tuple(sorted(posixpath.basename(e["name"]) for e in self._entries(directory)))

    def sizes(self, directory: str) -> dict[str, int]:
        """Return the size of every file of ``list``."""
        return {
            posixpath.basename(entry["name"]): int(entry["size"])
            for entry in self._entries(directory)
            if entry["type"] == "file"
        }

    def exists(self, path: str) -> bool:
        """Return whether a file or directory is there."""
        with _named(path):
            self._fs.invalidate_cache(posixpath.dirname(path))
            return bool(self._fs.exists(path))

    def size(self, path: str) -> int:
        """Return the size of a file."""
        with _named(path):
            self._fs.invalidate_cache(posixpath.dirname(path))
            return int(self._fs.size(path))

    def delete(self, path: str) -> None:
        """Remove a file, or a directory with all in it."""
        with _named(path):
            try:
                self._fs.rm(path, recursive=True)
            except FileNotFoundError:
                return

    def makedirs(self, path: str) -> None:
        """Make a directory and its parents where the storage has such a thing."""
        with _named(path):
            self._fs.makedirs(path, exist_ok=True)

    def _entries(self, directory: str) -> builtins.list[dict[str, Any]]:
        with _named(directory):
            # Another process may have written: a listing from the cache would hide its commit.
            self._fs.invalidate_cache(directory)
            try:
                found = self._fs.ls(directory, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return []
        folder = directory.strip("/")
        return [
            entry
            for entry in found
            if entry["name"].strip("/") != folder
            and not is_temporary(posixpath.basename(entry["name"]))
        ]

    def _abandon(self, file: Any, path: str) -> None:
        """Drop a file that is half written."""
        if self._is_atomic:
            file.discard()
            return
        file.close()
        self._fs.rm(path)


@contextmanager
def _named(path: str) -> Iterator[None]:
    """Turn what fsspec raises into a StorageError that names ``path``."""
    try:
        yield
    except (OSError, ValueError) as error:
        missing = isinstance(error, FileNotFoundError)
        what = "does not exist" if missing else f"cannot be used: {error}"
        raise StorageError(f"{path} {what}", path=path, missing=missing) from error
