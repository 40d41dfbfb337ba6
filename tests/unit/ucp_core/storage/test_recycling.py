"""Files that are written over: faster, and never under the eyes of somebody who reads them."""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO

import pytest

from ucp_core.storage import RecyclingStore, recycling
from ucp_core.storage.local import create

SIZE = 3 << 20


@pytest.fixture
def store(tmp_path: Path) -> RecyclingStore:
    return RecyclingStore(str(tmp_path))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which new files were made: numbers of inodes are used again by file systems, too."""
    made: list[str] = []

    def make(path: str) -> tuple[str, int]:
        made.append(path)
        return create(path)

    monkeypatch.setattr(recycling, "create", make)
    return made


def _content(seed: int, size: int = SIZE) -> bytes:
    return bytes([seed]) * size


def _write(store: RecyclingStore, path: Path, data: bytes, *, fsync: bool = True) -> None:
    """Write a file in two chunks."""
    middle = len(data) // 2
    assert store.write_file(str(path), [data[:middle], data[middle:]], fsync=fsync) == len(data)


def _spares(tmp_path: Path) -> list[Path]:
    directory = tmp_path / ".tmp-spares"
    return sorted(directory.iterdir()) if directory.is_dir() else []


@pytest.mark.parametrize("size", [SIZE, SIZE // 2, 2 * SIZE, 40 << 20, 0])
def test_the_file_of_a_deleted_directory_is_written_over(
    store: RecyclingStore, made: list[str], tmp_path: Path, size: int
) -> None:
    """Nothing of what it held is left, whether the new one is smaller or larger."""
    _write(store, tmp_path / "step-1/a", _content(1))
    store.delete(str(tmp_path / "step-1"))
    _write(store, tmp_path / "step-2/a", _content(2, size))

    assert made == [str(tmp_path / "step-1/a")]
    assert (tmp_path / "step-2/a").read_bytes() == _content(2, size)
    assert store.list(str(tmp_path)) == ("step-2",)
    assert _spares(tmp_path) == []


@contextmanager
def _opened(path: Path) -> Iterator[Callable[[], bytes]]:
    with path.open("rb") as file:
        yield file.read


@contextmanager
def _mapped(path: Path) -> Iterator[Callable[[], bytes]]:
    def data(file: IO[bytes]) -> mmap.mmap:
        return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)

    with path.open("rb") as file:
        mapping = data(file)
    # The descriptor is closed, also the mapping's own.
    with mapping:
        yield lambda: bytes(mapping)


@contextmanager
def _linked(path: Path) -> Iterator[Callable[[], bytes]]:
    """As backups are made that share files."""
    other = path.parent.parent / "backup"
    os.link(path, other)
    yield other.read_bytes


@pytest.mark.parametrize("holding", [_opened, _mapped, _linked])
def test_what_somebody_has_is_never_written_over(
    store: RecyclingStore,
    made: list[str],
    tmp_path: Path,
    holding: Callable[[Path], AbstractContextManager[Callable[[], bytes]]],
) -> None:
    """Deleting leaves an open file whole; writing over it would not, and locks bind only some."""
    _write(store, tmp_path / "step-1/a", _content(1))

    with holding(tmp_path / "step-1/a") as read:
        store.delete(str(tmp_path / "step-1"))
        _write(store, tmp_path / "step-2/a", _content(2))
        assert read() == _content(1)

    assert len(made) == 2
    assert (tmp_path / "step-2/a").read_bytes() == _content(2)
    assert _spares(tmp_path) == [], "what cannot be used is not kept"


def test_without_fsync_and_for_small_files_nothing_changes(
    store: RecyclingStore, tmp_path: Path
) -> None:
    """There is nothing to be gained."""
    _write(store, tmp_path / "step-1/a", _content(1))
    _write(store, tmp_path / "step-1/small", b"small")
    store.delete(str(tmp_path / "step-1"))
    (spare,) = _spares(tmp_path)

    _write(store, tmp_path / "step-2/a", _content(2), fsync=False)

    assert _spares(tmp_path) == [spare]
    assert store.list(str(tmp_path / "step-2")) == ("a",)


def test_no_more_is_set_aside_than_one_version(store: RecyclingStore, tmp_path: Path) -> None:
    """A run that shrinks must not hold on to the disk space of all that it had."""
    for step in (1, 2):
        for rank in range(4 // step):
            _write(store, tmp_path / f"step-{step}/{rank}", _content(step))
    store.delete(str(tmp_path / "step-1"))
    assert len(_spares(tmp_path)) == 4
    store.delete(str(tmp_path / "step-2"))
    assert len(_spares(tmp_path)) == 2

    store.drop_spares()
    store.drop_spares()

    assert list(tmp_path.iterdir()) == []


def test_of_several_writers_each_gets_another_file(made: list[str], tmp_path: Path) -> None:
    """The keepers of all nodes write the files of a version at once."""
    stores = [RecyclingStore(str(tmp_path)) for _ in range(4)]
    for rank in range(4):
        _write(stores[0], tmp_path / f"step-0/{rank}", _content(9))
    for step in range(1, 9):
        stores[step % 4].delete(str(tmp_path / f"step-{step - 1}"))
        with ThreadPoolExecutor(4) as pool:
            tasks = [
                pool.submit(_write, each, tmp_path / f"step-{step}/{rank}", _content(step + rank))
                for rank, each in enumerate(stores)
            ]
            for task in tasks:
                task.result()
        for rank in range(4):
            assert (tmp_path / f"step-{step}/{rank}").read_bytes() == _content(step + rank)
    assert len(made) == 4


def test_a_writer_that_fails_leaves_neither_the_new_nor_the_old(
    store: RecyclingStore, tmp_path: Path
) -> None:
    """The file that it had begun to write over is of no use to anybody."""
    _write(store, tmp_path / "step-1/a", _content(1))
    store.delete(str(tmp_path / "step-1"))

    def chunks() -> Iterator[bytes]:
        yield _content(2)
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        store.write_file(str(tmp_path / "step-2/a"), chunks(), fsync=True)

    assert list((tmp_path / "step-2").iterdir()) == []
    assert _spares(tmp_path) == []


def test_what_cannot_be_set_aside_is_deleted(store: RecyclingStore, tmp_path: Path) -> None:
    """A directory that is no file system's own, a spare directory that is in the way."""
    _write(store, tmp_path / "step-1/a", _content(1))
    (tmp_path / ".tmp-spares").write_bytes(b"a file")

    store.delete(str(tmp_path / "step-1"))

    assert not (tmp_path / "step-1").exists()
    (tmp_path / ".tmp-spares").unlink()
    shutil.rmtree(tmp_path)
    store.delete(str(tmp_path / "step-1"))
