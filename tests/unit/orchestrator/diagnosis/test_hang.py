"""The ranks that hold the others up, from hand-written calls."""

from dataclasses import replace

from orchestrator.diagnosis import Operation, Records, Verdict, diagnose
from orchestrator.fault_kinds import FaultKind

WORLD = (0, 1, 2, 3)


def call(
    rank: int,
    seq: int,
    *,
    comm: str = "world",
    members: tuple[int, ...] = WORLD,
    at: float = 1.0,
    done: bool = False,
    op: str = "all_reduce",
    ahead: bool = False,
) -> Operation:
    return Operation(
        rank=rank, op=op, comm=comm, seq=seq, members=members, enter_s=at,
        exit_s=at + 0.1 if done else None, is_ahead=ahead, size_bytes=64,
    )  # fmt: skip


def span(rank: int, op: str, at: float, until: float | None = None) -> Operation:
    return Operation(rank=rank, op=op, enter_s=at, exit_s=until)


def only(*operations: Operation, **known: object) -> Verdict:
    (verdict,) = diagnose(Records(operations=operations, **known))  # type: ignore[arg-type]
    return verdict


def test_a_rank_that_did_not_make_the_others_call_is_absent() -> None:
    verdict = only(
        *(call(r, 1, done=True) for r in WORLD), *(call(r, 2, at=2.0) for r in (0, 1, 3))
    )

    assert (verdict.kind, verdict.guilty.ranks, verdict.since_s) == (FaultKind.ABSENT, (2,), 2.0)
    assert "did not call all_reduce number 2 of world, in which ranks 0, 1, 3 wait" in (
        verdict.evidence
    )


def test_a_rank_that_waits_in_another_group_is_not_blamed() -> None:
    """Rank 1 is behind in the world because it waits for rank 3: who is behind is not guilty."""
    pair = (1, 3)
    verdict = only(
        *(call(r, 1, done=True) for r in WORLD),
        call(0, 2), call(2, 2), call(1, 1, comm="pair", members=pair),
    )  # fmt: skip

    assert verdict.guilty.ranks == (3,)


def test_a_rank_without_records_is_unknown_and_not_guilty() -> None:
    verdict = only(call(0, 1), call(1, 1), call(2, 1))

    assert (verdict.kind, verdict.guilty.ranks) == (FaultKind.UNDECIDED, ())
    assert "rank 3: no record of it" in verdict.evidence
    assert verdict.alternatives[0].guilty.ranks == (3,)


def test_a_rank_whose_records_have_gaps_is_not_guilty() -> None:
    """It may wait in a group that did not fit its ring."""
    rows = (*(call(r, 1, done=True) for r in WORLD), *(call(r, 2) for r in (0, 1, 2)))

    assert only(*rows, unknown={3: "5 groups did not fit"}).kind is FaultKind.UNDECIDED
    assert only(*rows).guilty.ranks == (3,)


def test_a_call_made_ahead_does_not_make_its_rank_look_like_a_waiting_one() -> None:
    """Rank 3 started a gather ahead, and then computes while the others wait for it."""
    gather = call(3, 1, comm="dp", members=(2, 3), at=1.0, op="all_gather")
    rows = [*(call(r, 1, done=True, at=0.0) for r in WORLD), *(call(r, 2) for r in (0, 1, 2))]

    assert only(*rows, gather, span(3, "forward", 1.5)).guilty.ranks == (3,)
    assert only(*rows, call(3, 1, comm="dp", members=(2, 3), ahead=True)).guilty.ranks == (3,)


def test_a_rank_that_waits_inside_its_own_span_waits() -> None:
    rows = [*(call(r, 1, done=True, at=0.0) for r in WORLD), *(call(r, 2) for r in (0, 1))]
    inside = [span(3, "forward", 1.5), call(3, 1, comm="tp", members=(2, 3), at=1.6)]

    assert only(*rows, *inside).guilty.ranks == (2,)


def test_a_rank_that_reads_data_while_all_wait_is_named() -> None:
    rows = [*(call(r, 1, done=True, at=0.0) for r in WORLD), *(call(r, 2) for r in (0, 1, 2))]

    assert only(*rows, span(3, "data", 0.5)).kind is FaultKind.SLOW_DATA


def test_a_rank_stuck_in_what_is_over_elsewhere_has_a_device_that_stands_still() -> None:
    rows = [
        call(1, 1),
        *(call(r, 1, done=True) for r in (0, 2, 3)),
        *(call(r, 2) for r in (0, 2, 3)),
    ]

    verdict = only(*rows)

    assert (verdict.kind, verdict.guilty.ranks) == (FaultKind.DEVICE_STUCK, (1,))


def test_both_ends_of_one_transfer_are_a_dead_link_and_no_mismatch() -> None:
    """The two ends call send and recv as the same number: that is how it should be."""
    ends = (0, 2)
    pair = [
        call(0, 5, comm="pp 0>2", members=ends, op="send"),
        call(2, 5, comm="pp 0>2", members=ends, op="recv"),
    ]
    others = [
        call(1, 1, comm="a", members=(0, 1)),
        call(3, 1, comm="b", members=(2, 3)),
        call(0, 1, comm="c", members=(0, 3), done=True),
    ]
    verdict = only(*pair, *others)

    assert (verdict.kind, verdict.guilty.links) == (FaultKind.LINK_DEAD, ((0, 2),))


def test_a_collective_that_all_called_blames_no_rank_and_says_what_is_missing() -> None:
    verdict = only(*(call(r, 1) for r in WORLD))

    assert (verdict.kind, verdict.guilty.ranks) == (FaultKind.UNDECIDED, ())
    assert "sockets" in verdict.evidence


def test_a_circle_is_a_mistake_of_the_program_and_blames_no_one_of_two() -> None:
    """Each waits for a later call of the other; with gaps in the records nothing is known."""
    rows = [call(0, 1, comm="a", members=(0, 1)), call(1, 1, comm="b", members=(0, 1))]
    verdict = only(*rows)

    assert (verdict.kind, verdict.guilty.ranks) == (FaultKind.DESYNC, ())
    assert "circle: rank 0 waits in all_reduce number 1 of a; rank 1 waits" in verdict.evidence
    assert only(*rows, unknown={1: "5 groups did not fit"}).kind is FaultKind.UNDECIDED


def test_what_waits_no_longer_than_usual_when_a_living_run_was_looked_at_hangs_not() -> None:
    rows = [
        *(call(r, 1, done=True, at=0.0) for r in WORLD),
        *(call(r, 2, at=1.0) for r in (0, 1, 2)),
    ]

    assert diagnose(Records(operations=tuple(rows), now_s=2.0)) == ()
    assert only(*rows, now_s=9.0).guilty.ranks == (3,)


def test_no_records_are_no_clean_bill() -> None:
    assert only().kind is FaultKind.UNDECIDED


def test_a_device_that_others_wait_for_stands_still_if_its_process_has_called() -> None:
    """The host is ahead: by its calls alone, all ranks have come."""
    rows = [*(call(r, 1, done=True, at=0.0) for r in WORLD), *(call(r, 2, at=2.0) for r in WORLD)]
    ahead = [replace(one, is_ahead=True) for one in (call(r, 3, at=3.0) for r in WORLD)]
    late = [
        replace(one, is_reached=False, is_ahead=True) if (one.rank, one.seq) == (2, 2) else one
        for one in rows
    ]

    verdict = only(*late, *(replace(one, is_reached=False) for one in ahead))

    assert (verdict.kind, verdict.guilty.ranks, verdict.since_s) == (
        FaultKind.DEVICE_STUCK,
        (2,),
        2.0,
    )
    assert verdict.evidence == (
        "Rank 2 did not reach all_reduce number 2 of world, in which ranks 0, 1, 3 wait. "
        "Rank 2 has a device that is 2 calls behind its process."
    )
    assert only(*rows, *ahead).kind is FaultKind.UNDECIDED, "all devices have come"
    assert only(*(one for one in rows if (one.rank, one.seq) != (2, 2))).kind is FaultKind.ABSENT
