"""The faults that a soak draws, and what it makes of what it saw."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.bench_soak import Journal, read_lines, soak, used_by
from tests.benchmarks.soak_faults import KINDS, RECOVERING, TOGETHER, draw
from tests.benchmarks.soak_ledger import (
    ALL,
    blamed,
    next_index,
    redone,
    summed,
    table,
    time_parts,
)
from tests.benchmarks.soak_site import keepers
from tests.support.history import History
from tests.support.train_paced import ORDERED


def test_a_fault_follows_from_its_seed_and_index() -> None:
    """A sitting that goes on at 412 must make the fault that one sitting of 1000 would."""
    assert [draw(7, index) for index in range(400, 500)][12] == draw(7, 412)
    assert [draw(7, i).kinds for i in range(50)] != [draw(8, i).kinds for i in range(50)]


def test_each_kind_comes_as_often_as_any_other() -> None:
    """Rare kinds that chance left out would be claimed as survived."""
    found = Counter(draw(3, index).kinds[0] for index in range(5 * len(KINDS)))
    assert set(found.values()) == {5}
    assert found.keys() == KINDS.keys()
    assert len(KINDS) >= 20


def test_a_part_of_the_faults_are_two_that_can_meet() -> None:
    """Two orders to the same storage server would be one."""
    orders = [draw(3, index) for index in range(2000)]
    when = Counter(order.when for order in orders)
    assert abs(when["together"] / 2000 - TOGETHER) < 0.03
    assert abs(when["recovering"] / 2000 - RECOVERING) < 0.03
    for order in orders:
        assert len(order.kinds) == (1 if order.when == "alone" else 2)
        strikes = [KINDS[kind].strikes for kind in order.kinds]
        assert len(set(strikes)) == len(strikes) or set(strikes) == {"machine"}
        for kind in map(KINDS.__getitem__, order.kinds):
            shortest_s = kind.hold_s_min or kind.hold_s
            assert not kind.steady or shortest_s <= kind.steady_s(order.lasts) <= kind.hold_s


def _report(*guilty: str) -> dict[str, Any]:
    return {"kind": "ReportIncident", "guilty": guilty, "evidence": "it was late"}


def test_a_worker_is_blamed_wrongly_if_no_fault_hurt_its_machine() -> None:
    """A worker whose machine is unknown counts, unless all machines were hurt."""
    machines = {"w1": 1, "w2": 2}
    records: list[dict[str, Any]] = [
        _report("w1"),
        _report("w2", "w9"),
        _report(),
        {"kind": "WorkerReady"},
    ]
    assert blamed(records, machines, {1, 2}) == (2, ["w9: it was late"])
    assert blamed(records, machines, {1}) == (2, ["w2: it was late", "w9: it was late"])
    assert blamed(records, machines, ALL) == (2, [])


def test_a_worker_that_raises_by_order_is_not_blamed_wrongly() -> None:
    """The order is for a rank, which another machine had after a recovery."""
    told = {"kind": "ReportIncident", "guilty": ["w1"], "evidence": f"RuntimeError: {ORDERED}"}
    assert blamed([told], {"w1": 1}, {2}) == (1, [])


def test_steps_are_done_again_if_an_attempt_resumes_behind_the_newest_one() -> None:
    """A member that leaves may have completed a step that no one reported."""
    records: list[dict[str, Any]] = [
        {"kind": "StepCompleted", "step": 12},
        {"kind": "WorkerLeft", "step": 13},
        {"kind": "StartAttempt", "resume_step": 13},
        {"kind": "StepCompleted", "step": 15},
        {"kind": "StartAttempt", "resume_step": 10},
        {"kind": "StepCompleted", "step": 11},
    ]
    assert redone(records, 10) == (5, 11)


def test_all_of_the_time_is_in_one_part() -> None:
    """Slower steps of fewer workers are goodput, as in a run's summary; a part tells them."""
    lines = [
        {"attempt": attempt, "step": step, "step_s": step_s}
        for attempt, step, step_s in [(1, 1, 1.0), (1, 2, 1.0), (2, 2, 2.0), (2, 3, 0.5)]
    ]
    parts = time_parts(History(tuple(lines)), calm_s=1.0, wall_s=10.0)
    assert parts == {"goodput": 0.35, "slower_steps": 0.1, "redone": 0.1, "pauses": 0.55}
    assert sum(parts.values()) - parts["slower_steps"] == 1.0


def test_steps_of_the_start_are_no_part_of_it() -> None:
    """The time is counted from a step on; a step before it would make more than the whole."""
    lines = [{"attempt": 1, "step": step, "step_s": 1.0} for step in range(1, 11)]
    parts = time_parts(History(tuple(lines)), calm_s=1.0, wall_s=8.0, after_step=4)
    assert parts == {"goodput": 0.75, "slower_steps": 0.0, "redone": 0.0, "pauses": 0.25}


def _fault(index: int, **changes: Any) -> dict[str, Any]:
    return {
        "fault": index, "seed": 7, "kinds": ["nan"], "when": "alone", "survived": True, "why": "",
        "journal": "", "verdicts": 1, "blamed": [], **changes,
    }  # fmt: skip


def test_a_fault_that_is_made_again_counts_once() -> None:
    """Else a failure that was mended would stay, or a success would count twice."""
    lost = _fault(1, survived=False, why="no step", journal="kept/7-1", blamed=["w1: x"])
    lines = [_fault(0), lost, _fault(0, kinds=["pair", "drain"])]
    found = summed(lines)
    assert (found["survived"], found["faults"], found["kinds"]) == (1, 2, 3)
    assert [each["journal"] for each in found["not_survived"]] == ["kept/7-1"]
    assert found["healthy_blamed"] == ["w1: x"]
    assert summed([*lines, _fault(1)])["survived"] == 2
    assert (next_index(lines, 7), next_index(lines, 8)) == (2, 0)


def test_sittings_are_weighed_by_their_time() -> None:
    """A short sitting says less than a long one; one that was lost has no end to be judged."""
    whole = {
        "sitting": 1, "ended": True, "wall_s": 30.0, "samples": "", "same_weights": True,
        "steps": 100, "steps_lost": 3, "time": {"goodput": 0.8}, "resources": [{}, {}],
    }  # fmt: skip
    short = {**whole, "wall_s": 10.0, "time": {"goodput": 0.4}, "samples": "a fork"}
    found = summed([whole, short, {"sitting": 3, "ended": False, "wall_s": 9.0}])
    assert found["time"] == {"goodput": 0.7}
    assert (found["sittings"], found["ended"], found["exactly_once"]) == (3, 2, 1)
    assert (found["steps"], found["steps_lost"], found["same_weights"]) == (200, 6, 2)


def test_the_table_says_what_was_not_survived_and_what_grew() -> None:
    """A mean over sittings would hide the one that leaks."""
    used = {"keeper": {"fds": 10.0}, "storage_mib": 2.0}
    grown = {"keeper": {"fds": 12.0}, "storage_mib": 2.0}
    whole = {
        "sitting": 1, "ended": True, "wall_s": 30.0, "samples": "", "same_weights": True,
        "steps": 100, "steps_lost": 3, "time": {"goodput": 0.8, "slower_steps": 0.2},
        "resources": [used, used],
    }  # fmt: skip
    leaks = {**whole, "sitting": 2, "resources": [used, grown]}
    lost = _fault(1, survived=False, why="no step", journal="kept/7-1", blamed=["w1: x"])
    late = {"sitting": 3, "ended": False, "why": "no summary"}
    text = table(summed([_fault(0, redone=4), whole, lost, leaks, late])).splitlines()
    assert "faults survived                 1 of 2, of 1 kinds" in text
    assert "time                            goodput 80.0 %, slower steps 20.0 %" in text
    assert "keeper fds                      10 at begin, 12 at end" in text
    assert "not survived: seed 7 fault 1 (nan; alone): no step; see kept/7-1" in text
    assert "sittings ended                  2 of 3" in text
    assert "faults in those                 2 of 2" in text
    assert "most of them by one fault       4 alone, 0 together, 0 recovering" in text
    assert text[-2:] == ["blamed: w1: x", "a sitting: no summary"]
    assert "no sitting ended" in table(summed([]))


def test_a_process_that_is_away_uses_nothing() -> None:
    """A fault ends processes between two looks: that is no error of the one who looks."""
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    assert used_by(ended.pid) is None
    assert used_by(None) is None
    own = used_by(os.getpid())
    assert own is not None
    assert min(own.values()) > 0.0


def test_a_lost_node_has_no_keeper() -> None:
    """Its row keeps the number of one that ended with it: a soak would look for it for ever."""
    rows = [
        {"node": "a", "keeper_pid": 425, "state": "alive"},
        {"node": "b", "keeper_pid": 142, "state": "lost"},
        {"node": "c", "keeper_pid": None, "state": "alive"},
        {"node": "d", "keeper_pid": 114, "state": "draining"},
    ]
    assert keepers({"nodes": rows}) == [("a", 425), ("d", 114)]


def test_each_record_of_a_journal_is_read_once(tmp_path: Path) -> None:
    """It grows by hundreds of segments: to read all of them for each fault slows the run down."""
    folder = tmp_path / "journal"
    folder.mkdir()
    journal = Journal(str(tmp_path))
    assert journal.new() == []
    (folder / "000001.jsonl").write_text('{"seq": 0}\n{"seq": 1}\n{"se')
    assert [record["seq"] for record in journal.new()] == [0, 1]
    (folder / "000001.jsonl").write_text('{"seq": 0}\n{"seq": 1}\n{"seq": 2}\n')
    (folder / "000002.jsonl").write_text('{"seq": 3}\n')
    assert [record["seq"] for record in journal.new()] == [2, 3]
    assert journal.new() == []


def test_a_sitting_that_cannot_begin_has_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A soak of a night would end at its first broken cluster, and without its table."""
    monkeypatch.setattr(sys, "executable", "/bin/false")  # it would start the storage server
    results = tmp_path / "soak.jsonl"
    written = soak([draw(7, 0)], 7, results, per_sitting=1, local=True, has_redis=False)
    assert read_lines(results) == json.loads(json.dumps(written))
    assert [line["sitting"] for line in written] == [1, 2, 3]
    assert all("the server ended" in line["why"] for line in written)
    text = table(summed(written))
    assert "sittings ended                  0 of 3" in text
    assert "a sitting: AssertionError" in text
    assert next_index(written, 7) == 0
