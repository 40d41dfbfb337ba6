"""The words between a trainer and its keeper: one writer each, and both may die at any time."""

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
    buffer = arena.choose(())
    arena.begin(buffer, attempt=1, step=step, rank=0, world_size=1)
    arena.finish(buffer, data_bytes=1, record_bytes=1)
    held = arena.held(buffer)
    assert held is not None
    return held


def test_a_pinned_buffer_is_left_alone_until_it_is_unpinned(arena: Arena) -> None:
    """Storage may take minutes while snapshots go on beside it."""
    pinned = _write(arena, 1)
    arena.pin(pinned.buffer)
    for step in range(2, 8):
        assert _write(arena, step).buffer != pinned.buffer
    assert arena.pinned() == pinned.buffer
    assert arena.held(pinned.buffer) == pinned

    arena.unpin(pinned.buffer)
    assert arena.pinned() is None
    assert _write(arena, 8).buffer == pinned.buffer


def test_a_late_unpin_does_not_free_what_was_pinned_since(arena: Arena) -> None:
    """The keeper that gives up one buffer must not give up another."""
    first, second = _write(arena, 1), _write(arena, 2)
    arena.pin(first.buffer)
    arena.unpin(first.buffer)
    arena.pin(second.buffer)
    arena.unpin(first.buffer)

    assert arena.pinned() == second.buffer
    arena.unpin(second.buffer)
    arena.pin(second.buffer)
    assert arena.pinned() == second.buffer


def test_a_pin_survives_whoever_set_it(arena: Arena) -> None:
    """A keeper that was restarted maps the same memory and finds what is due."""
    held = _write(arena, 1)
    arena.pin(held.buffer)
    other = Arena(_duplicate(arena))

    assert other.pinned() == held.buffer
    other.unpin(held.buffer)
    assert arena.pinned() is None
    other.close()


def test_no_rank_waits_for_a_copy_that_no_peer_makes(arena: Arena) -> None:
    """Without a peer there is nothing to be behind of."""
    _write(arena, 1)
    assert not arena.copy_behind()
    arena.set_followed(True)
    assert arena.is_followed()
    assert arena.copy_behind()
    arena.set_followed(False)
    assert not arena.copy_behind()


def test_a_copy_is_behind_until_it_has_the_newest_version(arena: Arena) -> None:
    """Also when the newest one came into the same buffer as what was copied before."""
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


def test_a_damaged_version_is_gone_and_its_buffer_is_the_next(arena: Arena) -> None:
    """For everybody who maps it; what is written there next is a version again."""
    good, bad = _write(arena, 1), _write(arena, 2)
    other = Arena(_duplicate(arena))
    other.quarantine(bad)

    assert arena.versions() == [good]
    assert arena.choose(()) != good.buffer
    for step in (3, 4, 5):
        held = _write(arena, step)
        assert other.held(held.buffer) == held
    other.close()


def test_an_arena_that_another_thread_let_go_of_holds_nothing() -> None:
    """A reader in the middle of it must find that out safely."""
    arena = Arena.create("test", body_bytes=4096)
    _write(arena, 1)
    arena.close()

    assert arena.versions() == []
    assert arena.pinned() is None


def test_every_finished_buffer_is_counted(arena: Arena) -> None:
    """That is what makes two versions of one step two."""
    for step in (1, 1, 2):
        _write(arena, step)
    assert arena.finished == 3


def _duplicate(arena: Arena) -> int:
    return os.dup(arena.fd)


def test_a_kept_version_is_listed_as_long_as_it_is_held(arena: Arena) -> None:
    """A mirror spares its copy of it; a version gone here would fill a buffer for nothing."""
    first = _write(arena, 1)
    assert arena.kept() is None
    for step in (2, 3, 4):
        buffer = arena.choose((), kept=(1, 1))
        assert buffer != first.buffer
        arena.keep((1, 1))
        arena.begin(buffer, attempt=1, step=step, rank=0, world_size=1)
        arena.finish(buffer, data_bytes=1, record_bytes=1)
        assert arena.kept() == (1, 1)
    arena.keep((1, 2))
    assert arena.kept() is None
    arena.pin(first.buffer)
    assert arena.choose((), kept=(1, 3)) == next(h.buffer for h in arena.versions() if h.step == 3)
