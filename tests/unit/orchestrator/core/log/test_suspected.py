"""Many suspicions are told in few lines."""

from orchestrator.core.log.suspected import busy, in_few_lines
from orchestrator.diagnosis import Guilty, Suspicion
from orchestrator.fault_kinds import FaultKind


def _slow(rank: int, at_s: float, kind: FaultKind = FaultKind.SLOW_COMPUTE) -> Suspicion:
    return Suspicion(
        kind=kind,
        guilty=Guilty(ranks=(rank,)),
        confidence=0.5,
        since_s=at_s,
        evidence=f"Rank {rank} computes 1.9 times as long as others",
        worker=f"w{rank}",
    )


def test_suspicions_that_go_round_are_one_line_about_busy_machines() -> None:
    """Eighteen lines named all four ranks of a healthy run, and filled half of its report."""
    found = [_slow(rank, 80.0 * at) for at, rank in enumerate([0, 2, 1, 3, 3, 0, 1, 2, 0])]
    found.append(_slow(3, 730.0, FaultKind.SLOW_DATA))

    (line,) = in_few_lines(found)

    assert line[0] == 0.0
    assert line[1] == busy(found, 740.0)
    assert line[1] == (
        "Ranks 0, 1, 2, 3 seemed slow in turn, 10 times in 12 min: other work keeps the machines "
        "busy, and no single worker is slow"
    )
    assert busy(found, 1100.0) == "", "a spell that is over is no news"


def test_one_slow_worker_is_named_although_another_one_seemed_slow_once() -> None:
    """It is what the list is for, and a busy machine would be no reason to look at it."""
    found = [_slow(rank, 20.0 * at) for at, rank in enumerate([1, 1, 1, 0, 1, 1, 1])]

    assert in_few_lines(found) == [
        (0.0, "Rank 1 computes 1.9 times as long as others (5 times more in 120 s)"),
        (60.0, "Rank 0 computes 1.9 times as long as others"),
    ]
    assert busy(found, 120.0) == ""


def test_two_ranks_that_are_slow_at_once_are_both_named() -> None:
    """They may share a node that is slow."""
    assert len(in_few_lines([_slow(0, 5.0), _slow(1, 5.0)])) == 2


def test_ranks_that_seemed_slow_hours_apart_do_not_take_turns() -> None:
    """Each may have had its own reason."""
    found = [_slow(rank, 3600.0 * rank) for rank in range(4)]

    assert len(in_few_lines(found)) == 4
