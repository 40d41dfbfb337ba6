"""Four real ranks in FSDP traffic, one of which stops: it is named from outside, nobody else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ranks import Ranks, running
from tests.support.training import NUM_RANKS, Watch, finish, stall_path, stop_and_find, train

NUM_STOPS = 5


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    with running(train, NUM_RANKS, tmp_path) as started:
        yield started


def test_the_stopped_rank_is_named_each_time_and_training_goes_on(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Its neighbours wait in other collectives than the rest; none of them may be named."""
    watch = Watch(ranks)
    for repeat in range(NUM_STOPS):
        rank = repeat * 3 % NUM_RANKS
        verdict = stop_and_find(ranks, watch, rank)
        assert (verdict.guilty, verdict.rule) == ((f"w{rank}",), "stopped")

    assert len(set(finish(ranks, tmp_path))) == 1


def test_a_rank_that_lives_but_does_not_come_is_named(ranks: Ranks, tmp_path: Path) -> None:
    """Kernel and beat say that it is well: only the rings tell it from those that wait."""
    watch = Watch(ranks)
    watch.until_steps(10)
    stall_path(tmp_path, 2).touch()

    verdict = watch.until_verdict()

    assert (verdict.guilty, verdict.rule) == (("w2",), "missing")
    assert "w2 (rank 2) has not called all_reduce" in verdict.evidence
    stall_path(tmp_path, 2).unlink()
    assert len(set(finish(ranks, tmp_path))) == 1
