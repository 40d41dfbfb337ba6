"""Versions in memory against plain numpy: any layout in, any layout out, and no bad byte ever."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucp_core.boxes import Box
from ucp_core.checkpoint import LocalTensor, load, save_rank
from ucp_core.errors import CheckpointCorruptError, StorageError, UcpError
from workers.keeper.arena import Arena
from workers.snapshot.arena_store import ArenaStore
from workers.snapshot.tier import LocalPart, complete_versions, open_version

SHAPES = {"embed": (33, 8), "bias": (5,), "scale": ()}


def _state(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {fqn: rng.standard_normal(shape).astype(np.float32) for fqn, shape in SHAPES.items()}


def _parts(state: dict[str, np.ndarray], rank: int, world: int) -> list[LocalTensor]:
    """Return what ``rank`` holds under dim-0 sharding: copies, as a trainer would hand them."""
    parts = []
    for fqn, value in state.items():
        whole = Box.full(value.shape)
        box = whole.split(0, world)[rank] if value.ndim else whole
        data = np.ascontiguousarray(value[tuple(map(slice, box.start, box.stop))])
        parts.append(
            LocalTensor(
                fqn=fqn, slot="weight", dtype="F32", shape=value.shape, box=box,
                data=memoryview(bytearray(data.tobytes())),
                replica=not value.ndim and rank > 0,
            )
        )  # fmt: skip
    return parts


def _snapshot(
    arena: Arena, state: dict[str, np.ndarray], *, step: int, rank: int, world: int
) -> int:
    slot = arena.choose(())
    arena.begin(slot, attempt=1, step=step, rank=rank, world_size=world)
    save_rank(
        ArenaStore(arena, slot),
        f"step-{step:08d}",
        step=step,
        attempt=1,
        rank=rank,
        world_size=world,
        tensors=_parts(state, rank, world),
        extra={"cursor": step},
        param_groups=[],
        source={},
        fsync=False,
    )
    return slot


@contextmanager
def _arenas(world: int) -> Iterator[list[Arena]]:
    arenas = [Arena.create(f"r{rank}", body_bytes=1 << 16) for rank in range(world)]
    try:
        yield arenas
    finally:
        for arena in arenas:
            arena.close()


def _held(arenas: list[Arena]) -> list[LocalPart]:
    return [LocalPart(arena, held) for arena in arenas for held in arena.versions()]


def _check_loads(
    arenas: list[Arena], state: dict[str, np.ndarray], *, step: int, world: int
) -> None:
    checkpoint = open_version(complete_versions(_held(arenas))[1, step])
    assert (checkpoint.step, checkpoint.extra) == (step, {"cursor": step})
    for rank in range(world):
        need = _parts({fqn: np.zeros_like(value) for fqn, value in state.items()}, rank, world)
        load(checkpoint, need)
        for got, expected in zip(need, _parts(state, rank, world), strict=True):
            assert bytes(got.data) == bytes(expected.data), (got.fqn, rank)


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 1000))
def test_a_snapshot_loads_under_any_number_of_ranks(before: int, after: int, seed: int) -> None:
    """A lost worker is the usual reason to load it."""
    state = _state(seed)
    with _arenas(before) as arenas:
        for rank, arena in enumerate(arenas):
            _snapshot(arena, state, step=3, rank=rank, world=before)
        _check_loads(arenas, state, step=3, world=after)


def test_a_version_that_a_rank_has_not_finished_does_not_count() -> None:
    """The one before it is still there, in every rank's arena."""
    old, new = _state(1), _state(2)
    with _arenas(3) as arenas:
        for rank, arena in enumerate(arenas):
            _snapshot(arena, old, step=1, rank=rank, world=3)
        for rank, arena in enumerate(arenas[:2]):
            _snapshot(arena, new, step=2, rank=rank, world=3)
        arenas[2].begin(arenas[2].choose(()), attempt=1, step=2, rank=2, world_size=3)

        assert list(complete_versions(_held(arenas))) == [(1, 1)]
        _check_loads(arenas, old, step=1, world=2)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 10_000))
def test_a_flipped_bit_is_never_loaded(position: int) -> None:
    """In the data or in the record: memory errs, too, and nobody else looks."""
    state = _state(3)
    with _arenas(2) as arenas:
        for rank, arena in enumerate(arenas):
            slot = _snapshot(arena, state, step=1, rank=rank, world=2)
        held = arena.held(slot)
        assert held is not None
        arena.body(slot)[position % (held.data_bytes + held.record_bytes)] ^= 0x04

        with pytest.raises(CheckpointCorruptError):
            _check_loads(arenas, state, step=1, world=2)


def test_a_slot_that_is_written_over_while_it_is_read_is_said_to_be() -> None:
    """A stopped trainer can wake up and go on: what was read is not what was found."""
    state = _state(4)
    with _arenas(1) as (arena,):
        _snapshot(arena, state, step=1, rank=0, world=1)
        parts = _held([arena])
        checkpoint = open_version({0: parts[0]})
        for step in (2, 3, 4):
            _snapshot(arena, _state(step), step=step, rank=0, world=1)
        with pytest.raises(StorageError, match="overwritten while it was read"):
            load(checkpoint, _parts(state, 0, 1))


def test_data_that_lies_in_the_slot_already_is_not_moved() -> None:
    """A snapshot that was captured in place only gets its record."""
    with _arenas(1) as (arena,):
        slot = arena.choose(())
        arena.begin(slot, attempt=1, step=1, rank=0, world_size=1)
        body = arena.body(slot)[:32]
        body[:] = bytes(range(32))
        tensor = LocalTensor(
            fqn="w", slot="weight", dtype="F32", shape=(8,), box=Box.full((8,)), data=body
        )
        store = ArenaStore(arena, slot)
        save_rank(
            store, "s", step=1, attempt=1, rank=0, world_size=1, tensors=[tensor], extra={},
            param_groups=[], source={}, fsync=False,
        )  # fmt: skip
        target = bytearray(32)
        load(
            open_version({0: LocalPart(arena, arena.versions()[0])}),
            [LocalTensor(fqn="w", slot="weight", dtype="F32", shape=(8,), box=Box.full((8,)),
                         data=memoryview(target))],
        )  # fmt: skip
        assert bytes(target) == bytes(range(32))
        body.release()


def test_a_state_that_outgrew_its_slot_is_refused_and_leaves_no_version() -> None:
    """An optimizer makes its slots at its first step, after memory was reserved."""
    with _arenas(1) as (arena,):
        big = {"embed": np.zeros((1 << 10, 32), np.float32)}
        with pytest.raises(UcpError, match="reserve a larger arena"):
            _snapshot(arena, big, step=1, rank=0, world=1)
        assert arena.versions() == []
