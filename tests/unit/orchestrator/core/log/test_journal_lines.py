import json
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.core import Folded, RunRules, RunState, fold_on, step, transition_records, verify
from orchestrator.core import events as ev
from orchestrator.core.log.journal_lines import VERSION, parse, read
from orchestrator.errors import JournalCorruptError

RULES = RunRules(run="test", min_workers=1, max_workers=1, total_steps=10)
EVENTS: tuple[ev.Event, ...] = (
    ev.ControllerStarted(at_s=0.0, incarnation=1),
    ev.ReservationGranted(at_s=0.5, reservation=1, node="a"),
    ev.WorkerReady(at_s=1.0, worker="w0001", node="a", pid=11),
    ev.StepCompleted(at_s=2.0, attempt=1, step=1, step_s=0.1),
)


def _journal() -> tuple[bytes, RunState]:
    state, seq, lines = RunState(), 0, b""
    for event in EVENTS:
        state, actions = step(state, event, rules=RULES)
        for record in transition_records(event, actions, attempt=state.attempt.number):
            seq += 1
            lines += json.dumps({**record, "seq": seq, "wall_time": 1.0}).encode() + b"\n"
    return lines, state


def _edited(change: dict[str, Any], *, line: int) -> bytes:
    lines = _journal()[0].splitlines(keepends=True)
    lines[line] = json.dumps({**json.loads(lines[line]), **change}).encode() + b"\n"
    return b"".join(lines)


def test_a_folded_journal_is_the_state_that_was_left() -> None:
    """A restarted controller has nothing else to go by."""
    journal, state = _journal()
    folded = fold_on(Folded(), [journal], RULES)

    assert folded.state == state
    assert (folded.seq, folded.at_s, folded.wall_time) == (journal.count(b"\n"), 2.0, 1.0)
    assert verify([journal], RULES)[0] == state


def test_each_claim_may_have_torn_its_own_last_line() -> None:
    """A segment per incarnation: the next one writes a new file and never repairs the old one."""
    journal, state = _journal()
    lines = journal.splitlines(keepends=True)
    segments = [b"".join(lines[:3]) + b'{"v":1,"seq', b"".join(lines[3:])]

    assert fold_on(Folded(), segments, RULES).state == state


def test_a_damaged_line_inside_is_named() -> None:
    """Folding past it would silently give another state."""
    lines = _journal()[0].splitlines(keepends=True)
    lines[2] = lines[2][:30] + b"\n"

    with pytest.raises(JournalCorruptError, match="segment 1, line 3"):
        list(read([b"".join(lines)]))


def test_missing_records_are_noticed() -> None:
    """A segment that was not copied leaves a gap that every line alone does not show."""
    lines = _journal()[0].splitlines(keepends=True)
    del lines[2]

    with pytest.raises(JournalCorruptError, match="missing or doubled"):
        list(read([b"".join(lines)]))


def test_a_newer_version_is_refused() -> None:
    """It may have fields that change what an event means."""
    with pytest.raises(JournalCorruptError, match="the program that wrote it"):
        fold_on(Folded(), [_edited({"v": VERSION + 1}, line=0)], RULES)


@pytest.mark.parametrize(
    "change",
    [{"kind": "Nothing"}, {"incarnation": "1"}, {"incarnation": None}, {"incarnation": True}],
    ids=["kind", "text", "null", "bool"],
)
def test_a_record_of_the_wrong_shape_is_refused(change: dict[str, Any]) -> None:
    """JSON would let a text or a bool through where the machine compares numbers."""
    record = json.loads(_edited(change, line=0).splitlines()[0])

    with pytest.raises(JournalCorruptError, match="seq=1"):
        parse(record)


def test_a_replay_tells_where_it_differs() -> None:
    """Another version of the machine, or other rules, must not pass for the same run."""
    changed = _edited({"node": "b"}, line=4)
    assert json.loads(changed.splitlines()[4])["kind"] == "StartWorker"

    with pytest.raises(JournalCorruptError, match="after ReservationGranted"):
        verify([changed], RULES)
    with pytest.raises(JournalCorruptError, match="replay differs"):
        verify([_journal()[0]], replace(RULES, max_workers=2))


def test_a_field_that_an_older_record_lacks_takes_its_default() -> None:
    """Journals of earlier versions stay readable."""
    formed = ev.WorkerFormed(at_s=1.0, attempt=1, worker="w0001")
    (record,) = transition_records(formed, (), attempt=1)
    for name in ("form_s", "load_s", "sources"):
        del record[name]

    assert parse(record) == formed


def test_an_older_start_that_names_each_member_is_the_same_start() -> None:
    """Journals that were written before must verify, and their numbers must not change."""
    journal, state = _journal()
    (start,) = (json.loads(line) for line in journal.splitlines() if b"StartAttempt" in line)
    placed = json.dumps(start["placed"]).encode()
    assert placed == b'[["a", [1], [1]]]'
    older = journal.replace(b'"placed": ' + placed, b'"members": [["w0001", "a", 1]]')
    assert b"placed" not in older

    assert verify([older], RULES)[0] == state
    assert fold_on(Folded(), [older], RULES) == fold_on(Folded(), [journal], RULES)


def test_orders_for_reservations_in_a_row_are_one_record() -> None:
    """A large run starts with as many requests as it has workers, each with nodes to avoid."""
    rules = replace(RULES, max_workers=500)
    event = ev.ControllerStarted(at_s=0.0, incarnation=1)
    state, actions = step(RunState(), event, rules=rules)
    records = transition_records(event, actions, attempt=0)
    assert [record["kind"] for record in records] == ["ControllerStarted", "RequestReservation"]
    lines = b"".join(
        json.dumps({**record, "seq": seq, "wall_time": 1.0}).encode() + b"\n"
        for seq, record in enumerate(records)
    )

    assert len(actions) == 500
    assert verify([lines], rules)[0] == state
    assert fold_on(Folded(), [lines], rules).stats.num_pending == 500
    with pytest.raises(JournalCorruptError, match="replay differs"):
        verify([lines], replace(rules, max_workers=499))
