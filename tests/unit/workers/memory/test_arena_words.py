"""The words between a trainer and its keeper: one writer each, and both may die at any time."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from workers.memory import Arena
from workers.protocol import Held


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena.create("test", body_bytes=4096)
    yield made
    made.close()


def _write(arena: Arena, step: int) -> Held:
    slot = arena.choose(())
    arena.begin(slot, attempt=1, step=step, rank=0, world_size=1)
    arena.finish(slot, data_bytes=1, record_bytes=1)
    held = arena.held(slot)
    assert held is not None
    return held


def test_a_pinned_slot_is_left_alone_until_it_is_unpinned(arena: Arena) -> None:
    """Storage may take minutes while snapshots go on beside it."""
    pinned = _write(arena, 1)
    arena.pin(pinned.slot)
    for step in range(2, 8):
        assert _write(arena, step).slot != pinned.slot
    assert arena.pinned() == pinned.slot
    assert arena.held(pinned.slot) == pinned

    arena.unpin(pinned.slot)
    assert arena.pinned() is None
    assert _write(arena, 8).slot == pinned.slot


def test_a_late_unpin_does_not_free_what_was_pinned_since(arena: Arena) -> None:
    """The keeper that gives up one slot must not give up another."""
    first, second = _write(arena, 1), _write(arena, 2)
    arena.pin(first.slot)
    arena.unpin(first.slot)
    arena.pin(second.slot)
    arena.unpin(first.slot)

    assert arena.pinned() == second.slot
    arena.unpin(second.slot)
    arena.pin(second.slot)
    assert arena.pinned() == second.slot


def test_a_pin_survives_whoever_set_it(arena: Arena) -> None:
    """A keeper that was restarted maps the same memory and finds what is due."""
    held = _write(arena, 1)
    arena.pin(held.slot)
    other = Arena(_duplicate(arena))

    assert other.pinned() == held.slot
    other.unpin(held.slot)
    assert arena.pinned() is None
    other.close()


def test_nobody_waits_for_a_copy_that_nobody_makes(arena: Arena) -> None:
    """Without a peer there is nothing to be behind of."""
    _write(arena, 1)
    assert not arena.copy_behind()
    arena.set_followed(True)
    assert arena.is_followed()
    assert arena.copy_behind()
    arena.set_followed(False)
    assert not arena.copy_behind()


def test_a_copy_is_behind_until_it_has_the_newest_version(arena: Arena) -> None:
    """Also when the newest one came into the same slot as what was copied before."""
    arena.set_followed(True)
    assert not arena.copy_behind()
    copied: list[Held] = []
    for step in range(1, 7):
        held = _write(arena, step)
        assert arena.copy_behind(), step
        for old in copied:
            arena.note_copied(old)
            assert arena.copy_behind(), (step, old)
        arena.note_copied(held)
        assert not arena.copy_behind(), step
        copied.append(held)


def test_a_damaged_version_is_gone_and_its_slot_is_the_next(arena: Arena) -> None:
    """For everybody who maps it; what is written there next is a version again."""
    good, bad = _write(arena, 1), _write(arena, 2)
    other = Arena(_duplicate(arena))
    other.quarantine(bad)

    assert arena.versions() == [good]
    assert arena.choose(()) != good.slot
    for step in (3, 4, 5):
        held = _write(arena, step)
        assert other.held(held.slot) == held
    other.close()


def test_an_arena_that_another_thread_let_go_of_holds_nothing() -> None:
    """Whoever was in the middle of reading it must find that out without an accident."""
    arena = Arena.create("test", body_bytes=4096)
    _write(arena, 1)
    arena.close()

    assert arena.versions() == []
    assert arena.pinned() is None


def test_every_finished_slot_is_counted(arena: Arena) -> None:
    """That is what makes two versions of one step two."""
    for step in (1, 1, 2):
        _write(arena, step)
    assert arena.finished == 3


def _duplicate(arena: Arena) -> int:
    return os.dup(arena.fd)


def test_what_is_kept_is_told_as_long_as_it_is_held(arena: Arena) -> None:
    """A mirror spares its copy of it; what is not here any more would fill a slot for nothing."""
    first = _write(arena, 1)
    assert arena.kept() is None
    for step in (2, 3, 4):
        slot = arena.choose((), kept=(1, 1))
        assert slot != first.slot
        arena.keep((1, 1))
        arena.begin(slot, attempt=1, step=step, rank=0, world_size=1)
        arena.finish(slot, data_bytes=1, record_bytes=1)
        assert arena.kept() == (1, 1)
    arena.keep((1, 2))
    assert arena.kept() is None
    arena.pin(first.slot)
    assert arena.choose((), kept=(1, 3)) == next(h.slot for h in arena.versions() if h.step == 3)
