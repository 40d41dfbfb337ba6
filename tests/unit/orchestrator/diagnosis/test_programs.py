"""Calls that differ, whether or not anything hangs."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from orchestrator.diagnosis import Operation, Records, diagnose
from orchestrator.fault_kinds import FaultKind

PROGRAM = ("all_gather", "all_gather", "reduce_scatter", "all_reduce", "broadcast")
WORLD = (0, 1, 2, 3)


def run(
    program: Iterable[str], rank: int, *, members: tuple[int, ...] = WORLD, comm: str = "dp"
) -> list[Operation]:
    return [
        Operation(
            rank=rank,
            op=op,
            comm=comm,
            seq=seq,
            members=members,
            enter_s=float(seq),
            exit_s=seq + 0.5,
            size_bytes=64,
            dtype="float32",
            place=(rank % 2, 0, rank // 2),
        )
        for seq, op in enumerate(program, start=1)
    ]


def world(**changed: object) -> list[list[Operation]]:
    rows = [run(PROGRAM * 4, rank) for rank in WORLD]
    rows[2][8] = replace(rows[2][8], **changed)  # type: ignore[arg-type]
    return rows


def verdicts(rows: list[list[Operation]]) -> list[tuple[FaultKind, tuple[int, ...]]]:
    found = diagnose(Records(operations=tuple(one for each in rows for one in each)))
    return [(one.kind, one.guilty.ranks) for one in found]


@pytest.mark.parametrize("changed", [{"op": "barrier"}, {"size_bytes": 32}, {"dtype": "int64"}])
def test_one_call_that_differs_is_a_mismatch_of_the_rank_that_stands_alone(
    changed: dict[str, object],
) -> None:
    assert verdicts(world(**changed)) == [(FaultKind.MISMATCH, (2,))]


def test_a_call_left_out_is_a_desync_although_nothing_hangs() -> None:
    rows = [run(PROGRAM * 4, rank) for rank in WORLD]
    program = list(PROGRAM * 4)
    del program[7]
    rows[2] = run(program, 2)

    assert verdicts(rows) == [(FaultKind.DESYNC, (2,))]


def test_uneven_payloads_are_a_fault_only_where_something_hangs() -> None:
    """Libraries let members gather unequal parts."""
    rows = [run(["all_gather"], rank) for rank in WORLD]
    rows[1] = [replace(rows[1][0], size_bytes=32)]
    assert verdicts(rows) == []

    stuck = [[replace(each[0], exit_s=None)] for each in rows]
    assert verdicts(stuck) == [(FaultKind.MISMATCH, (1,))]


def test_the_other_replica_says_which_of_two_is_wrong() -> None:
    """Each tensor-parallel pair disagrees by itself one to one."""
    pairs = [run(PROGRAM, rank, members=(0, 2), comm="tp0") for rank in (0, 2)]
    pairs += [run(PROGRAM, rank, members=(1, 3), comm="tp1") for rank in (1, 3)]
    pairs[1][3] = replace(pairs[1][3], size_bytes=8)

    assert verdicts(pairs) == [(FaultKind.MISMATCH, (2,))]
    assert verdicts(pairs[:2]) == [(FaultKind.MISMATCH, ())]


def test_hashes_show_what_happened_before_the_records_begin() -> None:
    rows = [[replace(one, history="a") for one in run(PROGRAM, rank)] for rank in WORLD]
    assert verdicts(rows) == []

    rows[3] = [replace(one, history="b") for one in rows[3]]
    assert verdicts(rows) == [(FaultKind.DESYNC, (3,))]


def test_the_ends_of_a_transfer_do_not_differ() -> None:
    """They call send and recv as the same number, with one payload."""
    sent, received = (run([op], rank, members=(0, 1)) for rank, op in ((0, "send"), (1, "recv")))
    assert verdicts([sent, received]) == []

    assert verdicts([sent, [replace(received[0], size_bytes=4)]]) == [(FaultKind.MISMATCH, ())]


def test_a_type_that_one_rank_does_not_record_is_like_any_other() -> None:
    """A part of the ranks may run another version."""
    rows = world(dtype="int64")
    rows[1] = [replace(one, dtype="") for one in rows[1]]

    assert verdicts(rows) == []
