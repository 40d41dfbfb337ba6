"""Slow ranks, ranks that only have more to do, and slow transfers."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from orchestrator.diagnosis import Operation, Records, Verdict, diagnose
from orchestrator.fault_kinds import FaultKind
from tests.arch.tree import ROOT
from tests.support.traces import straggler_operations

STRAGGLERS = ROOT / "tests" / "fixtures" / "stragglers"
#: Seconds of a forward pass of a rank in a step, and the size of its input.
Work = Callable[[int, int], tuple[float, int]]


def steps(
    num_ranks: int, work: Work, *, num_steps: int = 20, data_s: float = 0.0
) -> Iterator[Operation]:
    for rank in range(num_ranks):
        for step in range(num_steps):
            seconds, size = work(rank, step)
            at = 10.0 * step
            place = (rank, 0, 0)
            if data_s:
                wait = data_s if rank == 1 and step >= 8 else 0.001
                yield Operation(
                    rank=rank, op="data", enter_s=at, exit_s=at + wait, step=step, place=place
                )
            yield Operation(
                rank=rank, op="forward", enter_s=at + 5, exit_s=at + 5 + seconds, step=step,
                place=place, size_bytes=size, node=f"n{rank}",
            )  # fmt: skip


def told(operations: Iterator[Operation]) -> list[Verdict]:
    return list(diagnose(Records(operations=tuple(operations))))


def named(operations: Iterator[Operation]) -> list[tuple[FaultKind, tuple[int, ...]]]:
    return [(one.kind, one.guilty.ranks) for one in told(operations)]


def test_the_one_slow_worker_of_a_real_job_is_named_alone() -> None:
    """Its mates in the pipeline wait least in their groups, and are well."""
    rows = straggler_operations(STRAGGLERS / "AR.parquet")

    assert named(iter(rows)) == [(FaultKind.SLOW_COMPUTE, (0,))]


def test_unequal_stages_of_a_real_job_blame_no_rank() -> None:
    assert named(iter(straggler_operations(STRAGGLERS / "ST.parquet"))) == []


def test_a_slow_rank_is_reported_with_its_node_and_since_when() -> None:
    (verdict,) = told(steps(4, lambda rank, step: (1.5 if rank == 2 and step >= 6 else 1.0, 0)))

    assert (verdict.guilty.ranks, verdict.guilty.nodes) == ((2,), ("n2",))
    assert verdict.since_s == pytest.approx(65.0)
    assert "1.50 times as long as ranks 0, 1, 3, from step 6 on" in verdict.evidence


def test_the_own_past_decides_between_two_peers() -> None:
    late = steps(2, lambda rank, step: (1.6 if rank == 1 and step >= 9 else 1.0, 0))
    ever = steps(2, lambda rank, _: (1.6 if rank == 1 else 1.0, 0))
    both = steps(2, lambda _, step: (1.6 if step >= 9 else 1.0, 0))

    assert named(late) == [(FaultKind.SLOW_COMPUTE, (1,))]
    assert named(ever) == []
    assert named(both) == []


def test_what_grows_everywhere_is_no_fault_and_hides_none() -> None:
    """Longer sequences from step 8 on; a stage of the only replica takes longer than they do."""
    rows = [
        replace(one, place=(0, one.rank, 0))
        for one in steps(4, lambda r, step: ((1.3 * (1.5 if r == 2 else 1)) if step > 7 else 1, 0))
    ]

    assert named(iter(rows)) == [(FaultKind.SLOW_COMPUTE, (2,))]


def test_more_work_is_no_fault_where_sizes_say_so() -> None:
    """Attention grows with the square."""
    longer = steps(4, lambda rank, _: (3.5, 2000) if rank == 1 else (1.0, 1000))
    equal = steps(4, lambda rank, _: (3.5, 1000) if rank == 1 else (1.0, 1000))

    assert named(longer) == []
    assert named(equal) == [(FaultKind.SLOW_COMPUTE, (1,))]


def test_work_that_grows_on_a_whole_stage_is_no_fault() -> None:
    """A second head on the last stage, from step 8 on; each stage has two ranks."""
    rows = [
        replace(one, place=(one.rank // 2, one.rank % 2, 0))
        for one in steps(4, lambda r, step: (1.4 if step > 7 and r % 2 else 1.0, 0))
    ]

    assert named(iter(rows)) == []


@pytest.mark.parametrize("num_nodes", [2, 3])
def test_a_slow_node_does_not_hide_behind_its_own_ranks(num_nodes: int) -> None:
    """They are a large part of all, and were taken for the noise of the others."""
    slow = range(4 * (num_nodes - 1), 4 * num_nodes)
    rows = [
        replace(one, node=f"n{one.rank // 4}")
        for one in steps(
            4 * num_nodes, lambda rank, step: (1.5 if rank in slow and step >= 6 else 1.0, 0)
        )
    ]

    assert named(iter(rows)) == [(FaultKind.SLOW_COMPUTE, (rank,)) for rank in slow]


def test_a_slow_rank_alone_on_its_stage_is_reported_with_doubt() -> None:
    rows = [
        replace(one, place=(0, one.rank, 0))
        for one in steps(2, lambda r, step: (1.6 if step > 7 and r else 1.0, 0))
    ]
    (verdict,) = told(iter(rows))

    assert (verdict.guilty.ranks, verdict.confidence) == ((1,), 0.5)
    assert verdict.evidence.endswith(
        "It has no peer: its work may have grown, or its machine may be busy."
    )


@pytest.mark.parametrize("pauses", [{3}, {3, 9, 15}, {7, 8}])
def test_pauses_blame_no_rank(pauses: set[int]) -> None:
    """A recompile, an evaluation, a checkpoint."""
    assert (
        named(steps(4, lambda rank, step: (4.9 if rank == 1 and step in pauses else 1.0, 0))) == []
    )


def test_waiting_for_others_is_not_computing() -> None:
    """Rank 0 is slow, and rank 1 waits for it in the middle of its own pass."""
    rows = list(steps(4, lambda rank, _: (3.0 if rank < 2 else 1.0, 0)))
    rows += [
        Operation(
            rank=1, op="all_reduce", comm="tp", seq=step, members=(0, 1, 2), step=step,
            enter_s=10.0 * step + 5.5, exit_s=10.0 * step + 7.5,
        )
        for step in range(20)
    ]  # fmt: skip

    assert named(iter(rows)) == [(FaultKind.SLOW_COMPUTE, (0,))]


def test_a_wait_for_data_counts_beside_the_compute_that_it_delays() -> None:
    work: Work = lambda *_: (1.0, 0)  # noqa: E731

    assert named(steps(4, work, data_s=0.6)) == [(FaultKind.SLOW_DATA, (1,))]
    # Fifty times as long as the others, and unnoticed.
    assert named(steps(4, work, data_s=0.05)) == []


def mesh(
    slow: Callable[[int, int], bool], *, late: tuple[int, int] = (-1, -1)
) -> Iterator[Operation]:
    """Yield transfers of each of four ranks with each; the receiver of ``late`` comes late."""
    pairs = [(a, b) for a in range(4) for b in range(4) if a != b]
    for step in range(12):
        for number, (a, b) in enumerate(pairs):
            at = 10.0 * step + 0.5 * number
            over = at + 0.3 + (0.4 if slow(a, b) else 0.04)
            for rank, op in ((a, "send"), (b, "recv")):
                comes_late = (a, b) != late or op == "recv"
                yield Operation(
                    rank=rank, op=op, comm=f"x {a}>{b}", seq=step, members=(a, b), step=step,
                    enter_s=at + (0.3 if comes_late else 0.0), exit_s=over, size_bytes=1 << 20,
                    place=(rank, 0, 0),
                )  # fmt: skip


def test_a_place_of_the_matrix_is_a_link_a_row_its_sender_and_a_column_its_receiver() -> None:
    (link,) = told(mesh(lambda a, b: (a, b) == (2, 1)))
    assert (link.kind, link.guilty.ranks, link.guilty.links) == (FaultKind.SLOW_LINK, (), ((2, 1),))

    assert named(mesh(lambda a, _: a == 2)) == [(FaultKind.SLOW_SENDER, (2,))]
    assert named(mesh(lambda _, b: b == 1)) == [(FaultKind.SLOW_RECEIVER, (1,))]


def test_no_rank_is_blamed_for_the_transfers_of_a_late_peer() -> None:
    assert named(mesh(lambda *_: False, late=(0, 1))) == []


def test_transfers_between_clocks_are_not_measured() -> None:
    rows = [*mesh(lambda a, b: (a, b) == (2, 1))]
    apart = [replace(one, clock=str(one.rank)) for one in rows]

    assert named(iter(apart)) == []
