"""Reads, memory and checks of the plan's execution."""

import random
import tracemalloc
from collections.abc import Iterable, Sequence

import pytest

from tests.support.checkpoints import ROOT, State, Whole, assert_loaded, empty_tensors, save
from tests.support.made import tensor_of
from ucp_core.conversion import convert
from ucp_core.errors import ChecksumMismatchError
from ucp_core.geometry import Box, TensorKey
from ucp_core.native import Checkpoint, load, open_checkpoint
from ucp_core.storage import Buffer, MemoryStore, ReadRange, join

DIRECTORY = f"{ROOT}/step-00000007"
KEY = TensorKey("w", "weight")
MIB = 1 << 20


class _CountingStore(MemoryStore):
    """Notes what is read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[tuple[str, int, int]] = []

    def read_ranges(self, path: str, ranges: Sequence[ReadRange]) -> None:
        for start, buffers in ranges:
            self.reads.append((path.rsplit("/", 1)[-1], start, sum(map(len, buffers))))
            offset = start
            # Slices of the file, so that the store itself allocates nothing.
            data = memoryview(self.read(path))
            for buffer in buffers:
                buffer[:] = data[offset : offset + len(buffer)]
                offset += len(buffer)


def _state(rows: int, columns: int) -> State:
    data = random.Random(rows).randbytes(4 * rows * columns)
    return {KEY: Whole(dtype="F32", shape=(rows, columns), data=data)}


def _saved(store: MemoryStore, state: State, world_size: int, dim: int = 0) -> Checkpoint:
    boxes = Box.full(state[KEY].shape).split(dim, world_size)
    sharding = [{KEY: [box]} for box in boxes]
    save(store, state, step=7, world_size=world_size, sharding=sharding)
    return open_checkpoint(store, DIRECTORY)


def test_a_part_of_a_fragment_reads_its_blocks_and_no_more() -> None:
    """Whole-fragment reads for a sub-box are what makes DCP slow."""
    store = _CountingStore()
    state = _state(16, MIB // 4)
    opened = _saved(store, state, world_size=2)
    need = empty_tensors(state, {KEY: [Box((2, 0), (4, MIB // 4))]})

    result = load(opened, need)

    assert_loaded(state, need)
    assert store.reads == [("a0001-r00000.bin", 2 * MIB, 2 * MIB)]
    assert result.read_bytes == 2 * MIB


def test_a_part_that_cuts_blocks_is_verified_by_whole_blocks() -> None:
    """Every loaded byte is verified, and only whole blocks can be."""
    store = _CountingStore()
    state = _state(4 * MIB // 4, 1)
    opened = _saved(store, state, world_size=1)
    need = empty_tensors(state, {KEY: [Box((MIB // 8, 0), (MIB // 8 + MIB // 2, 1))]})

    load(opened, need)

    assert_loaded(state, need)
    assert store.reads == [("a0001-r00000.bin", 0, 3 * MIB)]


def test_columns_that_lie_far_apart_are_read_by_their_blocks() -> None:
    """A few columns of long rows: a read from the first to the last would read nearly all."""
    store = _CountingStore()
    state = _state(8, MIB)
    opened = _saved(store, state, world_size=1)
    need = empty_tensors(state, {KEY: [Box((0, 5), (8, 9))]})

    result = load(opened, need)

    assert_loaded(state, need)
    expected = [("a0001-r00000.bin", 4 * MIB * row, MIB) for row in range(8)]
    # Two threads read.
    assert sorted(store.reads) == expected
    assert result.read_bytes == 8 * MIB


def test_a_large_gather_passes_through_little_memory_and_reads_no_block_twice() -> None:
    """Half the columns of 32 MiB in requests of 1 MiB: rows cross the ends of requests."""
    store = _CountingStore()
    store.request_bytes = MIB
    state = _state(1000, 8397)
    opened = _saved(store, state, world_size=1)
    need = empty_tensors(state, {KEY: [Box((0, 11), (1000, 4211))]})
    tracemalloc.start()

    result = load(opened, need, threads=1)

    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert_loaded(state, need)
    assert sum(size for _, _, size in store.reads) == result.read_bytes
    assert result.read_bytes <= 4 * 1000 * 8397 + 2 * MIB
    assert peak <= 3 * MIB


def test_a_large_part_is_read_into_place_and_only_its_cut_blocks_pass_through_memory() -> None:
    """Bytes 0.5 to 12.5 MiB in requests of 2 MiB: the block at either end is read whole."""
    store = _CountingStore()
    store.request_bytes = 2 * MIB
    state = _state(4 * MIB, 1)
    opened = _saved(store, state, world_size=1)
    need = empty_tensors(state, {KEY: [Box((MIB // 8, 0), (3 * MIB + MIB // 8, 1))]})
    tracemalloc.start()

    result = load(opened, need, threads=1)

    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert_loaded(state, need)
    # The reads of 8 MiB that the plan is made of, with the ends of blocks between them.
    assert sorted(store.reads) == [
        ("a0001-r00000.bin", low * MIB, size * MIB)
        for low, size in ((0, 1), (1, 2), (3, 2), (5, 2), (7, 1), (8, 2), (10, 2), (12, 1))
    ]
    assert result.read_bytes == 13 * MIB
    assert peak <= 5 * MIB


@pytest.mark.parametrize("damaged_byte", [17, MIB - 1, MIB, 7 * MIB + 5, 12 * MIB, 13 * MIB - 1])
def test_damage_anywhere_in_the_blocks_of_a_large_part_is_found(damaged_byte: int) -> None:
    """In its first block, its last and between them, needed itself or not; once not beyond."""
    store = MemoryStore()
    store.request_bytes = 2 * MIB
    state = _state(4 * MIB, 1)
    opened = _saved(store, state, world_size=1)
    need = empty_tensors(state, {KEY: [Box((MIB // 8, 0), (3 * MIB + MIB // 8, 1))]})
    path = join(DIRECTORY, "a0001-r00000.bin")
    data = bytearray(store.read(path))
    data[13 * MIB] ^= 1
    store.write_atomic(path, data, fsync=False)
    load(opened, need)
    data[damaged_byte] ^= 1
    store.write_atomic(path, data, fsync=False)

    with pytest.raises(ChecksumMismatchError) as caught:
        load(opened, need)

    assert caught.value.facts["start_byte"] == damaged_byte // MIB * MIB


def test_neighbours_in_a_file_are_read_together() -> None:
    """A read per tensor costs a request each on an object store."""
    store = _CountingStore()
    state: State = {
        TensorKey(f"layers.{index}", "weight"): Whole(dtype="U8", shape=(10,), data=bytes(10))
        for index in range(50)
    }
    save(store, state, step=7, world_size=1)
    need = empty_tensors(state, {key: [Box.full((10,))] for key in state if key.fqn[-1] != "3"})

    load(open_checkpoint(store, DIRECTORY), need)

    assert_loaded(state, need)
    assert len(store.reads) == 1


@pytest.mark.parametrize("threads", [1, 4])
def test_damage_in_one_block_is_named_to_the_block(threads: int) -> None:
    """Which tensor, which file, which bytes: what a person needs to look at the disk."""
    store = MemoryStore()
    state = _state(16, MIB // 4)
    opened = _saved(store, state, world_size=2)
    path = join(DIRECTORY, "a0001-r00001.bin")
    data = bytearray(store.read(path))
    data[5 * MIB + 17] ^= 0x40
    store.write_atomic(path, data, fsync=False)

    with pytest.raises(ChecksumMismatchError) as caught:
        load(
            opened,
            empty_tensors(state, {KEY: [Box.full((16, MIB // 4))]}),
            threads=threads,
        )
    assert caught.value.facts["fqn"] == "w"
    assert caught.value.facts["path"] == path
    assert (caught.value.facts["start_byte"], caught.value.facts["stop_byte"]) == (
        5 * MIB,
        6 * MIB,
    )
    # Tensors that do not touch the block load.
    load(opened, empty_tensors(state, {KEY: [Box((0, 0), (13, MIB // 4))]}), threads=threads)


def test_memory_of_another_size_is_a_mistake_of_the_caller() -> None:
    """It would be filled with parts of neighbours."""
    store = MemoryStore()
    state = _state(4, 4)
    opened = _saved(store, state, world_size=1)
    (need,) = empty_tensors(state, {KEY: [Box.full((4, 4))]})
    short = tensor_of(
        need.fqn, need.shape, need.data[:-4], slot=need.slot, dtype=need.dtype, box=need.box
    )

    with pytest.raises(AssertionError, match="data has 60 bytes, box"):
        load(opened, [short])


class _SinkStore(MemoryStore):
    """Keeps nothing of large files."""

    def write_file(self, path: str, chunks: Iterable[Buffer], *, fsync: bool) -> int:
        del path, fsync
        return sum(len(chunk) for chunk in chunks)


@pytest.mark.parametrize(("dim", "memory_bytes"), [(0, 8 * MIB), (1, 16 * MIB)])
def test_materialising_stays_within_its_memory(dim: int, memory_bytes: int) -> None:
    """32 MiB by rows through 8 MiB, and by columns, which have to be gathered, through 16."""
    store = _CountingStore()
    state = _state(4096, 2048)
    opened = _saved(store, state, world_size=4, dim=dim)
    tracemalloc.start()

    convert(opened, _SinkStore(), "out", memory_bytes=memory_bytes, processes=1)

    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak <= memory_bytes
    read = sum(size for _, _, size in store.reads)
    assert read <= 1.05 * 32 * MIB
