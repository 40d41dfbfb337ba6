"""Four real ranks in FSDP traffic, one of which stops: only it is named, from outside."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.driver import diagnose_paths
from orchestrator.fault_kinds import FaultKind
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


@pytest.mark.parametrize("work", ["", "computes"], ids=["sleeps in C", "computes"])
def test_a_rank_that_works_for_long_is_not_named_and_one_that_stops_then_is(
    ranks: Ranks, tmp_path: Path, work: str
) -> None:
    """A recompile, a download, an evaluation: the others wait for many steps, and it is well."""
    watch = Watch(ranks)
    watch.until_steps(10)
    stall_path(tmp_path, 2).write_text(work)
    watch.until_still(for_s=4 * watch.limits.hang_s)

    # Afterwards, or in a copy, the rings say by themselves who holds the others up.
    (told,) = diagnose_paths([str(ranks.places[0].directory)])
    assert (told.kind, told.guilty.ranks) == (FaultKind.ABSENT, (2,))

    os.kill(ranks.pid(2), signal.SIGSTOP)
    verdict = watch.until_verdict()
    os.kill(ranks.pid(2), signal.SIGCONT)

    assert (verdict.guilty, verdict.rule) == (("w2",), "stopped")
    stall_path(tmp_path, 2).unlink()
    watch.until_steps(3)
    assert len(set(finish(ranks, tmp_path))) == 1
