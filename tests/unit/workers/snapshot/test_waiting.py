"""Waiting for memory and for copies: as long as it may help, and no longer."""

import time

from tests.support.snapshot_rank import Node, Rank, captured, state


def in_s(seconds: float) -> float:
    """Return a moment on the clock of waits."""
    return time.monotonic() + seconds


def test_memory_once_granted_serves_later_versions_too(rank: Rank) -> None:
    """The optimizer's state is not there before the first step, whose end is waited at."""
    rank.writer.prepare(captured(0, state()[:3]))
    entries = state()

    assert rank.writer.get_ready(captured(1, entries), in_s(20))
    assert rank.take(1, entries)
    assert rank.writer.wait(1)


def test_the_wait_for_memory_is_short(rank: Rank, node: Node) -> None:
    """A keeper may be gone, memory may be refused, the attempt may be over."""
    assert not rank.writer.get_ready(captured(1, state()), in_s(0))
    node.restart(budget_bytes=1000)
    assert not rank.writer.get_ready(captured(1, state(num_rows=40_000)), in_s(600))
    rank.fenced.set()
    assert not rank.writer.get_ready(captured(1, state(num_rows=50_000)), in_s(600))


def test_a_rank_waits_for_a_snapshot_that_is_not_copied_yet(rank: Rank, node: Node) -> None:
    """To be behind a peer needs one that copies; after a change none does for a moment."""
    rank.hold(1, state())
    assert not rank.writer.is_behind()
    assert not rank.writer.wait_copied(1, in_s(0))
    arena = node.arena()
    arena.set_followed(True)
    assert not rank.writer.wait_copied(1, in_s(0))
    arena.note_copied(arena.versions()[-1])

    assert rank.writer.wait_copied(1, in_s(0))
    assert not rank.writer.wait_copied(2, in_s(600)), "what was not taken cannot be copied"
    arena.set_followed(False)
    rank.fenced.set()
    assert not rank.writer.wait_copied(1, in_s(600))
