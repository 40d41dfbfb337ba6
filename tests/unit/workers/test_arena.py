"""Snapshot memory: what is in it survives whoever wrote it, and half a version is none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from workers.errors import ArenaError
from workers.keeper.arena import Arena
from workers.keeper.door import Door, Shelf, adopt, door_path, drop, open_arena, reserve


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena.create("test", body_bytes=10_000)
    yield made
    made.close()


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Path]:
    path = door_path(tmp_path)
    served = Door(path, Shelf(budget_bytes=1 << 20))
    yield path
    served.close()


def _write(arena: Arena, step: int, data: bytes, *, attempt: int = 1) -> int:
    slot = arena.choose(())
    arena.begin(slot, attempt=attempt, step=step, rank=0, world_size=1)
    arena.body(slot)[: len(data)] = data
    arena.finish(slot, data_bytes=len(data), record_bytes=0)
    return slot


def test_a_version_that_is_under_way_is_none(arena: Arena) -> None:
    """Its writer may be dead: what it left is half of one version and half of another."""
    _write(arena, 1, b"one")
    arena.begin(arena.choose(()), attempt=1, step=2, rank=0, world_size=1)

    assert [held.step for held in arena.versions()] == [1]


def test_the_newest_two_versions_are_never_written_over(arena: Arena) -> None:
    """One of them is the last that all ranks have."""
    for step in range(1, 10):
        slot = arena.choose(())
        arena.begin(slot, attempt=1, step=step, rank=0, world_size=1)
        left = [held.step for held in arena.versions()]
        assert left == [s for s in (step - 2, step - 1) if s > 0]
        arena.finish(slot, data_bytes=0, record_bytes=0)


def test_a_version_of_an_older_attempt_goes_first(arena: Arena) -> None:
    """After a resume the steps count down once, and the attempt does not."""
    _write(arena, 7, b"old")
    _write(arena, 8, b"old")
    _write(arena, 6, b"new", attempt=2)
    _write(arena, 7, b"new", attempt=2)

    assert [(held.attempt, held.step) for held in arena.versions()] == [(1, 8), (2, 6), (2, 7)]


@pytest.mark.parametrize("byte", range(0, 60, 7))
def test_a_damaged_header_is_no_version(arena: Arena, byte: int) -> None:
    """Whatever wrote there, the length and step that it says must not be believed."""
    slot = _write(arena, 1, b"one")
    start = arena.body_offset(slot) - 4096 + byte
    old = os.pread(arena.fd, 1, start)
    os.pwrite(arena.fd, bytes([old[0] ^ 0x10]), start)

    assert arena.held(slot) is None


def test_a_file_that_is_no_arena_is_refused() -> None:
    """A restarted keeper takes in what workers hand it."""
    fd = os.memfd_create("other")
    os.ftruncate(fd, 5000)
    with pytest.raises(ArenaError, match="5000 bytes is no arena"):
        Arena(fd)
    os.close(fd)


_TRAINER = """
import sys, time
from pathlib import Path
from workers.keeper.door import reserve
arena = reserve(Path(sys.argv[1]), "w0001.0", body_bytes=8192, attempt=3)
arena.begin(0, attempt=3, step=12, rank=1, world_size=2)
arena.body(0)[:5] = b"state"
arena.finish(0, data_bytes=5, record_bytes=0)
arena.begin(1, attempt=3, step=13, rank=1, world_size=2)
arena.body(1)[:2] = b"st"
print("written", flush=True)
time.sleep(60)
"""


def test_what_a_trainer_wrote_survives_its_kill(door: Path) -> None:
    """That is what the keeper is for; and the version that the kill cut short is not there."""
    command = [sys.executable, "-c", _TRAINER, str(door)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "written\n"
        os.kill(trainer.pid, signal.SIGKILL)

    arena = open_arena(door, "w0001.0")
    (held,) = arena.versions()
    assert (held.attempt, held.step, held.rank, held.world_size) == (3, 12, 1, 2)
    assert bytes(arena.body(held.slot)[: held.data_bytes]) == b"state"
    arena.close()


def test_a_restarted_keeper_is_handed_what_the_trainers_hold(tmp_path: Path) -> None:
    """Its own memory is gone; the trainers' mapping of the same memory is not."""
    path = door_path(tmp_path)
    first = Door(path, Shelf(budget_bytes=1 << 20))
    mine = reserve(path, "w0001.0", body_bytes=4096, attempt=1)
    _write(mine, 5, b"kept")
    first.close()
    second_shelf = Shelf(budget_bytes=1 << 20)
    second = Door(path, second_shelf)

    adopt(path, "w0001.0", mine)

    (held,) = second_shelf.versions()["w0001.0"]
    assert held.step == 5
    second.close()
    mine.close()


def test_memory_beyond_the_budget_is_refused_with_the_numbers(door: Path) -> None:
    """Up front, by name: not by the kernel in the middle of the night."""
    reserve(door, "w0001.0", body_bytes=200_000, attempt=1).close()
    with pytest.raises(ArenaError, match=r"w0002.0 need 600000 bytes .* of the node's 1048576"):
        reserve(door, "w0002.0", body_bytes=200_000, attempt=1)
    drop(door, "w0001.0")
    reserve(door, "w0002.0", body_bytes=200_000, attempt=1).close()


def test_a_worker_that_asks_again_gets_the_same_memory(door: Path) -> None:
    """A new attempt in the same process must find what the last one left."""
    first = reserve(door, "w0001.0", body_bytes=4096, attempt=1)
    _write(first, 1, b"one")
    second = reserve(door, "w0001.0", body_bytes=4096, attempt=1)

    assert [held.step for held in second.versions()] == [1]
    first.close()
    second.close()


def test_whoever_speaks_nonsense_at_the_door_is_refused_and_the_next_is_served(
    door: Path,
) -> None:
    """One bad process must not take the node's snapshots with it."""
    with pytest.raises(ArenaError, match=r"no snapshot of w0009\.0"):
        open_arena(door, "w0009.0")
    with pytest.raises(ArenaError, match="does not answer"):
        open_arena(door.with_name("nobody"), "w0001.0")
    reserve(door, "w0001.0", body_bytes=4096, attempt=1).close()
