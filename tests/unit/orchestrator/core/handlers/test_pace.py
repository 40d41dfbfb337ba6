"""The intervals of saves: decided from what saves cost, and told to rank 0."""

from dataclasses import replace
from functools import partial

from orchestrator.core import RunRules, RunState, resume_event
from orchestrator.core import actions as act
from orchestrator.core import events as ev
from orchestrator.policies import CadenceRules, FaultsSeen
from tests.support.obedient_cluster import fold
from workers.protocol import Pace, SaveCosts

RULES = RunRules(
    run="test",
    min_workers=1,
    max_workers=1,
    total_steps=1000,
    cadence=CadenceRules(chooses_checkpoints=True),
)
COSTS = SaveCosts(
    step_s=1.0,
    snapshot_stall_s=0.015,
    snapshot_busy_s=0.1,
    checkpoint_stall_s=1.0,
    checkpoint_busy_s=1.0,
    pace=Pace(snapshot_steps=1, checkpoint_steps=10),
)
START: tuple[ev.Event, ...] = (
    ev.ControllerStarted(at_s=0.0, incarnation=1),
    ev.ReservationGranted(at_s=0.0, reservation=1, node="a"),
    ev.WorkerReady(at_s=1.0, worker="w0001", node="a", pid=11),
    ev.WorkerFormed(at_s=2.0, attempt=1, worker="w0001"),
)


_fold = partial(fold, rules=RULES)


def _measured(costs: SaveCosts = COSTS, attempt: int = 1) -> ev.SavesMeasured:
    return ev.SavesMeasured(at_s=3.0, attempt=attempt, costs=costs)


def test_a_chosen_interval_is_reported_once_with_the_reason() -> None:
    """The reason tells the interval that is kept, also the one that the user asked for."""
    state, _ = _fold(RunState(), *START)
    state, (told,) = _fold(state, _measured())

    assert isinstance(told, act.SetCadence)
    assert (told.attempt, told.worker, told.pace.snapshot_steps) == (1, "w0001", 0)
    assert told.pace.checkpoint_steps > 10
    assert told.reason.startswith("snapshot every step (1 s")
    assert (state.pace, state.pace_reason) == (told.pace, told.reason)
    assert _fold(state, _measured())[1] == []


def test_nothing_is_chosen_for_who_asked_for_intervals_or_by_what_is_not_measured() -> None:
    """An unmeasured cost is not zero."""
    state, _ = _fold(RunState(), *START)
    asked = replace(RULES, cadence=CadenceRules())
    assert _fold(state, _measured(), rules=asked) == (state, [])
    for unmeasured in (
        replace(COSTS, checkpoint_busy_s=0.0),
        replace(COSTS, snapshot_stall_s=0.0),
        replace(COSTS, step_s=0.0),
    ):
        assert _fold(state, _measured(unmeasured)) == (state, [])
    assert _fold(state, _measured(attempt=7)) == (state, [])


def test_faults_are_counted_by_what_they_cost_over_the_whole_run() -> None:
    """The more often storage has to serve a recovery, the more often it is written."""
    state, _ = _fold(
        RunState(),
        *START,
        ev.StepCompleted(at_s=2.5, attempt=1, step=1, step_s=0.5),
        ev.WorkerExited(at_s=3.0, worker="w0001", cause="crash", detail=""),
        ev.CommittedRead(at_s=3.1, attempt=1, step=1, committed_by=1, skipped=()),
        ev.CommittedRead(at_s=3.2, attempt=1, step=1, committed_by=1, skipped=()),
        ev.WorkerReady(at_s=4.0, worker="w0002", node="a", pid=12),
        ev.WorkerFormed(at_s=4.5, attempt=2, worker="w0002", sources=(("storage", 10),)),
    )
    assert state.faults_seen == FaultsSeen(num_process=1, num_node=0, num_uncovered=1)
    again, _ = _fold(RunState(), resume_event(state, at_s=5.0, incarnation=2))
    assert again.faults_seen == state.faults_seen
