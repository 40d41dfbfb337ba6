"""Versions in memory against plain numpy: any layout in, any layout out, and no bad byte ever."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.made import save_part, tensor_of
from tests.support.memory_versions import (
    State,
    check_loads,
    complete_versions,
    local_tensors,
    make_state,
    write_version,
)
from ucp_core.errors import StorageError, UcpError
from ucp_core.geometry import Box
from ucp_core.native import LocalTensor, load
from workers.memory import Arena, ArenaStore, LocalPart, open_version


@contextmanager
def _arenas(world: int) -> Iterator[list[Arena]]:
    arenas = [Arena.create(f"r{rank}", body_bytes=1 << 18) for rank in range(world)]
    try:
        yield arenas
    finally:
        for arena in arenas:
            arena.close()


def _held(arenas: list[Arena]) -> list[LocalPart]:
    return [LocalPart(arena, held) for arena in arenas for held in arena.versions()]


def _check_loads(arenas: list[Arena], state: State, *, step: int, world: int) -> None:
    check_loads(complete_versions(_held(arenas))[1, step], state, world_size=world)


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 1000))
def test_a_snapshot_loads_under_any_number_of_ranks(before: int, after: int, seed: int) -> None:
    """A lost worker is the usual reason to load it."""
    state = make_state(seed)
    with _arenas(before) as arenas:
        for rank, arena in enumerate(arenas):
            write_version(arena, state, step=3, rank=rank, world_size=before)
        _check_loads(arenas, state, step=3, world=after)


def test_a_buffer_that_is_written_over_while_it_is_read_is_said_to_be() -> None:
    """A stopped trainer can wake up and go on: what was read is not what was found."""
    state = make_state(4)
    with _arenas(1) as (arena,):
        write_version(arena, state, step=1, rank=0, world_size=1)
        parts = _held([arena])
        checkpoint = open_version({0: parts[0]})
        for step in (2, 3, 4):
            write_version(arena, make_state(step), step=step, rank=0, world_size=1)
        with pytest.raises(StorageError, match="overwritten while it was read"):
            load(checkpoint, local_tensors(state, 0, 1))


def test_data_that_lies_in_the_buffer_already_is_not_moved() -> None:
    """A snapshot that was captured in place only gets its record."""
    with _arenas(1) as (arena,):
        buffer = arena.choose(())
        arena.begin(buffer, attempt=1, step=1, rank=0, world_size=1)
        body = arena.body(buffer)[:32]
        body[:] = bytes(range(32))
        tensor = tensor_of("w", (8,), body)
        store = ArenaStore(arena, buffer)
        save_part(store, "s", [tensor])
        target = bytearray(32)
        load(
            open_version({0: LocalPart(arena, arena.versions()[0])}),
            [LocalTensor(fqn="w", slot="weight", dtype="F32", shape=(8,), box=Box.full((8,)),
                         data=memoryview(target))],
        )  # fmt: skip
        assert bytes(target) == bytes(range(32))
        body.release()


def test_a_state_that_outgrew_its_buffer_is_refused_and_leaves_no_version() -> None:
    """An optimizer makes its slots at its first step, after memory was reserved."""
    with _arenas(1) as (arena,):
        big = {"embed": np.zeros((1 << 12, 32), np.float32)}
        with pytest.raises(UcpError, match="reserve a larger arena"):
            write_version(arena, big, step=1, rank=0, world_size=1)
        assert arena.versions() == []
