"""Every store passes the one conformance suite; what only local files do comes after."""

import errno
import os
import resource
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from tests.support.store_conformance import StoreConformance
from ucp_core.errors import StorageError
from ucp_core.storage import LocalStore, MemoryStore, Store, kept_open, open_store
from ucp_core.storage.remote import FsspecStore


class TestLocalStore(StoreConformance):
    def make(self, tmp_path: Path) -> tuple[Store, str]:
        return LocalStore(), str(tmp_path / "root")


class TestMemoryStore(StoreConformance):
    def make(self, tmp_path: Path) -> tuple[Store, str]:
        del tmp_path
        return MemoryStore(), "root"


class TestFsspecMemory(StoreConformance):
    looks_first = True

    def make(self, tmp_path: Path) -> tuple[Store, str]:
        del tmp_path
        # fsspec's memory is one for the whole process.
        return open_store(f"memory://{uuid.uuid4().hex}/root")


class _Uploading(LocalFileSystem):
    """Stands for an object store: a file appears when ``commit`` is called, or never."""

    protocol = "abfs"


class TestFsspecWithCommit(StoreConformance):
    """The way that object stores other than S3 go."""

    looks_first = True

    def make(self, tmp_path: Path) -> tuple[Store, str]:
        return FsspecStore(_Uploading(auto_mkdir=True)), str(tmp_path / "root")


class TestFsspecWithRename(StoreConformance):
    """A file system where a file grows in place, so that a rename has to make it atomic."""

    looks_first = True

    def make(self, tmp_path: Path) -> tuple[Store, str]:
        return FsspecStore(fsspec.filesystem("file")), str(tmp_path / "root")


# Another test may have left a thread of fsspec behind.
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_writer_that_was_killed_leaves_nothing_that_is_listed(tmp_path: Path) -> None:
    """SIGKILL runs no cleanup: the temporary file stays, and must never be taken for data."""
    store = LocalStore()
    pid = os.fork()
    if pid == 0:

        def chunks() -> object:
            yield b"x" * (2 << 20)
            os._exit(9)

        store.write_file(str(tmp_path / "f"), chunks(), fsync=False)  # type: ignore[arg-type]
    os.waitpid(pid, 0)

    assert len(list(tmp_path.iterdir())) == 1
    assert store.list(str(tmp_path)) == ()
    assert store.sizes(str(tmp_path)) == {}


def test_a_forbidden_place_says_what_to_check(tmp_path: Path) -> None:
    """Errors of the system reach the user with the path and with advice."""
    (tmp_path / "file").write_bytes(b"")

    with pytest.raises(StorageError, match="file/sub/x"):
        LocalStore().write_atomic(str(tmp_path / "file/sub/x"), b"", fsync=False)
    with pytest.raises(StorageError, match="/proc/nothing/x"):
        LocalStore().append("/proc/nothing/x", b"")


class _Kernel:
    """Stands for the kernel, of which a test cannot know what is in its page cache."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, refusals: dict[int, Exception | int]
    ) -> None:
        """Refuse reads from some offsets that must not wait: an error, or how many bytes come."""
        self.announced: list[tuple[int, int]] = []
        self._refusals = refusals
        self._preadv, self._fadvise = os.preadv, os.posix_fadvise
        monkeypatch.setattr(os, "preadv", self._read)
        monkeypatch.setattr(os, "posix_fadvise", self._note)

    def _read(self, fd: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        if flags:
            assert flags == os.RWF_NOWAIT
            refusal = self._refusals.get(offset)
            if isinstance(refusal, Exception):
                raise refusal
            if refusal is not None:
                return self._preadv(fd, [buffers[0][:refusal]], offset)
        return self._preadv(fd, buffers, offset)

    def _note(self, fd: int, offset: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        self.announced.append((offset, offset + length))
        self._fadvise(fd, offset, length, advice)


_ROW_BYTES, _NUM_ROWS = 5000, 20


def _read_rows(path: Path, step_bytes: int) -> list[int]:
    """Read rows of a new file at once and compare them; return where they begin."""
    data = os.urandom(_NUM_ROWS * step_bytes)
    path.write_bytes(data)
    starts = _row_starts(step_bytes)
    rows = [bytearray(_ROW_BYTES) for _ in starts]

    ranges = [(a, (memoryview(row),)) for a, row in zip(starts, rows, strict=True)]
    LocalStore().read_ranges(str(path), ranges)

    assert rows == [data[start : start + _ROW_BYTES] for start in starts]
    return starts


def _row_starts(step_bytes: int) -> list[int]:
    return [7 + number * step_bytes for number in range(_NUM_ROWS)]


def test_a_file_that_is_kept_open_is_opened_again_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file server that restarted knows none of the old handles."""
    path = tmp_path / "data"
    path.write_bytes(b"abcd")
    store, really, really_open, opened = LocalStore(), os.preadv, os.open, list[str]()

    def count(path: str, *args: Any) -> int:
        opened.append(path)
        return really_open(path, *args)

    monkeypatch.setattr(os, "open", count)
    with kept_open(store, str(path)):
        for place in range(2):
            assert store.read_range(str(path), place, 1) == b"abcd"[place : place + 1]
        assert opened == [str(path)]
        failures = [OSError(errno.ESTALE, os.strerror(errno.ESTALE))]

        def preadv(*args: Any) -> int:
            if failures:
                raise failures.pop()
            return really(*args)

        monkeypatch.setattr(os, "preadv", preadv)
        assert store.read_range(str(path), 2, 2) == b"cd"
    assert opened == [str(path)] * 2
    with pytest.raises(StorageError, match="does not exist"), kept_open(store, f"{path}2"):
        pass


@pytest.mark.parametrize("step_bytes", [16 << 10, 256 << 10], ids=["near", "far"])
@pytest.mark.parametrize(
    "refusal",
    [
        BlockingIOError(errno.EAGAIN, "not in the page cache"),
        OSError(errno.EOPNOTSUPP, "a file system that does not know the flag"),
        NotImplementedError("a C library that does not know it"),
        1000,
    ],
    ids=["missing", "unsupported", "unknown", "partly"],
)
@pytest.mark.parametrize("num_cached", [0, 5])
def test_rows_near_each_other_are_announced(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    num_cached: int,
    refusal: Exception | int,
    step_bytes: int,
) -> None:
    """Else the kernel begins no row before the one before is there."""
    kernel = _Kernel(monkeypatch, {_row_starts(step_bytes)[num_cached]: refusal})

    starts = _read_rows(tmp_path / "f", step_bytes)

    def is_announced(start: int) -> bool:
        return any(low <= start < high for low, high in kernel.announced)

    is_near = step_bytes < 128 << 10
    assert [is_announced(s) for s in starts[num_cached:]] == [is_near] * (_NUM_ROWS - num_cached)
    assert not any(low < starts[num_cached] for low, _ in kernel.announced)
    assert all(high - low <= 128 << 10 for low, high in kernel.announced)


@pytest.mark.parametrize("num_cached", [_NUM_ROWS, _NUM_ROWS - 2], ids=["all", "nearly"])
def test_rows_that_are_in_the_page_cache_are_not_announced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, num_cached: int
) -> None:
    """To announce what is there takes time and brings nothing."""
    missing = _row_starts(16 << 10)[num_cached:]
    kernel = _Kernel(monkeypatch, dict.fromkeys(missing, BlockingIOError()))

    _read_rows(tmp_path / "f", 16 << 10)

    assert kernel.announced == []


def test_a_row_behind_the_end_of_a_file_is_reported(tmp_path: Path) -> None:
    """The kernel answers a read that must not wait as it does one behind the end: by less."""
    path = tmp_path / "f"
    path.write_bytes(bytes(19 * 16384 + 4999))
    ranges = [(n * 16384, (memoryview(bytearray(_ROW_BYTES)),)) for n in range(_NUM_ROWS)]

    with pytest.raises(StorageError, match=r"/f ends at byte 316295, 1 bytes early: truncated"):
        LocalStore().read_ranges(str(path), ranges)


def test_rows_are_read_where_nothing_can_be_announced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """macOS has no ``posix_fadvise``; every read of rows near each other failed there."""
    monkeypatch.delattr(os, "posix_fadvise")
    path = tmp_path / "f"
    path.write_bytes(bytes(range(200)))
    rows = [bytearray(10) for _ in range(10)]

    LocalStore().read_ranges(
        str(path), [(20 * number, (memoryview(row),)) for number, row in enumerate(rows)]
    )

    assert rows == [bytes(range(20 * number, 20 * number + 10)) for number in range(10)]


def test_space_that_was_reserved_and_not_used_is_given_back(tmp_path: Path) -> None:
    """A reserved tail would be a file that is too long, or a disk that fills for nothing."""
    path, size = tmp_path / "f", (40 << 20) + 3

    LocalStore().write_file(str(path), [bytes(1 << 20)] * 40 + [b"end"], fsync=False)

    assert path.stat().st_size == size
    assert path.stat().st_blocks * 512 <= size + (1 << 20)
    assert path.read_bytes()[-4:] == b"\0end"


def test_what_fits_is_written_though_no_more_can_be_reserved(tmp_path: Path) -> None:
    """On a disk that is nearly full, the last checkpoint that fits is the one that counts."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (41 << 20, before[1]))
    try:
        LocalStore().write_file(f"{tmp_path}/f", [bytes(1 << 20)] * 40, fsync=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    assert (tmp_path / "f").stat().st_size == 40 << 20


def test_a_full_disk_is_reported_and_leaves_no_file(tmp_path: Path) -> None:
    """By the kernel's own refusal: a device that is full, and a limit on the size of files."""
    store = LocalStore()
    with pytest.raises(StorageError, match=r"/dev/full does not fit: the file system is full"):
        store.append("/dev/full", b"x")

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Python ignores the signal that goes with it.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        for act in (
            lambda: store.write_file(f"{tmp_path}/f", [bytes(1 << 20)] * 2, fsync=False),
            lambda: store.write_atomic(f"{tmp_path}/f", bytes(2 << 20), fsync=True),
        ):
            with pytest.raises(StorageError, match=r"/f does not fit: larger than"):
                act()
            assert list(tmp_path.iterdir()) == []
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("url", ["{}", "file://{}"])
def test_local_urls_are_served_by_system_calls(url: str, tmp_path: Path) -> None:
    """fsspec between a tensor and a local disk would cost half the speed."""
    store, path = open_store(url.format(tmp_path / "a b"))

    assert isinstance(store, LocalStore)
    assert path == str(tmp_path / "a b")


def test_a_relative_path_becomes_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Worker processes have other working directories than the driver."""
    monkeypatch.chdir(tmp_path)

    assert open_store("runs/x")[1] == str(tmp_path / "runs/x")


@pytest.mark.parametrize("url", ["", "nosuch://x/y"])
def test_a_url_of_no_known_service_is_refused(url: str) -> None:
    """With our own error, not with fsspec's or an import's."""
    with pytest.raises(StorageError):
        open_store(url)


#: Errors that pass by themselves; a mount gives the first one when its server restarted.
_PASSING = [errno.ESTALE, errno.EINTR, errno.EAGAIN, errno.EBUSY, errno.ETIMEDOUT]


class _Mount:
    """Stands for a mount: a call of ``os`` fails once for each path, before or after its effect."""

    def __init__(
        self, patch: pytest.MonkeyPatch, root: Path, number: int, *names: str, after: bool
    ) -> None:
        self.root, self.num_failed = str(root), 0
        for name in names:
            patch.setattr(os, name, self._failing(getattr(os, name), number, after=after))

    def _failing(self, call: Callable[..., Any], number: int, *, after: bool) -> Callable[..., Any]:
        failed: set[str] = set()

        def fail(path: Any, *args: Any, **options: Any) -> Any:
            # The random part of a temporary name would make every name a new one.
            kind = f"{path}".partition(".tmp")[0]
            first = kind not in failed
            failed.add(kind)
            if not first or not kind.startswith(self.root):
                return call(path, *args, **options)
            self.num_failed += 1
            if after:
                result = call(path, *args, **options)
                if isinstance(result, int):
                    os.close(result)
            raise OSError(number, os.strerror(number), path)

        return fail


@pytest.mark.parametrize("number", _PASSING)
@pytest.mark.parametrize("after", [False, True])
def test_an_error_that_passes_is_not_told(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    number: int,
    after: bool,  # noqa: FBT001
) -> None:
    """Each path fails once, and its effect may be there: nothing is done twice or refused."""
    store, path = LocalStore(), str(tmp_path / "a" / "file")
    # pytest itself opens files if an assertion fails.
    with monkeypatch.context() as patch:
        names = ("open", "link", "replace", "scandir", "mkdir", "unlink")
        mount = _Mount(patch, tmp_path, number, *names, after=after)

        assert store.write_atomic(path, b"one", fsync=True, exclusive=True), "its own link"
        assert not store.write_atomic(path, b"two", fsync=True, exclusive=True)
        assert store.read(path) == b"one"
        assert store.write_atomic(path, b"three", fsync=True)
        assert store.write_file(f"{path}s", [b"fo", b"ur"], fsync=True) == 4
        store.append(f"{path}-lines", b"x\n")
        store.append(f"{path}-lines", b"y\n")

        files = ("file", "file-lines", "files")
        assert store.list(str(tmp_path / "a")) == files
        assert [store.read(str(tmp_path / "a" / name)) for name in files] == [
            b"three",
            b"x\ny\n",
            b"four",
        ]
        store.delete(str(tmp_path / "a"))
        assert not store.exists(path)
    assert mount.num_failed > 6


def test_bytes_that_went_out_are_not_appended_twice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An append that is repeated whole would write a record of the journal twice."""
    write, path = os.writev, tmp_path / "lines"

    def writev(fd: int, buffers: Sequence[memoryview]) -> int:
        write(fd, buffers)
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(os, "writev", writev)
    with pytest.raises(StorageError, match="Stale file handle"):
        LocalStore().append(str(path), b"line\n")

    assert path.read_bytes() == b"line\n"


def test_an_error_that_stays_is_raised_after_some_attempts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A directory that was removed on the server is stale for good: no call waits for ever."""
    calls: list[object] = []

    def stale(path: object, *_: object, **__: object) -> int:
        calls.append(path)
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)

    store = LocalStore()
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", stale)
        with pytest.raises(StorageError, match="Stale file handle"):
            store.read(str(tmp_path / "file"))

    assert 2 <= len(calls) <= 10
