"""Ranks that need the same read it once between them; no rank waits for one that failed."""

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.checkpoints import ROOT, random_state, save, whole_need
from tests.support.foreign_maps import index, random_box, random_foreign
from tests.support.made import room_for
from ucp_core.errors import CheckpointCorruptError, ChecksumMismatchError, UncoveredRegionError
from ucp_core.geometry import Box, TensorKey
from ucp_core.native import Checkpoint, LocalTensor, load_together, open_checkpoint
from ucp_core.native import replicas as exchange
from ucp_core.native.replicas import shares
from ucp_core.reading import Part, plan
from ucp_core.storage import MemoryStore, join

DIRECTORY = f"{ROOT}/step-00000007"


class _Table:
    """Where threads that play ranks lay their messages."""

    def __init__(self, size: int) -> None:
        self.messages: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=20)
        self.damage: Callable[[bytearray], None] | None = None
        #: Called with what rank 1 got, and the number of its message.
        self.arriving: Callable[[Sequence[memoryview], int], None] = lambda *_: None


class _Seat:
    """One thread's place at the table: a transport."""

    def __init__(self, table: _Table, rank: int) -> None:
        self._table = table
        self.rank = rank
        self.size = len(table.messages)
        self._count = 0

    def all_gather(self, mine: memoryview, held: Sequence[memoryview]) -> None:
        message = bytearray(mine)
        if self._table.damage and self.rank == 0:
            self._table.damage(message)
        self._table.messages[self.rank] = message
        self._table.barrier.wait()
        for buffer, data in zip(held, self._table.messages, strict=True):
            buffer[:] = data
        self._count += 1
        if self.rank == 1:
            self._table.arriving(held, self._count)
        self._table.barrier.wait()


def _together(
    checkpoints: Sequence[Checkpoint], needs: Sequence[list[LocalTensor]], table: _Table
) -> list[Any]:
    """Load as so many ranks; return each one's result or exception."""

    def act(rank: int) -> Any:
        try:
            return load_together(checkpoints[rank], needs[rank], _Seat(table, rank))
        except Exception as error:  # noqa: BLE001 - it is what the test looks at
            return error

    with ThreadPoolExecutor(len(needs)) as pool:
        return list(pool.map(act, range(len(needs))))


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), size=st.integers(1, 5))
def test_every_rank_has_all_and_each_byte_is_read_once(seed: int, size: int) -> None:
    """Gathered, averaged and direct bytes, in chunks of any size."""
    rng = random.Random(seed)
    store = MemoryStore()
    store.request_bytes = rng.choice((64, 1 << 20))
    made = random_foreign(rng, store, block_bytes=64)
    entries = list(made.checkpoint.state_map.entries.values())
    boxes = [random_box(rng, entry.shape) for entry in entries]
    needs = [
        [room_for(entry, box) for entry, box in zip(entries, boxes, strict=True)]
        for _ in range(size)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "_CHUNK_BYTES_MIN", rng.choice((16, 1 << 20)))
        patch.setattr(exchange, "CHUNKS_BYTES", 16)
        results = _together([made.checkpoint] * size, needs, _Table(size))

    for result, need in zip(results, needs, strict=True):
        assert not isinstance(result, Exception), result
        assert result.size_bytes == sum(len(tensor.data) for tensor in need)
        for tensor, entry in zip(need, entries, strict=True):
            expected = made.values[entry.key][index(tensor.box)].tobytes()
            assert bytes(tensor.data) == expected, (entry.key, tensor.box)


@pytest.mark.parametrize("size", [2, 4, 7])
def test_shares_are_disjoint_and_about_equal(size: int) -> None:
    """The load is as fast as the largest share."""
    rng = random.Random(size)
    store = MemoryStore()
    state = random_state(rng, 40)
    save(store, state, step=7, world_size=3)
    state_map = open_checkpoint(store, DIRECTORY).state_map
    need = [Part(k, t.dtype, t.shape, Box.full(t.shape)) for k, t in state.items()]
    reads = plan(need, [state_map], span_bytes_max=64)

    found = shares(reads, size)

    assert [copy for share in found for copy in share.copies] == list(reads.copies)
    sizes = [sum(c.stop_byte - c.start_byte for c in share.copies) for share in found]
    assert max(sizes) - min(sizes) <= 2 * max(c.stop_byte - c.start_byte for c in reads.copies)


def _saved(store: MemoryStore) -> tuple[Checkpoint, list[list[LocalTensor]]]:
    state = random_state(random.Random(5), 40)
    save(store, state, step=7, world_size=2)
    return open_checkpoint(store, DIRECTORY), [whole_need(state) for _ in range(3)]


def test_one_rank_that_cannot_read_stops_all_of_them() -> None:
    """They would wait for its chunk for ever, or train on without it."""
    store = MemoryStore()
    opened, needs = _saved(store)
    path = join(DIRECTORY, "a0001-r00000.bin")
    data = bytearray(store.read(path))
    data[0] ^= 1
    store.write_atomic(path, data, fsync=False)

    results = _together([opened] * 3, needs, _Table(3))

    assert sorted(type(r).__name__ for r in results) == [
        "CheckpointCorruptError",
        "CheckpointCorruptError",
        "ChecksumMismatchError",
    ]
    reader = next(i for i, r in enumerate(results) if isinstance(r, ChecksumMismatchError))
    others = [str(r) for i, r in enumerate(results) if i != reader]
    told = f"rank {reader} of those that load together could not read its share, or got a damaged"
    assert all(other.startswith(told) for other in others)


def test_ranks_that_need_different_tensors_are_told_so() -> None:
    """One rank's weight would be the other's moments."""
    opened, needs = _saved(MemoryStore())
    needs[1].reverse()
    results = _together([opened] * 3, needs, _Table(3))

    assert all(isinstance(result, CheckpointCorruptError) for result in results)
    assert "rank 1" in str(results[0])
    assert "needs other tensors" in str(results[0])


def test_a_tensor_that_one_rank_cannot_have_stops_all() -> None:
    """Before anything is read."""
    opened, needs = _saved(MemoryStore())
    unknown = room_for(opened.state_map.entries[_first(needs[0][0])], needs[0][0].box)
    object.__setattr__(unknown, "fqn", "unknown")
    needs[2].append(unknown)

    results = _together([opened] * 3, needs, _Table(3))

    assert isinstance(results[2], UncoveredRegionError)
    assert [str(r) for r in results[:2]] == [
        "rank 2 of those that load together cannot load what it needs"
    ] * 2


def _first(tensor: LocalTensor) -> TensorKey:
    return TensorKey(tensor.fqn, tensor.slot)


def test_a_message_that_arrives_damaged_is_refused() -> None:
    """Every byte that is loaded was verified, also those that a neighbour read."""
    opened, needs = _saved(MemoryStore())
    table = _Table(3)

    def damage(message: bytearray) -> None:
        if len(message) > 8:
            message[8] ^= 1

    table.damage = damage
    results = _together([opened] * 3, needs, table)

    assert "message of rank 0, one of those that load together, arrived" in str(results[1])
    assert "message of rank 0, one of those that load together, arrived" in str(results[2])


@pytest.mark.parametrize("at", ["the first of many chunks", "the only chunks"])
def test_a_rank_whose_copy_arrives_damaged_leaves_no_rank_waiting(
    at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It alone sees it, and the others would wait for it in the next round, or train on."""
    if at == "the first of many chunks":
        monkeypatch.setattr(exchange, "_CHUNK_BYTES_MIN", 16)
        monkeypatch.setattr(exchange, "CHUNKS_BYTES", 16)
    opened, needs = _saved(MemoryStore())

    def damage(held: Sequence[memoryview], count: int) -> None:
        # The first message is the agreement on the plan.
        if count == 2:
            for rank in (0, 2):
                held[rank][8] ^= 1

    table = _Table(3)
    table.arriving = damage
    results = _together([opened] * 3, needs, table)

    assert "one of those that load together, arrived damaged" in str(results[1])
    assert [result.facts["peer"] for result in (results[0], results[2])] == [1, 1]
