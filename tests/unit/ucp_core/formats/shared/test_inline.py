"""Values that only pickles hold are read as if they lay in files."""

import pytest

from ucp_core.errors import StorageError
from ucp_core.formats.shared.values import INLINE_NAME, overlay
from ucp_core.storage import MemoryStore, Store


def _store() -> Store:
    below = MemoryStore()
    below.write_atomic("d/a", b"below", fsync=False)
    below.write_atomic("d/@other", b"real", fsync=False)
    return overlay(below, {INLINE_NAME: b"0123456789"})


def test_inline_files_are_read_in_any_directory_and_all_else_below() -> None:
    """A checkpoint's directory is not known to whoever makes the overlay."""
    store = _store()
    path = f"any/where/{INLINE_NAME}"
    assert (store.read(path), store.size(path), store.exists(path)) == (b"0123456789", 10, True)
    assert store.read_range(path, 3, 4) == b"3456"
    buffers = (bytearray(2), bytearray(3))
    store.read_ranges(path, [(4, tuple(map(memoryview, buffers)))])
    assert bytes(buffers[0]) + bytes(buffers[1]) == b"45678"
    assert (store.read("d/a"), store.read("d/@other")) == (b"below", b"real")
    assert store.list("d") == ("@other", "a")
    assert store.sizes("d") == {"@other": 4, "a": 5}


def test_reading_beyond_an_inline_file_is_an_error_that_names_it() -> None:
    """A fragment that is longer than its value comes from a reader's mistake or a bad file."""
    with pytest.raises(StorageError, match="@inline"):
        _store().read_range(f"d/{INLINE_NAME}", 8, 3)


def test_writing_goes_below() -> None:
    """An overlay in memory would lose what is written into it."""
    store = _store()
    store.write_file("d/new", [b"x", b"y"], fsync=False)
    store.append("d/new", b"z")
    assert store.read("d/new") == b"xyz"
    store.delete("d/new")
    assert not store.exists("d/new")
