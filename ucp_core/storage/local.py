"""Local and mounted file systems, by system calls."""

from __future__ import annotations

import copy
import errno
import fcntl
import os
import shutil
import stat
import sys
from contextlib import contextmanager, suppress
from functools import cache, partial, wraps
from pathlib import Path
from threading import get_ident
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ucp_core.errors import StorageError
from ucp_core.storage.base import Stamp, is_temporary, temporary_name
from ucp_core.storage.passing import retried

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ucp_core.storage.base import Buffer, ReadRange, Store

#: Linux takes at most this many buffers in a call (IOV_MAX).
_BUFFERS_MAX = 1024
#: Smaller chunks are copied and written together: a call costs 1 us, writing 64 KiB 10 us.
_SMALL_BYTES = 64 << 10
_GATHER_BYTES = 1 << 20

#: How much one ``posix_fadvise`` announces: the kernel may ignore what exceeds its read-ahead
#: window, 128 KiB by default.
_AHEAD_BYTES = 128 << 10
_AHEAD_RANGES_MIN = 8
#: RWF_NOWAIT; a Python built for an old C library lacks the name.
_NOWAIT = 8

#: Files above this size reserve space in steps of it: on ext4, writing 256 MB then takes 25 % less
#: processor time.
_RESERVE_BYTES = 32 << 20
#: Elsewhere the C library may reserve space by writing every block.
_RESERVING_TYPES = {"ext4", "xfs", "btrfs"}

#: Text for the user after a system error, following the path.
ADVICE = {
    errno.ENOENT: "does not exist",
    errno.ENOTDIR: "lies below a file, which should be a folder: move that file away",
    errno.EACCES: "is not permitted: check the owner and mode of the directory",
    errno.EPERM: "is not permitted: check the owner and mode of the directory",
    errno.EROFS: "is on a read-only file system",
    errno.ENOSPC: "does not fit: the file system is full",
    errno.EDQUOT: "does not fit: the quota is used up",
    errno.EFBIG: "does not fit: larger than the file system or the process limit allows",
}

_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}

#: Errors of mounts without locks.
_NO_LOCKS = {errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP}

_Method = TypeVar("_Method", bound="Callable[..., Any]")


def _repeatable(method: _Method) -> _Method:
    """Retry a method on a path while its error is temporary; then raise a StorageError."""

    @wraps(method)
    def call(store: LocalStore, path: str, /, *args: Any, **options: Any) -> Any:
        # Not ``_named``: a generator costs 2 us, half of a read of 64 KiB.
        try:
            return retried(partial(method, store, path, *args, **options))
        except OSError as error:
            raise _storage_error(path, error) from error

    return cast("_Method", call)


class LocalStore:
    """Files of this machine or of a mounted file system; paths are file paths.

    It reads regular files only: a named pipe would block, and a device may do anything.

    ``request_bytes`` fits the second-level cache, where the data is then verified: 12 % less
    processor time than reads of 32 MiB.
    """

    request_bytes = 1 << 20
    appends = True

    def __init__(self) -> None:
        self._durable: set[tuple[str, int]] = set()
        self._roots: tuple[str, ...] = ()
        self._given = ""
        self._inside: set[str] = set()
        #: Descriptors of files that a thread keeps open; see ``kept_open``.
        self._kept: dict[tuple[int, str], int] = {}

    def within(self, directory: str) -> LocalStore:
        """Return a store that follows no link out of ``directory`` when it reads.

        The cache of Hugging Face is an exception: its snapshots link to ``blobs`` beside them. If
        ``directory`` is a file, it and the files beside it may be read.
        """
        real = os.path.realpath(directory)
        beside = [f"{above}/blobs" for above in (Path(real).parent, Path(real).parent.parent)]
        if not Path(real).is_dir():
            beside = [os.path.realpath(Path(directory).parent)]
        store = copy.copy(self)
        # An object of the same class.
        store._roots, store._given, store._inside = (real, *beside), directory, set()  # noqa: SLF001
        store._kept = {}  # noqa: SLF001
        return store

    @_repeatable
    def open_file(self, path: str) -> int:
        """Open a regular file for reading and return its descriptor.

        Raises:
            StorageError: There is no such file, or it is outside of ``within``.
        """
        return self._open(path)

    @contextmanager
    def kept_open(self, path: str) -> Iterator[None]:
        """Open a file once for all reads of this thread while the block runs.

        Otherwise each read of 1 MiB opens it again.
        """
        fd, key = self.open_file(path), (get_ident(), path)
        self._kept[key] = fd
        try:
            yield
        finally:
            self._kept.pop(key, None)
            os.close(fd)

    def _open(self, path: str) -> int:
        # Without O_NONBLOCK a named pipe would wait for a writer.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        fd = self._open_inside(path, flags) if self._roots else os.open(path, flags)
        try:
            _check_regular(path, os.fstat(fd))
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _open_inside(self, path: str, flags: int) -> int:
        """Open a file inside ``within``; resolving every path would take 20 us a file."""
        self._check_folder(path.rpartition("/")[0])
        try:
            return os.open(path, flags | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
        self._check_inside(path, os.path.realpath(path))
        return os.open(path, flags)

    def _check_folder(self, folder: str) -> None:
        if folder in self._inside:
            return
        above, _, name = folder.rpartition("/")
        if above.startswith(self._given):
            self._check_folder(above)
        if above not in self._inside or name == ".." or Path(folder).is_symlink():
            self._check_inside(folder, os.path.realpath(folder))
        self._inside.add(folder)

    def _check_inside(self, path: str, real: str) -> None:
        if not any(f"{real}/".startswith(f"{root.rstrip('/')}/") for root in self._roots):
            raise StorageError(
                f"{path} leads to {real}, which is outside {self._roots[0]} and is not read; "
                "copy the file into the folder",
                path=path,
            )

    @_repeatable
    def read(self, path: str) -> bytes:
        """Return the whole file."""
        with _opened(self, path) as fd, open(fd, "rb", closefd=False) as file:
            return file.read()

    @_repeatable
    def read_range(self, path: str, offset_bytes: int, size_bytes: int) -> bytes:
        """Return exactly ``size_bytes`` from ``offset_bytes``."""
        data = bytearray(size_bytes)
        with _opened(self, path) as fd:
            _fill(fd, path, offset_bytes, [memoryview(data)])
        return bytes(data)

    @_repeatable
    def read_ranges(self, path: str, ranges: Sequence[ReadRange]) -> None:
        """Fill the buffers of every range."""
        with _opened(self, path) as fd:
            if len(ranges) >= _AHEAD_RANGES_MIN:
                ranges = ranges[_read_cached(fd, ranges) :]
            if len(ranges) >= _AHEAD_RANGES_MIN:
                _read_ahead(fd, ranges)
            for offset_bytes, buffers in ranges:
                # The usual case: one call fills one buffer.
                if len(buffers) == 1 and os.preadv(fd, buffers, offset_bytes) == len(buffers[0]):
                    continue
                low = offset_bytes
                for batch in _batches(buffers):
                    _fill(fd, path, low, batch)
                    low += sum(map(len, batch))

    def write_atomic(
        self, path: str, data: Buffer, *, fsync: bool, exclusive: bool = False
    ) -> bool:
        """Replace the file at ``path`` atomically."""
        with _named(path):
            temporary = retried(lambda: _written(path, data, fsync=fsync))
            try:
                if fsync:
                    self._sync_above(path)
                placed = _place(temporary, path, exclusive=exclusive)
            except BaseException:
                _remove(temporary)
                raise
            if fsync:
                _sync_directory(Path(path).parent)
            return placed

    def write_file(self, path: str, chunks: Iterable[Buffer], *, fsync: bool) -> int:
        """Write ``chunks`` in order and return the total size."""
        size_bytes = 0
        with _named(path):
            temporary, fd = _create(path)
            reserved_bytes = _RESERVE_BYTES
            try:
                try:
                    for batch in _gathered(chunks):
                        size_bytes += _write_all(fd, batch)
                        if size_bytes > reserved_bytes:
                            reserved_bytes = _reserve(fd, size_bytes)
                    if os.fstat(fd).st_size != size_bytes:
                        os.ftruncate(fd, size_bytes)
                    if fsync:
                        os.fsync(fd)
                finally:
                    os.close(fd)
                if fsync:
                    self._sync_above(path)
                _place(temporary, path, exclusive=False)
            except BaseException:
                _remove(temporary)
                raise
            if fsync:
                _sync_directory(Path(path).parent)
            return size_bytes

    def _sync_above(self, path: str) -> None:
        """Make the names of all directories above ``path`` durable, once per inode.

        A synced file is lost if the name of its directory is lost.
        """
        for directory in Path(path).absolute().parents:
            status = retried(directory.stat)
            known = (str(directory), status.st_ino)
            # A mount point has its name from the mount.
            is_mount = status.st_dev != retried(directory.parent.stat).st_dev
            if known in self._durable or is_mount or directory == directory.parent:
                return
            # This process cannot have made a directory that it may not read.
            with suppress(PermissionError):
                _sync_directory(directory.parent)
            self._durable.add(known)

    def append(self, path: str, data: Buffer, *, fsync: bool = False) -> None:
        """Append ``data`` to the file, in one call if it is small."""
        with _named(path):
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            # Only the opening is retried: bytes may have gone out before an error.
            fd = retried(lambda: _open_new(path, flags))
            try:
                _write_all(fd, [memoryview(data)])
                if fsync:
                    os.fsync(fd)
            finally:
                os.close(fd)

    @_repeatable
    def list(self, directory: str) -> tuple[str, ...]:
        """Return the names in ``directory``, sorted."""
        try:
            names = [entry.name for entry in Path(directory).iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return ()
        return tuple(sorted(name for name in names if not is_temporary(name)))

    @_repeatable
    def sizes(self, directory: str) -> dict[str, int]:
        """Return the size of every file of ``list``."""
        found: dict[str, int] = {}
        try:
            entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        for entry in entries:
            # Another process may delete a file between the listing and ``stat``.
            with suppress(FileNotFoundError):
                if not is_temporary(entry.name) and entry.is_file():
                    found[entry.name] = entry.stat().st_size
        return found

    @_repeatable
    def exists(self, path: str) -> bool:
        """Return whether a file or directory exists."""
        return Path(path).exists()

    @_repeatable
    def size(self, path: str) -> int:
        """Return the size of a file."""
        status = Path(path).stat()
        _check_regular(path, status)
        return status.st_size

    @_repeatable
    def stamp(self, path: str) -> Stamp:
        """Return a stamp that changes if another file takes the place of this one."""
        status = Path(path).stat()
        _check_regular(path, status)
        # A copy may keep the modification time, but not the change time of its inode.
        parts = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
        return Stamp(size_bytes=status.st_size, text="/".join(map(str, parts)), is_of_content=False)

    @_repeatable
    def delete(self, path: str) -> None:
        """Remove a file, or a directory with its content."""
        with suppress(FileNotFoundError):
            # Remove only the link itself.
            if Path(path).is_dir() and not Path(path).is_symlink():
                shutil.rmtree(path)
            else:
                Path(path).unlink()

    def delete_files(self, paths: Sequence[str]) -> None:
        """Remove files."""
        for path in paths:
            with _named(path):
                _remove(path)

    @_repeatable
    def makedirs(self, path: str) -> None:
        """Make a directory and its parents."""
        Path(path).mkdir(parents=True, exist_ok=True)

    @contextmanager
    def lock(self, path: str, *, shared: bool) -> Iterator[bool | None]:
        """Lock a file with ``flock``; the kernel releases the lock when the process ends."""
        with _named(path):
            # NFS grants an exclusive lock only on a file that is open for writing.
            flags = (os.O_RDONLY if shared else os.O_RDWR) | os.O_CLOEXEC
            fd = retried(lambda: os.open(path, flags))
        try:
            with _named(path):
                held = flock(fd, shared=shared)
                # The file may have been replaced between ``open`` and ``flock``.
                if held and not os.path.samestat(os.fstat(fd), retried(Path(path).stat)):
                    raise FileNotFoundError(errno.ENOENT, "replaced", path)
            yield held
        finally:
            os.close(fd)


def _check_regular(path: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        what = _KINDS.get(stat.S_IFMT(status.st_mode), "a device")
        raise StorageError(f"{path} is {what}, not a file", path=path)


def flock(fd: int, *, shared: bool) -> bool | None:
    """Lock an open file; return whether it is locked, or None if its file system has no locks."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True


def _create(path: str) -> tuple[str, int]:
    """Open a new temporary file beside ``path``, so that a rename stays within one file system."""
    directory, name = os.path.split(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC

    def create() -> tuple[str, int]:
        # Another name each time: a failed attempt may have created its file.
        temporary = f"{directory or '.'}/{temporary_name(name)}"
        return temporary, _open_new(temporary, flags)

    return retried(create)


def _open_new(path: str, flags: int) -> int:
    """Open a file; it and its folder may not exist yet."""
    try:
        return os.open(path, flags, 0o644)
    except FileNotFoundError:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, flags, 0o644)


def _written(path: str, data: Buffer, *, fsync: bool) -> str:
    """Return a new temporary file beside ``path`` that holds ``data``."""
    temporary, fd = _create(path)
    try:
        try:
            _write_all(fd, [memoryview(data)])
            if fsync:
                os.fsync(fd)
        finally:
            os.close(fd)
    except BaseException:
        _remove(temporary)
        raise
    return temporary


def _place(temporary: str, path: str, *, exclusive: bool) -> bool:
    """Rename ``temporary`` to ``path``; if ``exclusive``, only if nothing is there."""
    made = retried(Path(temporary).stat)
    if not exclusive:
        retried(lambda: _rename(temporary, path, made))
        return True
    placed = True
    try:
        # A rename would replace the file; a hard link fails atomically if the name is taken.
        retried(lambda: os.link(temporary, path))
    except FileExistsError:
        # The answer to the link may have been lost: then the existing file is this one.
        placed = _is_file(path, made)
    except OSError as error:
        if error.errno not in {errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS}:
            raise
        # A mount without hard links: take the name with an empty file, then rename over it.
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
        except FileExistsError:
            placed = False
        else:
            retried(lambda: _rename(temporary, path, made))
    _remove(temporary)
    return placed


def _rename(temporary: str, path: str, made: os.stat_result) -> None:
    try:
        Path(temporary).replace(path)
    except FileNotFoundError:
        # The answer to a rename may have been lost.
        if not _is_file(path, made):
            raise


def _is_file(path: str, made: os.stat_result) -> bool:
    """Return whether the file at ``path`` is the one with this status."""
    try:
        return os.path.samestat(retried(Path(path).stat), made)
    except FileNotFoundError:
        return False


def _remove(path: str) -> None:
    retried(lambda: Path(path).unlink(missing_ok=True))


def _sync_directory(directory: Path) -> None:
    """Make the names in a directory durable; fsync of a file does not do that."""
    fd = retried(lambda: os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _gathered(chunks: Iterable[Buffer]) -> Iterator[list[memoryview]]:
    """Yield chunks in batches for one call each.

    The caller may reuse a chunk once the next one is requested, so small chunks are copied.
    """
    batch: list[memoryview] = []
    size_bytes = 0
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        is_small = len(view) < _SMALL_BYTES
        batch.append(memoryview(bytes(view)) if is_small else view)
        size_bytes += len(view)
        if not is_small or size_bytes >= _GATHER_BYTES or len(batch) == _BUFFERS_MAX:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch


def _write_all(fd: int, batch: list[memoryview]) -> int:
    """Write all buffers and return the number of bytes; one call may write only a part."""
    total = sum(len(view) for view in batch)
    left = total
    while left:
        done = os.writev(fd, batch)
        left -= done
        if left:
            batch = _advanced(batch, done)
    return total


def may_reserve(fd: int) -> bool:
    """Return whether ``posix_fallocate`` makes writing this file faster."""
    return _type_of(os.fstat(fd).st_dev) in _RESERVING_TYPES


@cache
def _type_of(device: int) -> str:
    """Return the type of a file system, or "" if it is unknown."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    for line in lines:
        before, _, after = line.partition(" - ")
        if before.split()[2] == wanted:
            return after.split()[0]
    return ""


def _reserve(fd: int, size_bytes: int) -> int:
    """Reserve the next stretch of a file; return the size at which to call again."""
    try:
        if may_reserve(fd):
            os.posix_fallocate(fd, size_bytes, _RESERVE_BYTES)
            return size_bytes + _RESERVE_BYTES
    except OSError:
        # The file itself may still fit.
        pass
    return sys.maxsize


def _read_cached(fd: int, ranges: Sequence[ReadRange]) -> int:
    """Fill ranges up to the first that is not in the page cache; return how many were filled.

    Announcing cached rows of 16 KiB would take 5 to 15 % of the time to read them.
    """
    num_filled = 0
    # A range that is not cached raises; so does a system without the flag.
    with suppress(OSError, NotImplementedError):
        for offset_bytes, buffers in ranges:
            if len(buffers) > 1 or os.preadv(fd, buffers, offset_bytes, _NOWAIT) < len(buffers[0]):
                break
            num_filled += 1
    return num_filled


def _read_ahead(fd: int, ranges: Sequence[ReadRange]) -> None:
    """Make the kernel start reading ranges that lie close together, including the gaps.

    Otherwise it treats them as random reads and starts each one late: rows of 16 KiB took 3 times
    as long from a disk. macOS has no such call.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    first, last = ranges[0][0], ranges[-1][0]
    if last - first <= len(ranges) * _AHEAD_BYTES:
        for start in range(first, last + 1, _AHEAD_BYTES):
            os.posix_fadvise(fd, start, _AHEAD_BYTES, os.POSIX_FADV_WILLNEED)


def _fill(fd: int, path: str, offset_bytes: int, batch: Sequence[memoryview]) -> None:
    """Fill every buffer from ``offset_bytes`` on; one call may read only a part."""
    left = sum(map(len, batch))
    while left:
        done = os.preadv(fd, batch, offset_bytes)
        if done == 0:
            raise StorageError(
                f"{path} ends at byte {offset_bytes}, {left} bytes early: truncated", path=path
            )
        left -= done
        offset_bytes += done
        if left:
            batch = _advanced(batch, done)


def _advanced(batch: Sequence[memoryview], done_bytes: int) -> list[memoryview]:
    rest = list(batch)
    while rest and done_bytes >= len(rest[0]):
        done_bytes -= len(rest.pop(0))
    if done_bytes:
        rest[0] = rest[0][done_bytes:]
    return rest


def _batches(buffers: Sequence[memoryview]) -> Iterator[Sequence[memoryview]]:
    for low in range(0, len(buffers), _BUFFERS_MAX):
        yield buffers[low : low + _BUFFERS_MAX]


class _opened:  # noqa: N801 - used as a function
    """A file open for reading. A class: a generator costs 2 us, half of a read of 64 KiB."""

    __slots__ = ("_fd", "_is_kept", "_key", "_store")

    def __init__(self, store: LocalStore, path: str) -> None:
        self._store, self._key = store, (get_ident(), path)

    def __enter__(self) -> int:
        kept = self._store._kept.get(self._key)  # noqa: SLF001  in one module
        self._is_kept = kept is not None
        self._fd = self._store._open(self._key[1]) if kept is None else kept  # noqa: SLF001
        return self._fd

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not self._is_kept:
            os.close(self._fd)
        elif error is not None:
            # The next attempt opens the file again: a network file system may have lost it.
            self._store._kept.pop(self._key, None)  # noqa: SLF001


@contextmanager
def _named(path: str) -> Iterator[None]:
    """Turn an OSError into a StorageError that names ``path`` and says what to do."""
    try:
        yield
    except OSError as error:
        raise _storage_error(path, error) from error


def _storage_error(path: str, error: OSError) -> StorageError:
    advice = ADVICE.get(error.errno or 0, f"failed: {error.strerror}")
    return StorageError(
        f"{path} {advice}",
        path=path,
        errno=error.errno,
        missing=isinstance(error, FileNotFoundError | NotADirectoryError),
    )


def is_full(error: StorageError) -> bool:
    """Return whether the storage is full or the user's quota is used up."""
    return error.facts.get("errno") in {errno.ENOSPC, errno.EDQUOT}


def within(store: Store, directory: str) -> Store:
    """Return a store that reads only regular files in ``directory``, if storage has links."""
    return store.within(directory) if isinstance(store, LocalStore) else store


def is_local(store: Store) -> bool:
    """Return whether the paths of ``store`` are paths of this machine."""
    return isinstance(_below(store), LocalStore)


def is_link(store: Store, path: str) -> bool:
    """Return whether ``path`` is a link, whose target somebody else made."""
    return is_local(store) and Path(path).is_symlink()


def _below(store: Store) -> object:
    return getattr(store, "below", store)
