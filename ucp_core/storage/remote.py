"""Any storage that fsspec knows: object stores, remote file systems, ``memory://``."""

from __future__ import annotations

import builtins
import posixpath
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from ucp_core.errors import StorageError
from ucp_core.storage.appended import PieceWriter
from ucp_core.storage.base import Stamp, is_temporary, temporary_name
from ucp_core.storage.passing import Retries
from ucp_core.storage.service_errors import request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import fsspec

    from ucp_core.storage.base import Buffer, ReadRange

T = TypeVar("T")

#: Services' names for the identity of an object's content (S3 and HTTP, GCS, Azure).
_OF_CONTENT: Final = ("ETag", "md5Hash", "generation", "etag", "checksum")
#: Other services' names for the time of a file.
_OF_TIME: Final = ("mtime", "modified", "last_modified", "LastModified", "created")
#: Object stores: a file appears once it is complete. In fsspec's memory store it appears at once.
_ATOMIC_PROTOCOLS = {"s3", "s3a", "gs", "gcs", "abfs", "az", "oss"}
#: Long reads become several parallel requests of this size: providers' guides say that one
#: connection carries about 90 MB/s.
_REQUEST_BYTES = 8 << 20
_REQUESTS_AT_ONCE = 8
#: Writers of one file that collide look again for the next number; each time at least one succeeds.
_MEETINGS_MAX = 8


class FsspecStore:
    """Files of an fsspec file system; paths are what ``fsspec.core.url_to_fs`` returns.

    Two stores of one ``service`` have the same files.

    ``fsync`` does nothing: object stores acknowledge durable data. ``request_bytes`` is large
    because every request waits for an answer.

    Args:
        filesystem: If it retries by itself, that multiplies ``retries``.
    """

    request_bytes = 32 << 20
    #: Whether the service refuses an exclusive write of an existing file; emulators may not.
    _refuses_itself = False

    def __init__(
        self, filesystem: fsspec.AbstractFileSystem, *, retries: Retries | None = None
    ) -> None:
        self._fs = self.service = filesystem
        self._retries = retries or Retries()
        protocol = filesystem.protocol
        names = {protocol} if isinstance(protocol, str) else set(protocol)
        self._is_atomic = bool(names & _ATOMIC_PROTOCOLS)
        self.appends = not self._is_atomic
        self._writers: dict[str, PieceWriter] = {}

    def read(self, path: str) -> bytes:
        """Return the whole file."""
        data: bytes = request(self._retries, path, lambda: self._fs.cat_file(path))
        return data

    def read_range(self, path: str, offset_bytes: int, size_bytes: int) -> bytes:
        """Return exactly ``size_bytes`` from ``offset_bytes``."""
        return b"".join(self._fetched(path, [(offset_bytes, offset_bytes + size_bytes)]))

    def read_ranges(self, path: str, ranges: Sequence[ReadRange]) -> None:
        """Fill the buffers of every range, with several parallel requests."""
        buffers = (buffer for _, each in ranges for buffer in each)
        spans = [(start, start + sum(map(len, each))) for start, each in ranges]
        target = memoryview(b"")
        for data in self._fetched(path, spans):
            rest = memoryview(data)
            while rest:
                while not target:
                    target = next(buffers)
                size = min(len(rest), len(target))
                target[:size] = rest[:size]
                target, rest = target[size:], rest[size:]

    def _fetched(self, path: str, spans: Sequence[tuple[int, int]]) -> Iterator[bytes]:
        """Yield the bytes of the half-open ``spans`` in order, in pieces."""
        pieces = [
            (low, min(low + _REQUEST_BYTES, stop))
            for start, stop in spans
            for low in range(start, stop, _REQUEST_BYTES)
        ]
        for index in range(0, len(pieces), _REQUESTS_AT_ONCE):
            window = pieces[index : index + _REQUESTS_AT_ONCE]
            fetch = _Fetch(self._fs, path, window)
            request(self._retries, path, fetch)
            for start, stop in window:
                data = fetch.done[start, stop]
                if len(data) != stop - start:
                    raise StorageError(
                        f"{path} ends {stop - start - len(data)} bytes before {stop}: truncated",
                        path=path,
                    )
                yield data

    def write_atomic(
        self, path: str, data: Buffer, *, fsync: bool, exclusive: bool = False
    ) -> bool:
        """Replace the file at ``path`` atomically."""
        if exclusive and not self._refuses_itself and self.exists(path):
            return self._is_atomic and self.read(path) == bytes(data)
        # Where files grow in place, only a rename makes them appear whole, and it replaces.
        if not exclusive or not self._is_atomic:
            self.write_file(path, [data], fsync=fsync)
            return True
        for _ in range(_MEETINGS_MAX):
            try:
                # S3 and GCS refuse by themselves; for others fsspec checks first.
                self._call(path, lambda: self._fs.pipe_file(path, bytes(data), mode="create"))
            except StorageError as error:
                if not error.facts.get("taken"):
                    raise
            else:
                return True
            try:
                # If the answer to our own request was lost, the next request finds our file.
                return self.read(path) == bytes(data)
            except StorageError as error:
                # Refused because of a simultaneous write, which failed.
                if not error.facts.get("missing"):
                    raise
        raise StorageError(
            f"{path} cannot be created because it exists, but cannot be read either", path=path
        )

    def write_file(self, path: str, chunks: Iterable[Buffer], *, fsync: bool) -> int:
        """Write ``chunks`` in order and return the total size."""
        del fsync
        folder, name = posixpath.split(path)
        goal = path if self._is_atomic else f"{folder}/{temporary_name(name)}"
        self._make_parent(path)
        # On an object store the file appears at ``commit``.
        options = {"autocommit": False} if self._is_atomic else {}
        file: Any = self._call(path, lambda: self._fs.open(goal, "wb", **options))
        size_bytes = 0
        try:
            for chunk in chunks:
                size_bytes += memoryview(chunk).nbytes
                # A stream cannot be retried: the data it sent is gone.
                self._call(path, partial(file.write, chunk), once=True)
            self._call(path, file.close, once=True)
        except BaseException:
            self._abandon(file, goal)
            raise
        if self._is_atomic:
            self._call(path, file.commit, once=True)
        else:
            self._call(path, lambda: self._fs.mv(goal, path), once=True)
        return size_bytes

    def append(self, path: str, data: Buffer, *, fsync: bool = False) -> None:
        """Append ``data`` to the file; on object stores, write it as the next piece."""
        del fsync
        if self._is_atomic:
            for _ in range(_MEETINGS_MAX):
                writer = self._writers.setdefault(path, PieceWriter(self, path))
                try:
                    writer.append(bytes(data))
                except StorageError as error:
                    if not error.facts.get("taken"):
                        raise
                    self._writers.pop(path, None)
                else:
                    return
            raise StorageError(f"{path} has too many writers at once", path=path)
        self._make_parent(path)

        def add() -> None:
            with self._fs.open(path, "ab") as file:
                file.write(data)

        self._call(path, add, once=True)

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
        """Return whether a file or directory exists."""
        # fsspec's own ``exists`` returns False for every error.
        try:
            self._info(path)
        except StorageError as error:
            if error.facts.get("missing"):
                return False
            raise
        return True

    def size(self, path: str) -> int:
        """Return the size of a file."""
        return int(self._info(path)["size"])

    def stamp(self, path: str) -> Stamp:
        """Return a stamp, by the service's own identity of the file, that a replacement changes."""
        info = self._info(path)
        named = next(((key, info[key]) for key in _OF_CONTENT if info.get(key)), None)
        other = [(key, info[key]) for key in _OF_TIME if info.get(key)]
        return Stamp(
            size_bytes=int(info["size"]),
            text=f"{info['size']} {named or other}",
            # A web server may derive it from the file system of its machine.
            is_of_content=named is not None and self._is_atomic,
        )

    def delete(self, path: str) -> None:
        """Remove a file, or a directory with its content."""
        try:
            request(self._retries, path, lambda: self._fs.rm(path, recursive=True))
        except StorageError as error:
            if not error.facts.get("missing"):
                raise

    def delete_files(self, paths: Sequence[str]) -> None:
        """Remove files; on object stores with one request per 1,000."""
        if not paths:
            return
        try:
            request(self._retries, paths[0], lambda: self._fs.rm(builtins.list(paths)))
        except StorageError as error:
            if not error.facts.get("missing"):
                raise
            # Where a missing file is an error, the files after it are left.
            for path in paths if len(paths) > 1 else ():
                self.delete_files([path])

    def makedirs(self, path: str) -> None:
        """Make a directory and its parents, if the storage has directories."""
        # On an object store this would create a bucket from a misspelt name.
        if not self._is_atomic:
            self._call(path, lambda: self._fs.makedirs(path, exist_ok=True))

    @contextmanager
    def lock(self, path: str, *, shared: bool) -> Iterator[bool | None]:
        """Lock nothing: these storages have no locks."""
        del path, shared
        yield None

    def _make_parent(self, path: str) -> None:
        self.makedirs(posixpath.dirname(path))

    def _call(self, path: str, act: Callable[[], T], *, once: bool = False) -> T:
        """Make a request that writes; ``once`` if a retry would do harm."""
        retries = Retries(attempts=1) if once else self._retries
        return request(retries, path, act, needs_bucket=self._is_atomic)

    def _info(self, path: str) -> dict[str, Any]:
        self._fs.invalidate_cache(posixpath.dirname(path))
        info: dict[str, Any] = request(self._retries, path, lambda: self._fs.info(path))
        return info

    def _entries(self, directory: str) -> builtins.list[dict[str, Any]]:
        # A cached listing would hide what another process committed.
        self._fs.invalidate_cache(directory)
        try:
            found = request(self._retries, directory, lambda: self._fs.ls(directory, detail=True))
        except StorageError as error:
            if error.facts.get("missing") or isinstance(error.__cause__, NotADirectoryError):
                return []
            raise
        folder = directory.strip("/")
        return [
            entry
            for entry in found
            if entry["name"].strip("/") != folder
            and not is_temporary(posixpath.basename(entry["name"]))
        ]

    def _abandon(self, file: Any, path: str) -> None:
        """Drop a half-written file; keep the error that led here, not one raised here."""
        with suppress(StorageError):
            if self._is_atomic:
                # Otherwise the garbage collector would flush it.
                with suppress(AttributeError):
                    file.closed = True
                self._call(path, file.discard, once=True)
                return
            self._call(path, file.close, once=True)
        with suppress(StorageError):
            self._call(path, lambda: self._fs.rm(path))


class _Fetch:
    """Reads pieces of a file in parallel; a retry reads only pieces that are not ``done``."""

    def __init__(
        self, filesystem: fsspec.AbstractFileSystem, path: str, pieces: Iterable[tuple[int, int]]
    ) -> None:
        self._fs = filesystem
        self._path = path
        self._pieces = tuple(dict.fromkeys(pieces))
        self.done: dict[tuple[int, int], bytes] = {}

    def __call__(self) -> None:
        left = [piece for piece in self._pieces if piece not in self.done]
        starts, stops = ([piece[side] for piece in left] for side in (0, 1))
        found = self._fs.cat_ranges([self._path] * len(left), starts, stops, on_error="return")
        wrong: Exception | None = None
        for piece, item in zip(left, found, strict=True):
            if isinstance(item, Exception):
                wrong = item
            else:
                self.done[piece] = item
        if wrong is not None:
            raise wrong
