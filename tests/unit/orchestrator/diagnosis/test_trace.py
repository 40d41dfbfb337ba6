"""A trace draws our records, and torch's own analyzer reads them."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.flight_recorder.components.builder import build_db
from torch.distributed.flight_recorder.components.config_manager import JobConfig
from torch.distributed.flight_recorder.components.loader import read_dir

from orchestrator.diagnosis import Guilty, Operation, Records, Verdict, diagnose, trace
from orchestrator.driver import diagnose_paths
from orchestrator.fault_kinds import FaultKind
from tests.support.traces import planted, rows_file


def call(rank: int, seq: int, enter_s: float, exit_s: float | None, **known: Any) -> Operation:
    values = {"op": "all_reduce", "comm": "dp", "members": (0, 1), "size_bytes": 64, **known}
    return Operation(rank=rank, seq=seq, enter_s=enter_s, exit_s=exit_s, **values)


def events(document: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in document["traceEvents"] if event["ph"] == phase]


def absent(rank: int, since_s: float) -> Verdict:
    guilty = Guilty.of([rank])
    return Verdict(
        kind=FaultKind.ABSENT,
        guilty=guilty,
        confidence=1.0,
        since_s=since_s,
        evidence="It is absent.",
    )


def test_a_rank_has_rows_for_its_work_and_its_calls_and_what_is_in_flight_goes_on_to_the_end() -> (
    None
):
    rows = (
        Operation(rank=0, op="forward", enter_s=10.0, exit_s=10.5, step=7),
        call(0, 1, 10.1, 10.2),
        call(0, 2, 10.6, None),
        call(1, 1, 10.0, 10.2),
        Operation(rank=1, op="data", enter_s=10.3, exit_s=12.0),
    )

    drawn = trace(Records(operations=rows), [absent(1, 10.6)])

    names = {
        event["args"]["name"] for event in events(drawn, "M") if event["name"] == "thread_name"
    }
    assert names == {"own work", "dp", "verdicts"}
    slices = {(one["pid"], one["name"], one["args"].get("seq")): one for one in events(drawn, "X")}
    assert slices[1, "forward", None]["args"]["step"] == 7
    assert slices[1, "all_reduce", 1]["args"]["bytes"] == 64
    hanging = slices[1, "all_reduce", 2]
    assert (hanging["ts"], hanging["dur"]) == (600_000.0, 1_400_000.0)
    assert hanging["args"]["in_flight"]
    marks = [(one["pid"], one["s"], one["name"], one["ts"]) for one in events(drawn, "i")]
    assert marks == [(0, "t", "absent", 600_000.0), (2, "p", "absent", 600_000.0)]


def test_slices_of_a_row_never_overlap() -> None:
    """A viewer would draw the second of two as a part of the first."""
    rows = [call(0, seq, 10.0 + 0.1 * seq, 10.35 + 0.1 * seq) for seq in range(8)]

    drawn = trace(Records(operations=tuple(rows)))

    by_row: dict[int, list[tuple[float, float]]] = {}
    for one in events(drawn, "X"):
        by_row.setdefault(one["tid"], []).append((one["ts"], one["ts"] + one["dur"]))
    assert sum(map(len, by_row.values())) == 8
    for slices in by_row.values():
        assert all(a[1] <= b[0] for a, b in pairwise(slices))


def test_the_trace_begins_half_a_minute_before_the_first_verdict() -> None:
    rows = [call(rank, seq, float(seq), seq + 0.5) for seq in range(100) for rank in (0, 1)]

    drawn = trace(Records(operations=tuple(rows)), [absent(1, 80.0)])

    assert drawn["otherData"]["began_s"] == 50.0
    assert max(one["args"]["seq"] for one in events(drawn, "X")) == 99
    assert events(drawn, "i")[0]["ts"] == 30e6


def test_clocks_of_two_machines_are_brought_together_by_the_ends_of_their_calls() -> None:
    """The clock of rank 1 is 1000 s ahead, so that its verdict is at 1006 s there, too."""
    rows = [
        replace(
            call(rank, seq, ahead + seq + 0.1 * rank, ahead + seq + 0.5 + 1e-4 * seq),
            clock=f"clock {rank}",
        )
        for rank, ahead in ((0, 0.0), (1, 1000.0))
        for seq in range(1, 10)
    ]

    drawn = trace(Records(operations=tuple(rows)), [absent(0, 1006.1)])

    for seq in range(1, 10):
        begun = [one["ts"] for one in events(drawn, "X") if one["args"]["seq"] == seq]
        assert abs(begun[1] - begun[0] - 1e5) < 1e3
    assert abs(events(drawn, "i")[0]["ts"] - 5.1e6) < 1e3


def test_an_arrow_leads_from_a_send_to_its_receive() -> None:
    pair = {"comm": "pp 0>1", "members": (0, 1)}
    rows = (call(0, 1, 1.0, 1.2, op="send", **pair), call(1, 1, 0.9, 1.3, op="recv", **pair))

    drawn = trace(Records(operations=rows))

    (begin,), (end,) = events(drawn, "s"), events(drawn, "f")
    assert (begin["pid"], end["pid"], begin["id"]) == (1, 2, end["id"])
    assert end["bp"] == "e"
    assert begin["ts"] < end["ts"]


def test_no_records_are_an_empty_trace() -> None:
    records = Records(operations=())

    assert events(trace(records, diagnose(records)), "X") == []


def analyzed(folder: Path) -> Any:
    """Return what torch's analyzer finds in a folder of dumps."""
    options = JobConfig().parse_args([str(folder)])
    details, version = read_dir(options)
    return build_db(details, options, version)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", ["absent", "link_dead", "mismatch", "slow_compute"])
def test_torch_reads_records_of_ours_and_so_do_we(kind: str, seed: int, tmp_path: Path) -> None:
    """Whatever is no hang is matched on all ranks; the dumps tell us what the records told."""
    planned = planted(kind, seed)
    path = rows_file(planned, tmp_path / "trace.jsonl")

    said = diagnose_paths([str(path)], dumps_folder=str(tmp_path / "dumps"))

    found = analyzed(tmp_path / "dumps")
    assert len(found.collectives) > 10
    wrong = [one for one in found.collectives if not one.pass_check]
    if kind == "slow_compute":
        assert not wrong
        return
    again = diagnose_paths([str(tmp_path / "dumps")])
    assert [(one.kind, one.guilty) for one in again] == [(one.kind, one.guilty) for one in said]
    if kind == "absent":
        missing = set().union(*(one.missing_ranks or () for one in found.collectives))
        assert missing >= set(planned.ranks)
    if kind == "mismatch":
        assert any(one.mismatch_collectives for one in wrong)


def test_calls_that_the_records_of_one_rank_no_longer_have_are_left_out(tmp_path: Path) -> None:
    """torch's own cut goes by numbers over all communicators, and ranks call different ones."""
    planned = planted("slow_compute", 3)
    late = min(row["t_exit"] for row in planned.rows if row["step"] == 10)
    planned = replace(
        planned, rows=[row for row in planned.rows if row["rank"] or row["t_enter"] > late]
    )
    path = rows_file(planned, tmp_path / "trace.jsonl")

    diagnose_paths([str(path)], dumps_folder=str(tmp_path / "dumps"))

    found = analyzed(tmp_path / "dumps").collectives
    assert not [one for one in found if one.missing_ranks or not one.pass_check]
