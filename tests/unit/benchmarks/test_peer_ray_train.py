"""What the peer benchmark makes of the lines that the peer's workers wrote."""

from __future__ import annotations

import json
from dataclasses import asdict

from tests.benchmarks.peer_ray_train import Record, Recovery, parse, recovery

FAULT_S = 100.0


def _record(*, entered_s: float, step: int, wall_time: float, world_size: int = 4) -> Record:
    return Record(
        entered_s=entered_s, pid=7, node="a", rank=0, world_size=world_size, step=step,
        wall_time=wall_time,
    )  # fmt: skip


def test_recovery_ends_with_the_first_step_of_a_process_started_after_the_fault() -> None:
    """A survivor may end the step under way after the fault: that is not yet a recovery."""
    before = [
        _record(entered_s=50.0, step=14, wall_time=99.5),
        _record(entered_s=50.0, step=15, wall_time=100.25),
    ]
    after = [
        _record(entered_s=106.0, step=14, wall_time=109.0, world_size=2),
        _record(entered_s=106.5, step=13, wall_time=108.5, world_size=2),
    ]

    assert recovery(before, FAULT_S) is None
    assert recovery(before + after, FAULT_S) == Recovery(seconds=8.5, lost_steps=3, world_size=2)


def test_nothing_is_lost_where_the_next_step_follows() -> None:
    """Off by one, a perfect recovery would be charged a step."""
    records = [
        _record(entered_s=50.0, step=15, wall_time=99.0),
        _record(entered_s=101.0, step=16, wall_time=102.0),
    ]

    cost = recovery(records, FAULT_S)

    assert cost is not None
    assert cost.lost_steps == 0


def test_line_that_is_still_being_written_is_left_for_the_next_look() -> None:
    """The files are read while their writers train, and while one is killed in mid-line."""
    whole = _record(entered_s=50.0, step=15, wall_time=99.0)
    line = json.dumps(asdict(whole)) + "\n"

    assert parse(line + line[:20]) == [whole]
    assert parse(line[:20]) == []
