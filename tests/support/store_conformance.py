"""Every store passes this. A new one subclasses ``StoreConformance`` and says how to make it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.checkpoints import assert_loaded, save, small_state, whole_need
from ucp_core.conversion import convert
from ucp_core.errors import StorageError
from ucp_core.inspection import verify
from ucp_core.native import find_committed, load, open_checkpoint
from ucp_core.storage import (
    Store,
    appended_sizes,
    join,
    read_all_appended,
    read_appended,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


class StoreConformance(ABC):
    """Collected through its subclasses, whose names begin with ``Test``.

    ``looks_first`` says that the storage behind the store cannot write exclusively by itself, so
    that two writers of one instant can both win. SPEC.md tells what that means for a commit.
    """

    looks_first = False

    @abstractmethod
    def make(self, tmp_path: Path) -> tuple[Store, str]:
        """Return an empty store and a directory in it for this test alone."""

    @pytest.fixture
    def place(self, tmp_path: Path) -> tuple[Store, str]:
        return self.make(tmp_path)

    def test_what_was_written_is_read(self, place: tuple[Store, str]) -> None:
        """Empty files and files of one byte are where off-by-one errors live."""
        store, root = place
        for data in (b"", b"x", bytes(range(256)) * 10_000):
            path = join(root, f"d/{len(data)}")
            assert store.write_atomic(path, data, fsync=False)
            assert store.read(path) == data
            assert store.size(path) == len(data)
            assert store.exists(path)

    def test_a_checkpoint_lives_in_it(self, place: tuple[Store, str]) -> None:
        """Save, commit, find, load, convert and verify."""
        store, root = place
        state = small_state()
        assert [r.committed for r in save(store, state, step=7, root=root)] == [False, True]

        found = find_committed(store, root, lineage=[(1, 0)])
        assert found is not None
        universal = join(root, "universal")
        convert(found.checkpoint, store, universal, memory_bytes=8 << 20, processes=1)

        for checkpoint in (found.checkpoint, open_checkpoint(store, universal)):
            need = whole_need(state)
            load(checkpoint, need)
            assert_loaded(state, need)
            assert verify(checkpoint) == []
            assert checkpoint.extra == {"cursor": {"step": 7}}

    def test_a_stamp_changes_with_each_write(self, place: tuple[Store, str]) -> None:
        """Caches of what a file holds go by it, and a new file may be as long as the old one."""
        store, root = place
        path = join(root, "a")
        store.write_atomic(path, b"one", fsync=False)
        first = store.stamp(path)
        assert (first.size_bytes, store.stamp(path)) == (3, first)
        store.write_atomic(path, b"two", fsync=False)

        assert store.stamp(path).text != first.text

    def test_a_file_is_replaced_at_once(self, place: tuple[Store, str]) -> None:
        """A shorter file over a longer one must not keep the longer one's end."""
        store, root = place
        store.write_atomic(join(root, "a"), b"a long first version", fsync=True)
        store.write_atomic(join(root, "a"), b"short", fsync=True)

        assert store.read(join(root, "a")) == b"short"
        assert store.list(root) == ("a",)

    def test_an_exclusive_write_never_replaces(self, place: tuple[Store, str]) -> None:
        """The first commit wins; the second must learn that it lost."""
        store, root = place

        assert store.write_atomic(join(root, "m"), b"first", fsync=False, exclusive=True)
        assert not store.write_atomic(join(root, "m"), b"second", fsync=False, exclusive=True)
        assert store.read(join(root, "m")) == b"first"
        assert store.list(root) == ("m",)

    def test_one_of_many_exclusive_writers_wins(self, place: tuple[Store, str]) -> None:
        """Ranks that finish together all try to commit."""
        if self.looks_first:
            pytest.skip("the storage behind this store cannot write exclusively")
        store, root = place
        path = join(root, "m")

        with ThreadPoolExecutor(8) as pool:
            won = list(
                pool.map(
                    lambda i: store.write_atomic(path, b"%d" % i, fsync=False, exclusive=True),
                    range(16),
                )
            )

        assert sum(won) == 1
        assert store.read(path) == b"%d" % won.index(True)

    def test_chunks_become_one_file(self, place: tuple[Store, str]) -> None:
        """Chunks around the size at which calls are gathered, and more than one call takes."""
        store, root = place
        chunks = [b"a" * 10] * 3000 + [b"b" * (1 << 20), b"", b"c" * ((1 << 20) + 1), b"d"]

        assert store.write_file(join(root, "x/f"), chunks, fsync=True) == sum(map(len, chunks))
        assert store.read(join(root, "x/f")) == b"".join(chunks)

    def test_a_chunk_may_be_reused_once_the_next_is_asked_for(
        self, place: tuple[Store, str]
    ) -> None:
        """A store that gathers views would write the last content many times."""
        store, root = place

        def reusing(size: int) -> Iterator[memoryview]:
            buffer = bytearray(size)
            for value in range(100):
                buffer[:] = bytes([value]) * size
                yield memoryview(buffer)

        for size in (1, 70_000):
            store.write_file(join(root, "f"), reusing(size), fsync=False)

            assert store.read(join(root, "f")) == b"".join(
                bytes([value]) * size for value in range(100)
            )

    def test_a_writer_that_fails_leaves_no_trace(self, place: tuple[Store, str]) -> None:
        """A half-written file under its true name would pass for a whole one."""
        store, root = place
        store.write_file(join(root, "f"), [b"old"], fsync=False)

        def failing() -> Iterator[bytes]:
            yield b"n" * (2 << 20)
            raise RuntimeError("the tensor is gone")

        with pytest.raises(RuntimeError, match="the tensor is gone"):
            store.write_file(join(root, "f"), failing(), fsync=False)
        with pytest.raises(RuntimeError, match="the tensor is gone"):
            store.write_file(join(root, "g"), failing(), fsync=False)

        assert store.read(join(root, "f")) == b"old"
        assert store.list(root) == ("f",)

    def test_ranges_fill_their_buffers(self, place: tuple[Store, str]) -> None:
        """Several buffers in one range, out of order, and more than one call takes."""
        store, root = place
        data = bytes(range(256)) * 64
        store.write_atomic(join(root, "f"), data, fsync=False)
        many = [bytearray(3) for _ in range(2000)]
        one, two, none = bytearray(5), bytearray(7), bytearray(0)

        store.read_ranges(
            join(root, "f"),
            [
                (100, (memoryview(one), memoryview(none), memoryview(two))),
                (1, tuple(map(memoryview, many))),
            ],
        )

        assert bytes(one + two) == data[100:112]
        assert b"".join(many) == data[1:6001]
        assert store.read_range(join(root, "f"), 9, 4) == data[9:13]

    def test_reading_behind_the_end_is_an_error(self, place: tuple[Store, str]) -> None:
        """A truncated file must not come back as a short or zeroed tensor."""
        store, root = place
        store.write_atomic(join(root, "f"), b"12345", fsync=False)

        with pytest.raises(StorageError, match="truncated"):
            store.read_range(join(root, "f"), 3, 3)
        with pytest.raises(StorageError, match="truncated"):
            store.read_ranges(join(root, "f"), [(0, (memoryview(bytearray(6)),))])

    def test_a_missing_file_is_named(self, place: tuple[Store, str]) -> None:
        """Callers tell "nothing there" from "storage broken" by ``facts``."""
        store, root = place
        path = join(root, "none")

        for call in (store.read, store.size):
            with pytest.raises(StorageError, match="none does not exist") as caught:
                call(path)
            assert caught.value.facts["missing"]
        assert not store.exists(path)

    def test_appended_bytes_follow_one_another(self, place: tuple[Store, str]) -> None:
        """The journal is made by appending to a file that may not be there yet."""
        store, root = place
        path = join(root, "journal/000001.jsonl")
        lines = [b"%d\n" % number for number in range(70)]
        for line in lines:
            store.append(path, line)
        store.append(join(root, "journal/000002.jsonl"), b"later")

        assert read_appended(store, path) == b"".join(lines)
        assert read_appended(store, path, 100) == b"".join(lines)[100:]
        sizes = {"000001.jsonl": len(b"".join(lines)), "000002.jsonl": 5}
        assert appended_sizes(store, join(root, "journal")) == sizes
        assert read_all_appended(store, join(root, "journal"), first="000002.jsonl") == {
            "000002.jsonl": b"later"
        }
        with pytest.raises(StorageError, match=r"000003.jsonl does not exist") as caught:
            read_appended(store, join(root, "journal/000003.jsonl"))
        assert caught.value.facts["missing"]

    def test_files_are_deleted_together(self, place: tuple[Store, str]) -> None:
        """One that is gone already hinders nothing."""
        store, root = place
        for name in ("a", "b", "c"):
            store.write_atomic(join(root, name), b"1", fsync=False)

        store.delete_files([join(root, name) for name in ("a", "gone", "c")])
        store.delete_files([])

        assert store.list(root) == ("b",)

    def test_a_directory_lists_names_and_sizes(self, place: tuple[Store, str]) -> None:
        """Only its own: neither what lies deeper nor what has the same beginning."""
        store, root = place
        for name, data in (("b", b"22"), ("a", b"1"), ("sub/c", b"333"), ("sub2", b"")):
            store.write_atomic(join(root, "dir", name), data, fsync=False)
        store.write_atomic(join(root, "dir2"), b"", fsync=False)

        assert store.list(join(root, "dir")) == ("a", "b", "sub", "sub2")
        assert store.sizes(join(root, "dir")) == {"a": 1, "b": 2, "sub2": 0}
        assert store.exists(join(root, "dir"))
        assert store.list(join(root, "none")) == ()
        assert store.sizes(join(root, "none")) == {}

    def test_what_is_deleted_is_gone(self, place: tuple[Store, str]) -> None:
        """With all in it; and twice is once, because two collectors may meet."""
        store, root = place
        store.write_atomic(join(root, "dir/a"), b"1", fsync=False)
        store.write_atomic(join(root, "dir/sub/b"), b"2", fsync=False)
        store.write_atomic(join(root, "dir2"), b"3", fsync=False)

        store.delete(join(root, "dir"))
        store.delete(join(root, "dir"))

        assert not store.exists(join(root, "dir/sub/b"))
        assert not store.exists(join(root, "dir"))
        assert store.read(join(root, "dir2")) == b"3"

    def test_a_directory_can_be_made_before_its_files(self, place: tuple[Store, str]) -> None:
        """Twice, too: every rank does it."""
        store, root = place
        store.makedirs(join(root, "x/y"))
        store.makedirs(join(root, "x/y"))

        assert store.list(join(root, "x/y")) == ()

    def test_a_lock_is_shared_or_held_alone(self, place: tuple[Store, str]) -> None:
        """A collector that gets the lock beside a reader deletes what it reads."""
        store, root = place
        path = join(root, "m")
        store.write_atomic(path, b"x", fsync=False)
        with store.lock(path, shared=True) as held:
            if held is None:
                pytest.skip("the storage has no locks")
            assert held
            with store.lock(path, shared=True) as second:
                assert second
            with store.lock(path, shared=False) as alone:
                assert not alone
        with store.lock(path, shared=False) as alone:
            assert alone
            with store.lock(path, shared=True) as held, store.lock(path, shared=False) as other:
                assert (held, other) == (False, False)
        with store.lock(path, shared=True) as held:
            assert held

    def test_what_is_gone_cannot_be_locked(self, place: tuple[Store, str]) -> None:
        """To lock a deleted file would protect nothing."""
        store, root = place
        path = join(root, "m")
        store.write_atomic(path, b"x", fsync=False)
        with store.lock(path, shared=True) as held:
            if held is None:
                pytest.skip("the storage has no locks")
        store.delete(path)

        with (
            pytest.raises(StorageError, match="m does not exist") as caught,
            store.lock(path, shared=True),
        ):
            pytest.fail("locked what is not there")
        assert caught.value.facts["missing"]
