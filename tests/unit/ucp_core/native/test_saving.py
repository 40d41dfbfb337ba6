import random
from dataclasses import replace

import pytest

from tests.support.checkpoints import (
    empty_tensors,
    local_tensors,
    random_state,
)
from tests.support.made import tensor_of
from ucp_core.errors import CheckpointCorruptError, ChecksumMismatchError
from ucp_core.geometry import Box
from ucp_core.manifest import from_bytes, to_bytes
from ucp_core.native import LocalTensor, RankSaver, load, open_checkpoint
from ucp_core.numerics import BLOCK_BYTES, crc32, sums_of
from ucp_core.storage import MemoryStore

GROUPS = [{"lr": 0.1, "params": ["layers.0.w"]}]


def saved(
    saver: RankSaver, tensors: list[LocalTensor], *, step: int, rank: int = 0
) -> tuple[MemoryStore, bytes]:
    store = MemoryStore()
    saver.save(
        store,
        "c",
        step=step,
        data=[tensors[index].data for index in saver.order],
        extra={"loss": 1.5, "tensors": {}},
        param_groups=GROUPS,
        fsync=False,
    )
    return store, store.read(f"c/a0002-r{rank:05d}.json")


def saver_of(
    tensors: list[LocalTensor],
    *,
    rank: int = 0,
    world_size: int = 1,
    block_bytes: int = BLOCK_BYTES,
    threads: int = 2,
) -> RankSaver:
    return RankSaver(
        tensors,
        attempt=2,
        rank=rank,
        world_size=world_size,
        source={"writer": "test"},
        block_bytes=block_bytes,
        threads=threads,
    )


@pytest.mark.parametrize("fqn", ['a"crc32":-1', '"tensors":{}', "100%d %s", "\u20ac\\", "-1"])
def test_names_that_look_like_the_form_stay_names(fqn: str) -> None:
    """The author of parameter names does not know where the code inserts them."""
    data = memoryview(bytearray(b"01234567"))
    tensor = LocalTensor(fqn=fqn, slot=fqn, dtype="F32", shape=(2,), box=Box.full((2,)), data=data)

    store, record = saved(saver_of([tensor]), [tensor], step=1)

    assert to_bytes(from_bytes(record)) == record
    (entry,) = open_checkpoint(store, "c").state_map.entries
    assert entry == (fqn, fqn)


def test_blocks_of_large_tensors_are_filled_in_in_order() -> None:
    """Small ones have one block, whose checksum is written once."""
    rng = random.Random(3)
    sizes = [3 * BLOCK_BYTES + 5, 10, BLOCK_BYTES, BLOCK_BYTES + 1]
    whole = [rng.randbytes(size) for size in sizes]

    def tensors(data: list[bytes]) -> list[LocalTensor]:
        return [
            tensor_of(f"t{number}", (len(one),), memoryview(bytearray(one)), dtype="U8")
            for number, one in enumerate(data)
        ]

    given = tensors(whole)
    saver = saver_of(given)
    store, record = saved(saver, given, step=1)

    assert to_bytes(from_bytes(record)) == record
    assert len(record) <= saver.record_bytes_max + 200
    need = tensors([bytes(len(one)) for one in whole])
    load(open_checkpoint(store, "c"), need)
    assert [bytes(tensor.data) for tensor in need] == whole


def test_checksums_that_are_known_are_taken_over() -> None:
    """A snapshot is checksummed where it is copied; what is damaged after that must show."""
    data = bytearray(random.Random(5).randbytes(20))
    (tensor,) = _rows([bytes(data)])
    saver = saver_of([tensor], block_bytes=8)
    sums = [sums_of(memoryview(data), 8)]
    tensor.data[9] ^= 1
    store = MemoryStore()
    saver.save(
        store, "c", step=1, data=[tensor.data], extra={}, param_groups=[], fsync=False,
        sums=sums,
    )  # fmt: skip

    assert from_bytes(store.read("c/a0002-r00000.json")).files["a0002-r00000.bin"].crc32 == crc32(
        data
    )
    with pytest.raises(ChecksumMismatchError, match="bytes 8 to 16"):
        load(open_checkpoint(store, "c"), _rows([bytes(20)]))


@pytest.mark.parametrize("sizes", [(4, 16), (16, 4), (8, 8)])
def test_ranks_with_blocks_of_several_sizes_commit_one_checkpoint(sizes: tuple[int, int]) -> None:
    """One rank's part is a stored snapshot, which has small ones, the other's was saved."""
    rng = random.Random(6)
    rows = [rng.randbytes(37), rng.randbytes(37)]
    store = MemoryStore()
    for rank, block_bytes in enumerate(sizes):
        tensor = _rows(rows)[rank]
        saver_of([tensor], rank=rank, world_size=2, block_bytes=block_bytes).save(
            store, "c", step=1, data=[tensor.data], extra={}, param_groups=[], fsync=False
        )
    need = _rows([bytes(37), bytes(37)])
    load(open_checkpoint(store, "c"), need)
    assert [bytes(tensor.data) for tensor in need] == rows

    whole = bytearray(store.read("c/a0002-r00001.bin"))
    whole[33] ^= 1
    store.write_atomic("c/a0002-r00001.bin", bytes(whole), fsync=False)
    with pytest.raises(ChecksumMismatchError, match="bytes 32 to 37"):
        load(open_checkpoint(store, "c"), need)


def test_blocks_that_do_not_make_up_one_another_are_refused() -> None:
    """Their checksums cannot be had without the bytes; better no commit than one that fails."""
    store = MemoryStore()
    first, second = _rows([bytes(9), bytes(9)])
    saver_of([first], world_size=2, block_bytes=6).save(
        store, "c", step=1, data=[first.data], extra={}, param_groups=[], fsync=False
    )
    with pytest.raises(CheckpointCorruptError, match="blocks of 4 bytes, another rank of 6"):
        saver_of([second], rank=1, world_size=2, block_bytes=4).save(
            store, "c", step=1, data=[second.data], extra={}, param_groups=[], fsync=False
        )


def _rows(rows: list[bytes]) -> list[LocalTensor]:
    """Return the rows of one tensor, of which each rank has one."""
    return [
        tensor_of(
            "t",
            (len(rows), len(row)),
            memoryview(bytearray(row)),
            dtype="U8",
            box=Box((number, 0), (number + 1, len(row))),
        )
        for number, row in enumerate(rows)
    ]


def test_a_saver_writes_what_is_there_when_it_saves() -> None:
    """It is made once and used for every step."""
    state = random_state(random.Random(1))
    held = {key: [Box.full(whole.shape)] for key, whole in state.items()}
    tensors = local_tensors(state, held)
    saver = saver_of(empty_tensors(state, held))

    for step in (4, 5):
        store, record = saved(saver, tensors, step=step)

        assert from_bytes(record).step == step
        assert to_bytes(from_bytes(record)) == record
        need = empty_tensors(state, held)
        load(open_checkpoint(store, "c"), need)
        assert [bytes(one.data) for one in need] == [bytes(one.data) for one in tensors]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_large_state_is_checksummed_as_it_is_in_the_file(threads: int) -> None:
    """Two threads may read it; every block must still be told from one with a flipped bit."""
    rng = random.Random(2)
    # Neither ends with a block.
    tensors = [
        tensor_of(fqn, (size,), memoryview(rng.randbytes(size)), dtype="U8", box=Box((0,), (size,)))
        for fqn, size in (("a", (12 << 20) + 5), ("b", (7 << 20) - 1))
    ]

    store, record = saved(saver_of(tensors, threads=threads), tensors, step=4)

    name = "a0002-r00000.bin"
    data = bytearray(store.read(f"c/{name}"))
    assert data == b"".join(bytes(one.data) for one in tensors)
    assert from_bytes(record, where="record").files[name].crc32 == crc32(data)
    for low in range(0, len(data), BLOCK_BYTES):
        data[low] ^= 1
        store.write_file(f"c/{name}", [data], fsync=False)
        with pytest.raises(ChecksumMismatchError):
            load(open_checkpoint(store, "c"), [_empty(one) for one in tensors])
        data[low] ^= 1


def _empty(tensor: LocalTensor) -> LocalTensor:
    return replace(tensor, data=memoryview(bytearray(len(tensor.data))))
