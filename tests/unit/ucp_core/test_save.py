from __future__ import annotations

import random

import pytest

from tests.support.checkpoints import (
    empty_tensors,
    local_tensors,
    random_sharding,
    random_state,
)
from ucp_core.boxes import Box
from ucp_core.checkpoint import LocalTensor, RankSaver, load, open_checkpoint
from ucp_core.checksums import BLOCK_BYTES
from ucp_core.manifest import from_bytes, to_bytes
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


def saver_of(tensors: list[LocalTensor], *, rank: int = 0, world_size: int = 1) -> RankSaver:
    return RankSaver(
        tensors, attempt=2, rank=rank, world_size=world_size, source={"writer": "test"}
    )


@pytest.mark.parametrize("seed", range(40))
def test_a_record_from_a_form_is_what_printing_it_whole_gives(seed: int) -> None:
    """It is put together from text; any other byte would be a format of its own."""
    rng = random.Random(seed)
    state = random_state(rng)
    sharding = random_sharding(rng, state, 2)
    for rank in range(2):
        tensors = local_tensors(state, sharding[rank])
        saver = saver_of(tensors, rank=rank, world_size=2)
        for step in (7, 8):
            _, record = saved(saver, tensors, step=step, rank=rank)
            parsed = from_bytes(record)
            assert to_bytes(parsed) == record
            assert (parsed.step, parsed.extra != {}) == (step, rank == 0)


@pytest.mark.parametrize("fqn", ['a"crc32":-1', '"tensors":{}', "100%d %s", "\u20ac\\", "-1"])
def test_names_that_look_like_the_form_stay_names(fqn: str) -> None:
    """Whoever names parameters does not know what is put in where."""
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
            LocalTensor(
                fqn=f"t{number}",
                slot="weight",
                dtype="U8",
                shape=(len(one),),
                box=Box.full((len(one),)),
                data=memoryview(bytearray(one)),
            )
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


def test_a_saver_writes_what_is_there_when_it_saves() -> None:
    """It is made once and used for every step."""
    state = random_state(random.Random(1))
    held = {key: [Box.full(whole.shape)] for key, whole in state.items()}
    tensors = local_tensors(state, held)
    saver = saver_of(empty_tensors(state, held))

    store, _ = saved(saver, tensors, step=4)

    need = empty_tensors(state, held)
    load(open_checkpoint(store, "c"), need)
    assert [bytes(one.data) for one in need] == [bytes(one.data) for one in tensors]
