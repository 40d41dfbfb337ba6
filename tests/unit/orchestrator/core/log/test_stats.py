import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.core import Incident, RunRules, RunState, RunStats, step, transition_records
from orchestrator.core import events as ev
from orchestrator.core.log.codec import decoder, encode
from orchestrator.diagnosis import Guilty, Suspicion
from orchestrator.fault_kinds import FaultKind
from orchestrator.policies import CapacityRules
from tests.support.run_events import begun_on
from workers.protocol import Pace, SaveCosts

RULES = RunRules(run="test", min_workers=1, max_workers=2, total_steps=12)
START: tuple[ev.Event, ...] = (
    *begun_on("ab"),
    ev.WorkerFormed(at_s=1.5, attempt=1, worker="w0001"),
    ev.WorkerFormed(at_s=2.0, attempt=1, worker="w0002"),
    *(ev.StepCompleted(at_s=2.0 + n, attempt=1, step=n, step_s=1.0) for n in range(1, 7)),
)
CRASH: tuple[ev.Event, ...] = (
    ev.FaultInjected(at_s=8.4, fault="kill", target="w0002"),
    ev.WorkerLeft(
        at_s=8.5, attempt=1, worker="w0001", how=ev.Leaving.PEER_LOST, step=6, detail="reset"
    ),
    ev.WorkerExited(at_s=8.6, worker="w0002", cause="crash", detail="SIGKILL"),
    ev.CommittedRead(at_s=8.7, attempt=1, step=4, committed_by=1, skipped=()),
    ev.CommittedRead(at_s=8.8, attempt=1, step=4, committed_by=1, skipped=()),
    ev.WorkerFormed(
        at_s=9.5,
        attempt=2,
        worker="w0001",
        form_s=0.3,
        load_s=0.4,
        sources=(("storage", 1000),),
    ),
    ev.StepCompleted(at_s=10.0, attempt=2, step=5, step_s=0.5),
)


def _stats(events: Sequence[ev.Event], rules: RunRules = RULES) -> RunStats:
    state, stats = RunState(), RunStats()
    for event in events:
        state, actions = step(state, event, rules=rules)
        for record in transition_records(event, actions, attempt=state.attempt.number):
            # As read back from the file: arrays and not tuples.
            stats.add(json.loads(json.dumps(record)))
    return stats


def test_an_incident_has_every_phase_on_the_clock() -> None:
    """The report is only as good as these instants; they are what is compared with peers."""
    (incident,) = _stats((*START, *CRASH)).incidents

    assert incident.to_json() == {
        "number": 1,
        "kind": "crash",
        "guilty": ["w0002"],
        "evidence": "SIGKILL",
        "attempt": 1,
        "lost_steps": 2,
        "cost_usd": 0.0,
        "layout_before": "dp_shard=2",
        "layout_after": "1 worker",
        "other_layouts": [],
        "t_fault_s": 8.4,
        "t_detect_s": 8.5,
        "t_fence_s": 8.6,
        "t_decide_s": 8.8,
        "t_reform_s": pytest.approx(9.1),
        "t_load_s": 9.5,
        "t_first_step_s": 10.0,
        "sources": {"storage": 1000},
        "skipped": [],
        "rule": "exited",
        "verdict": "dead",
        "places": [[1, "w0002", "b"]],
        "killed": [],
        "suspects": [],
        "folder": "incidents/0001",
        "is_start": False,
    }


def test_a_hang_is_put_on_record_with_its_rule() -> None:
    """Without it the rules that find hangs, or too many of them, cannot be counted."""
    hang = ev.HangFound(
        at_s=8.4, attempt=1, guilty=("w0002",), evidence="it is", rule="missing", verdict="absent"
    )
    (incident,) = _stats((*START, hang, *CRASH[1:])).incidents

    assert (incident.kind, incident.rule, incident.verdict) == ("hang", "missing", "absent")
    assert incident.folder == "incidents/0001"
    assert incident.recovery_s == pytest.approx(1.6)


def test_a_restart_that_reads_a_compaction_tells_the_same_as_one_that_folds_the_journal() -> None:
    """Seen: one had lists where the other had tuples, for the ranks that an incident names."""
    corrupt = ev.WorkerRaised(
        at_s=8.4, attempt=1, worker="w0001", step=7, error="CorruptError: it errs", traceback="",
        ranks=(0, 1), sound_step=5,
    )  # fmt: skip
    left = ev.WorkerLeft(
        at_s=8.5, attempt=1, worker="w0002", how=ev.Leaving.PEER_LOST, step=6, detail="reset"
    )
    stats = _stats((*START, corrupt, left, *CRASH[3:]))
    assert stats.incidents[0].places == ((0, "w0001", "a"), (1, "w0002", "b"))
    stored = json.loads(json.dumps(encode(stats)))
    assert repr(decoder(RunStats)(stored)) == repr(stats)


def test_what_was_suspected_is_counted_once_and_kept_with_the_incident() -> None:
    """A link has no worker: two of them are told from each other by their ranks."""
    links = [
        Suspicion(
            kind=FaultKind.SLOW_LINK, guilty=Guilty(links=(pair,)), confidence=0.9, since_s=at_s,
            evidence="slow", times=2.0,
        )
        for pair, at_s in (((1, 0), 6.0), ((0, 1), 7.0))
    ]  # fmt: skip
    told = (ev.Suspected(at_s=8.0, attempt=1, suspects=(*links[:num],)) for num in (1, 2))
    stats = _stats((*START, *told, *CRASH))

    assert stats.suspicions == {"slow_link": 2}
    assert stats.suspected == [(6.0, "slow"), (7.0, "slow")]
    (incident,) = stats.incidents
    assert incident.suspects == tuple(links)
    document = json.loads(json.dumps(incident.to_json()))
    assert Incident.from_json(document, number=1).suspects == tuple(links)


def test_members_that_say_late_that_they_have_formed_are_counted_all_the_same() -> None:
    """Steps are seen in shared memory: short ones before the word of who took them arrives."""
    *before, formed, first_step = CRASH
    late = (*START, *before, first_step, replace(formed, at_s=10.1))
    (incident,) = _stats(late).incidents

    assert incident.sources == {"storage": 1000}
    assert incident.t_reform_s == pytest.approx(9.6)
    assert incident.t_load_s == incident.t_first_step_s == 10.0
    second_step = ev.StepCompleted(at_s=11.0, attempt=2, step=6, step_s=0.5)
    settled = [
        _stats(events).num_settled for events in (late[:-1], late, (*late[:-1], second_step))
    ]
    assert settled == [0, 1, 1]


def test_redone_steps_are_lost_and_do_not_count_as_good() -> None:
    """6 steps of 1 s, 2 of them lost, and one redone in 0.5 s: 4.5 good seconds of 10."""
    stats = _stats((*START, *CRASH))

    assert stats.step == 5
    assert stats.lost_steps == 2
    assert stats.goodput == pytest.approx(4.5 / 10.0)
    assert stats.parts_s == pytest.approx(
        {"steps": 4.5, "saving": 0.0, "start": 2.0, "recovery": 1.5, "lost": 2.0, "idle": 0.0}
    )


def test_time_beside_the_steps_is_not_in_goodput_though_one_step_was_slow() -> None:
    """One step of a second is reported in three: it may be the slow one, and was taken for all."""
    sampled = (
        ev.StepCompleted(at_s=8.0 + n, attempt=1, step=6 + 3 * n, step_s=1.0) for n in (1, 2)
    )
    saves = ev.SavesMeasured(
        at_s=8.0,
        attempt=1,
        costs=SaveCosts(
            step_s=0.2,
            snapshot_stall_s=0.05,
            snapshot_busy_s=0.05,
            checkpoint_stall_s=0.0,
            checkpoint_busy_s=0.0,
            pace=Pace(snapshot_steps=1, checkpoint_steps=0),
        ),
    )
    stats = _stats((*START, saves, *sampled))

    # A fifth of the two seconds was stalls.
    assert stats.parts_s["saving"] == pytest.approx(0.4)
    assert stats.parts_s["steps"] == pytest.approx(6.0 + 1.6)
    assert sum(stats.parts_s.values()) == pytest.approx(stats.wall_s)


def test_a_stop_by_a_person_is_no_recovery() -> None:
    """A run that was resumed a day later had a recovery of a day."""
    stats = _stats((*START, *CRASH))
    begun: dict[str, Any] = {"attempt": 3, "layout": {}, "resume_step": 5}
    for record in (
        {"kind": "FinishRun", "at_s": 11.0, "outcome": "stopped", "reason": "asked to"},
        {"kind": "RunResumed", "at_s": 100.0, "attempt": 2, "why": "stopped"},
        {**begun, "kind": "StartAttempt", "at_s": 101.0, "placed": [["a", [9], [0]]]},
        {"kind": "WorkerFormed", "at_s": 105.0, "attempt": 3, "worker": "w0009"},
        {"kind": "StepCompleted", "at_s": 106.0, "attempt": 3, "step": 6, "step_s": 1.0},
    ):
        stats.add(record)

    assert stats.incidents[-1].kind == "resume"
    assert [one.recovery_s for one in stats.incidents] == [pytest.approx(1.6), None]
    assert stats.parts_s == pytest.approx(
        {"steps": 5.5, "saving": 1.0, "start": 7.0, "recovery": 1.5, "lost": 2.0, "idle": 89.0}
    )
    assert stats.goodput_since_start == pytest.approx(5.5 / 10.0)


def test_what_happens_before_the_first_step_is_no_recovery() -> None:
    """Half a minute of imports was called the longest recovery of a run."""
    lost: tuple[ev.Event, ...] = (
        *START[:5],
        ev.WorkerExited(at_s=1.2, worker="w0002", cause="crash", detail="SIGKILL"),
        ev.WorkerLeft(
            at_s=1.3, attempt=1, worker="w0001", how=ev.Leaving.FENCED, step=0, detail=""
        ),
        ev.CommittedRead(at_s=1.4, attempt=1, step=0, committed_by=0, skipped=()),
        ev.WorkerFormed(at_s=29.0, attempt=2, worker="w0001"),
        ev.StepCompleted(at_s=30.0, attempt=2, step=1, step_s=0.5),
    )
    stats = _stats(lost)
    (incident,) = stats.incidents

    assert incident.is_start
    assert (incident.end_s, incident.recovery_s, incident.phases_s) == (30.0, None, {})
    assert stats.startup_s == 29.0


def test_start_up_does_not_count_against_goodput() -> None:
    """2 of 8 s are start-up, which no fault has cost: the rest is all steps."""
    stats = _stats(START)

    assert (stats.wall_s, stats.startup_s, stats.goodput) == (8.0, 2.0, 0.75)
    assert stats.goodput_since_start == 1.0


def test_the_number_of_workers_over_time_has_each_pause_and_loss() -> None:
    """A run may train on half of its workers for most of its time, and no average shows it."""
    assert _stats((*START, *CRASH)).sizes == [(2.0, 2), (8.5, 0), (9.5, 1)]


def test_a_curve_of_a_long_run_stays_small_and_keeps_its_ends() -> None:
    """It is in every compaction of the journal; the last minute of it is what the rate is of."""
    steps = (
        ev.StepCompleted(at_s=8.0 + n / 10, attempt=1, step=6 + n, step_s=0.1)
        for n in range(1, 5000)
    )
    stats = _stats((*START, *steps), replace(RULES, total_steps=10_000))

    assert len(stats.progress) <= 1001
    assert [at for _, at in stats.progress[:1] + stats.progress[-100:]] == [1, *range(4906, 5006)]


def test_phases_add_up_to_the_wall_time() -> None:
    """Time that belongs to no phase would hide where it went."""
    stats = _stats((*START, *CRASH))

    assert stats.phases_s == {
        "waiting": pytest.approx(1.0),
        "forming": pytest.approx(1.0 + 0.7),
        "training": pytest.approx(6.5 + 0.5),
        "recovering": pytest.approx(0.3),
    }
    assert sum(stats.phases_s.values()) == pytest.approx(stats.wall_s)


def test_a_second_fault_before_the_first_step_is_an_incident_of_its_own() -> None:
    """Both end with the same first step, and the steps are lost only once."""
    died = ev.WorkerExited(at_s=9.0, worker="w0001", cause="crash", detail="again")
    again = (
        died,
        ev.CommittedRead(at_s=9.1, attempt=2, step=4, committed_by=1, skipped=()),
        ev.WorkerReady(at_s=12.0, worker="w0003", node="a", pid=13),
        ev.StepCompleted(at_s=13.0, attempt=3, step=5, step_s=0.5),
    )
    first, second = _stats((*START, *CRASH[:5], *again)).incidents

    assert (first.guilty, second.guilty) == (("w0002",), ("w0001",))
    assert first.t_first_step_s == second.t_first_step_s == 13.0
    assert (first.lost_steps, second.lost_steps) == (2, 0)


def test_steps_that_were_done_while_the_controller_was_away_are_counted() -> None:
    """Only the members' answers to the fence of the new controller show how far they came."""
    left = (
        ev.WorkerLeft(at_s=20.2, attempt=1, worker=w, how=ev.Leaving.COMPLETED, step=12, detail="")
        for w in ("w0001", "w0002")
    )
    ended = (
        ev.ControllerStarted(at_s=20.0, incarnation=2),
        ev.WorkersSurveyed(
            at_s=20.1,
            alive=(("w0001", "a", 0), ("w0002", "b", 0)),
            reservations=((1, "a"), (2, "b")),
            pending_reservations=(),
        ),
        *left,
    )
    stats = _stats((*START, *ended))

    assert stats.outcome == "completed"
    assert (stats.step, stats.lost_steps) == (12, 0)


def test_a_restart_that_disturbs_no_step_is_on_record() -> None:
    """No attempt ends, so only the controller's own event tells of it."""
    restart = (
        ev.ControllerStarted(at_s=9.0, incarnation=2),
        ev.WorkersSurveyed(
            at_s=9.1,
            alive=(("w0001", "a", 1), ("w0002", "b", 1)),
            reservations=((1, "a"), (2, "b")),
            pending_reservations=(),
        ),
        ev.StepCompleted(at_s=9.5, attempt=1, step=7, step_s=1.0),
    )
    stats = _stats((*START, *restart))
    (incident,) = stats.incidents

    assert incident.kind == "controller_restart"
    assert incident.layout_before == incident.layout_after == "dp_shard=2"
    assert incident.t_first_step_s == 9.5
    assert stats.lost_steps == 0


def test_the_summary_says_how_the_run_ended() -> None:
    """``summary.json`` takes these names as they are."""
    finish = tuple(
        ev.WorkerLeft(at_s=20.0, attempt=1, worker=w, how=ev.Leaving.COMPLETED, step=12, detail="")
        for w in ("w0001", "w0002")
    )
    last = ev.StepCompleted(at_s=19.0, attempt=1, step=12, step_s=1.0)
    summary = _stats((*START, last, *finish)).summary()

    assert summary["outcome"] == "completed"
    assert summary["steps"] == 12
    assert summary["attempts"] == 1
    assert summary["incidents"] == []
    assert "over" not in summary["phases_s"]


def test_a_run_that_failed_early_says_the_step_that_it_reached() -> None:
    """Members say their last step when they leave; the report of it may be a second late."""
    raised = tuple(
        ev.WorkerRaised(at_s=8.2, attempt=1, worker=w, step=9, error="x", traceback="Traceback")
        for w in ("w0001", "w0002")
    )
    read = ev.CommittedRead(at_s=8.4, attempt=1, step=8, committed_by=1, skipped=())
    stats = _stats((*START, *raised, read, read))

    assert stats.outcome == "failed"
    assert stats.summary()["steps"] == 8


def test_what_the_newest_attempt_loaded_is_summed_over_its_workers() -> None:
    """The line of an attempt must not tell of the bytes of the one before."""
    formed = (
        ev.WorkerReady(at_s=10.5, worker="w0003", node="b", pid=13),
        ev.WorkerLeft(
            at_s=21.0, attempt=2, worker="w0001", how=ev.Leaving.PEER_LOST, step=5, detail=""
        ),
        ev.CommittedRead(at_s=21.1, attempt=2, step=5, committed_by=2, skipped=()),
        ev.WorkerFormed(
            at_s=22.0, attempt=3, worker="w0001", sources=(("local memory", 7), ("storage", 1))
        ),
        ev.WorkerFormed(at_s=22.0, attempt=3, worker="w0003", sources=(("local memory", 5),)),
    )
    assert _stats((*START, *CRASH)).loaded == {"storage": 1000}
    assert _stats((*START, *CRASH, *formed)).loaded == {"local memory": 12, "storage": 1}


def test_an_unreadable_version_is_reported_with_the_recovery_that_met_it() -> None:
    """Also with the fault that the recovery was for, and with no later one."""
    bad: tuple[ev.Event, ...] = (
        ev.WorkerLeft(
            at_s=9.0,
            attempt=2,
            worker="w0001",
            how=ev.Leaving.UNLOADABLE,
            step=4,
            detail="",
            damaged=((4, 1, "", "", 0, 0),),
            skipped=("step 4: damaged",),
        ),
        ev.CommittedRead(at_s=9.1, attempt=2, step=3, committed_by=1, skipped=(), number=3),
        ev.WorkerFormed(at_s=9.5, attempt=3, worker="w0001", skipped=("another holder",)),
        ev.StepCompleted(at_s=10.0, attempt=3, step=4, step_s=0.5),
    )
    crash, unloadable = _stats((*START, *CRASH[:5], *bad)).incidents

    assert (crash.kind, unloadable.kind) == ("crash", "unloadable")
    assert crash.skipped == unloadable.skipped == ("step 4: damaged", "another holder")
    assert (crash.lost_steps, unloadable.lost_steps) == (2, 1)
    assert unloadable.guilty == ()


def test_a_damaged_version_in_storage_is_reported_with_the_recovery_that_passed_it_over() -> None:
    """No worker tries to load it, so none can say that it is damaged."""
    line = "step-00000004: manifest.json is cut short"
    read = ev.CommittedRead(
        at_s=8.8, attempt=1, step=3, committed_by=1, skipped=(line,), source="storage"
    )
    in_memory = replace(read, source="memory")
    stored, held = (_stats((*START, *CRASH[:3], one, one, *CRASH[5:])) for one in (read, in_memory))

    assert [incident.skipped for incident in stored.incidents] == [(line,)]
    assert [incident.skipped for incident in held.incidents] == [()]
    assert (stored.passed_over, held.passed_over) == ((line,), ())


def _left(worker: str, step: int, *, attempt: int = 1) -> ev.WorkerLeft:
    return ev.WorkerLeft(
        at_s=8.5, attempt=attempt, worker=worker, how=ev.Leaving.PEER_LOST, step=step, detail=""
    )


#: In step 9, which says that 8 was complete.
RAISED = ev.WorkerRaised(
    at_s=8.5, attempt=1, worker="w0001", step=9, error="OSError", traceback="a hiccup"
)


@pytest.mark.parametrize(
    ("left", "num_lost"),
    [
        ((_left("w0001", 9),), 5),
        # The other one was in the middle of step 9 when the first had completed it.
        ((_left("w0001", 9), _left("w0002", 8)), 5),
        ((_left("w0002", 9), _left("w0001", 8)), 4),
        # The first rank's completed steps are unknown.
        ((_left("w0002", 8),), 4),
        ((_left("w0001", 9, attempt=0),), 2),
        ((RAISED,), 4),
    ],
)
def test_steps_that_no_report_told_of_are_lost_too(
    left: tuple[ev.WorkerLeft | ev.WorkerRaised, ...], num_lost: int
) -> None:
    """Reports come once a second, and a step may take a tenth of one."""
    died = tuple(
        ev.WorkerExited(at_s=8.6, worker=worker, cause="crash", detail="")
        for worker in ("w0001", "w0002")
        if worker not in {event.worker for event in left if event.attempt == 1}
    )
    read = ev.CommittedRead(at_s=8.8, attempt=1, step=4, committed_by=1, skipped=(), number=0)
    again = ev.WorkerReady(at_s=8.9, worker="w0003", node="a", pid=13)
    whole = ev.LinksProbed(at_s=8.7, number=1, heard=("a", "b"))
    stats = _stats((*START, *left, *died, whole, read, read, again))

    assert stats.attempt == 2
    assert stats.lost_steps == sum(each.lost_steps for each in stats.incidents) == num_lost
    assert stats.step == 4
    assert stats.goodput == pytest.approx(4.0 / stats.wall_s)


def test_steps_that_memory_has_are_in_the_history_though_no_report_told_of_them() -> None:
    """They are not redone, so their time was well spent: all of it up to the fault, and no more."""
    read = ev.CommittedRead(at_s=8.8, attempt=1, step=8, committed_by=1, skipped=())
    stats = _stats((*START, _left("w0001", 9), *CRASH[2:3], read, read))

    assert (stats.lost_steps, stats.step) == (1, 8)
    assert stats.goodput == pytest.approx(6.5 / stats.wall_s)


def test_what_a_run_holds_is_paid_for_and_what_it_waits_for_is_not() -> None:
    """Two workers at 2 and 4 dollars an hour, of which one comes later; then none is left."""
    rules = replace(RULES, capacity=CapacityRules(usd_per_hour=(2.0, 4.0)))
    granted = (
        ev.ControllerStarted(at_s=0.0, incarnation=1),
        ev.ReservationGranted(at_s=100.0, reservation=1, node="a"),
        ev.CapacityRefused(at_s=400.0, alternative=0, why="sold out"),
        ev.ReservationGranted(at_s=1000.0, reservation=3, node="b"),
        ev.StopRequested(at_s=1900.0, reason="enough"),
    )
    stats = _stats(granted, rules)

    assert stats.cost_usd == pytest.approx((1800 * 2.0 + 900 * 4.0) / 3600)
    assert (stats.asked, stats.granted, stats.refused) == (
        {"0": 2, "1": 1},
        {"0": 1, "1": 1},
        {"0": 1},
    )
    assert stats.usd_per_hour == 0.0
    assert stats.summary()["cost_usd"] == stats.cost_usd
    assert stats.usd_per_million_tokens(1000) is None  # no step was trained
    stats.step = 4
    assert stats.usd_per_million_tokens(0) is None  # a script does not say
    assert stats.usd_per_million_tokens(1000) == pytest.approx(stats.cost_usd * 250)


def test_an_incident_costs_what_waits_for_it_and_what_is_done_twice() -> None:
    """The price of a fault is what the machines cost meanwhile."""
    rules = replace(RULES, capacity=CapacityRules(usd_per_hour=(3600.0,)))
    stats = _stats((*START, *CRASH), rules)

    (incident,) = stats.incidents
    num_reservations = stats.usd_per_hour / 3600.0
    # Each of the steps that were lost had taken a second.
    waited_s = (incident.recovery_s or 0.0) + incident.lost_steps * 1.0
    assert (num_reservations, incident.lost_steps) == (2, 2)
    assert incident.cost_usd == pytest.approx(num_reservations * waited_s)
