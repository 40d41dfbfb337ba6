"""How the first attempt starts if something is lost before it."""

from dataclasses import replace

import pytest

from orchestrator.core import Phase, RunRules, RunState, step
from orchestrator.core import actions as act
from orchestrator.core import events as ev
from tests.support.run_events import granted_on

RULES = RunRules(run="test", min_workers=1, max_workers=2, total_steps=1000)


def _fold(state: RunState, *events: ev.Event) -> RunState:
    for event in events:
        state, _ = step(state, event, rules=RULES)
    return state


@pytest.mark.parametrize(
    "lost",
    ["node", "process", "ready process", "node behind ready ones", "process behind ready ones"],
)
def test_the_first_attempt_does_not_wait_for_what_replaces_a_lost_one(lost: str) -> None:
    """It waited for the whole grace, though later the same loss costs a second.

    The run waits for workers that start for the first time.
    """
    state = _fold(
        RunState(),
        ev.ControllerStarted(at_s=0.0, incarnation=1),
        ev.ReservationGranted(at_s=0.0, reservation=1, node="a"),
        ev.ReservationGranted(at_s=0.0, reservation=2, node="b"),
    )
    ready = ev.WorkerReady(at_s=1.0, worker="w0001", node="a", pid=11)
    other = ev.WorkerReady(at_s=1.0, worker="w0002", node="b", pid=12)
    gone = ev.NodeLost(at_s=2.0, node="b", cause="gone")
    died = ev.WorkerExited(at_s=2.0, worker="w0002", cause="crash", detail="SIGKILL")
    histories: dict[str, list[ev.Event]] = {
        "node": [gone, ready],
        "process": [died, ready],
        "ready process": [other, died, ready],
        "node behind ready ones": [ready, gone],
        "process behind ready ones": [ready, died],
    }
    *before, last = histories[lost]
    state = _fold(state, *before)
    assert state.phase is Phase.WAITING

    state, actions = step(state, last, rules=RULES)
    assert state.phase is Phase.FORMING
    assert act.StartAttempt in [type(action) for action in actions]


def test_the_first_attempt_waits_for_the_others_of_a_lost_node() -> None:
    """A loss must not make it begin with the first of three healthy processes."""
    rules = replace(RULES, max_workers=4)
    state, _ = step(RunState(), ev.ControllerStarted(at_s=0.0, incarnation=1), rules=rules)
    events: list[ev.Event] = [
        *granted_on("aabc"),
        ev.NodeLost(at_s=1.0, node="c", cause="gone"),
        ev.WorkerReady(at_s=2.0, worker="w0001", node="a", pid=11),
        ev.WorkerReady(at_s=3.0, worker="w0002", node="a", pid=12),
    ]
    for event in events:
        state, _ = step(state, event, rules=rules)
        assert state.phase is Phase.WAITING
    state, _ = step(state, ev.WorkerReady(at_s=4.0, worker="w0003", node="b", pid=13), rules=rules)

    assert state.phase is Phase.FORMING
    assert len(state.attempt.members) == 3
