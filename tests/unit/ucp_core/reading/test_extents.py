"""Reads of foreign files, and the facts found about them."""

from __future__ import annotations

import random
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.support.counting_store import CountingStore
from tests.support.foreign_maps import DIRECTORY, Foreign, random_foreign
from tests.support.made import room_for
from ucp_core.errors import ChecksumMismatchError
from ucp_core.geometry import Box, Extent, Fragment, StateMap, TensorEntry, TensorKey
from ucp_core.manifest import Kind, Manifest
from ucp_core.native import Checkpoint, LoadResult, load
from ucp_core.numerics import crc32
from ucp_core.reading import verify_extents
from ucp_core.storage import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucp_core.storage import ReadRange

KEY = TensorKey("w", "weight")
ROWS, COLUMNS = 64, 65536
FILE = f"{DIRECTORY}/rank0.pt"


def _matrix(store: MemoryStore, strides: tuple[int, int] | None = None) -> Checkpoint:
    """Return a matrix of 16 MiB in one record of a file, by rows or by columns."""
    values = np.arange(ROWS * COLUMNS, dtype=np.uint32).reshape(ROWS, COLUMNS)
    data = (values if strides is None else values.T).tobytes()
    store.write_atomic(FILE, b"zip header" + data + b"directory", fsync=False)
    store.request_bytes = 1 << 20
    fragment = Fragment(
        Box.full(values.shape), "rank0.pt", 10, len(data), None, (), strides=strides
    )
    entry = TensorEntry(key=KEY, dtype="U32", shape=values.shape, fragments=(fragment,))
    extents = {"rank0.pt": (Extent(10, len(data), crc32(data)),)}
    state_map = StateMap(entries={KEY: entry}, block_bytes=1 << 20, extents=extents)
    manifest = Manifest(kind=Kind.FOREIGN, step=1, attempt=0, state_map=state_map, files={})
    return Checkpoint(store=store, directory=DIRECTORY, manifest=manifest)


def _load(checkpoint: Checkpoint, box: Box) -> LoadResult:
    need = room_for(checkpoint.state_map.entries[KEY], box)
    result = load(checkpoint, [need])
    whole = np.arange(ROWS * COLUMNS, dtype=np.uint32).reshape(ROWS, COLUMNS)
    assert bytes(need.data) == whole[tuple(map(slice, *box))].tobytes()
    return result


@pytest.mark.parametrize("strides", [None, (4, 4 * ROWS)], ids=["by rows", "by columns"])
@pytest.mark.parametrize(
    "box",
    [Box((3, 5), (4, 9)), Box((2, 0), (6, COLUMNS)), Box((0, 7), (ROWS, 9)), Box((1, 1), (2, 2))],
    ids=str,
)
def test_a_box_reads_its_own_bytes_and_small_gaps(
    box: Box, strides: tuple[int, int] | None
) -> None:
    """No blocks where there are no checksums; no rows for a few columns of each."""
    store = CountingStore()
    made = _matrix(store, strides)

    result = _load(made, box)

    rows, columns = box.shape
    # Neighbours along the dim that lies apart are 256 KiB or 256 bytes apart.
    lines = columns if strides else rows
    far = (4 * COLUMNS) if strides is None else 4 * ROWS
    gaps = (lines - 1) * far if far <= 64 << 10 else 0
    assert store.read_bytes <= rows * columns * 4 + gaps
    assert result.read_bytes <= store.read_bytes


def test_rows_go_straight_to_their_place() -> None:
    """Bytes that lie alike on both sides pass through no other memory."""
    store = CountingStore()
    made = _matrix(store)
    seen: list[memoryview] = []
    read_ranges = store.read_ranges

    def noting(path: str, ranges: Sequence[ReadRange]) -> None:
        seen.extend(chain.from_iterable(buffers for _, buffers in ranges))
        read_ranges(path, ranges)

    store.read_ranges = noting  # type: ignore[method-assign]
    need = room_for(made.state_map.entries[KEY], Box((8, 0), (16, COLUMNS)))
    load(made, [need])

    assert {id(buffer.obj) for buffer in seen} == {id(need.data.obj)}


@pytest.mark.parametrize("half_bytes", [4 << 10, 8 << 10])
def test_columns_far_apart_are_read_without_what_lies_between(half_bytes: int) -> None:
    """Another rank's columns are as many bytes; near ones are cheaper read than left out."""
    store = CountingStore()
    values = np.random.default_rng(0).integers(0, 2**32, (ROWS, half_bytes // 2), np.uint32)
    store.write_atomic(FILE, b"zip header" + values.tobytes(), fsync=False)
    store.request_bytes = 1 << 20
    fragment = Fragment(Box.full(values.shape), "rank0.pt", 10, values.nbytes, None, ())
    entry = TensorEntry(key=KEY, dtype="U32", shape=values.shape, fragments=(fragment,))
    state_map = StateMap(entries={KEY: entry}, block_bytes=1 << 20)
    manifest = Manifest(kind=Kind.FOREIGN, step=1, attempt=0, state_map=state_map, files={})
    made = Checkpoint(store=store, directory=DIRECTORY, manifest=manifest)
    need = room_for(entry, Box((3, half_bytes // 4), (60, half_bytes // 2)))

    load(made, [need])

    assert bytes(need.data) == values[3:60, half_bytes // 4 :].tobytes()
    wanted = (60 - 3) * half_bytes
    gaps = (60 - 3 - 1) * half_bytes
    assert store.read_bytes == (wanted + gaps if half_bytes < 8 << 10 else wanted)


def _verify(made: Foreign, threads: int) -> int:
    checkpoint = made.checkpoint
    state_map = checkpoint.state_map
    return verify_extents(
        checkpoint.store, DIRECTORY, state_map, state_map.extents, threads=threads
    )


def _foreign(store: MemoryStore) -> Foreign:
    return random_foreign(random.Random(3), store, block_bytes=64)


@pytest.mark.parametrize("threads", [1, 3])
def test_every_extent_is_read_once(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither twice the reading nor an unverified record."""
    monkeypatch.setattr("ucp_core.reading.extents.THREAD_BYTES_MIN", 1)
    store = CountingStore()
    made = _foreign(store)
    extents = [
        (f"{DIRECTORY}/{file}", extent.offset_bytes, extent.num_bytes)
        for file, found in made.checkpoint.state_map.extents.items()
        for extent in found
        if extent.num_bytes
    ]

    assert _verify(made, threads) == sum(size for _, _, size in extents)
    assert sorted(store.reads) == sorted(extents)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_flipped_byte_of_an_extent_is_found(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And named with the tensors in it."""
    monkeypatch.setattr("ucp_core.reading.extents.THREAD_BYTES_MIN", 1)
    store = MemoryStore()
    made = _foreign(store)
    file, extents = max(made.checkpoint.state_map.extents.items())
    extent = max(extents, key=lambda e: e.num_bytes)
    path = f"{DIRECTORY}/{file}"
    data = bytearray(store.read(path))
    data[extent.offset_bytes + extent.num_bytes // 2] ^= 4
    store.write_atomic(path, data, fsync=False)

    with pytest.raises(ChecksumMismatchError) as found:
        _verify(made, threads)

    facts = found.value.facts
    assert (facts["path"], facts["start_byte"]) == (path, extent.offset_bytes)
    assert facts["tensors"][0] in str(found.value)


def test_a_load_can_verify_the_records_that_it_touches() -> None:
    """Bytes without checksums of their own load as they are, unless asked to be verified."""
    store = CountingStore()
    made = _matrix(store)
    data = bytearray(store.read(FILE))
    data[10 + 4 * 5 * COLUMNS] ^= 1
    store.write_atomic(FILE, data, fsync=False)
    need = [room_for(made.state_map.entries[KEY], Box((1, 0), (2, 8)))]

    load(made, need)
    assert store.read_bytes == 32
    with pytest.raises(
        ChecksumMismatchError, match=r"w \(weight\): .*rank0.pt is damaged in bytes 10 to 16777226"
    ):
        load(made, need, with_extents=True)


def test_a_load_verifies_no_record_that_it_does_not_touch() -> None:
    """A caller that wants one tensor of a checkpoint does not read all of it."""
    store = CountingStore()
    made = _foreign(store)
    state_map = made.checkpoint.state_map
    entry = next(e for e in state_map.entries.values() if e.num_bytes and e.copies == 1)
    need = [room_for(entry, Box.full(entry.shape))]

    load(made.checkpoint, need, with_extents=True)

    for path, low, size in store.reads:
        held = [f.offset_bytes for f in entry.fragments if path.endswith(f.file)]
        assert any(low <= offset < low + size for offset in held), (path, low, size)
    assert bytes(need[0].data) == made.values[entry.key].tobytes()
