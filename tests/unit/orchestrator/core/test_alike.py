"""Events of several members that are folded as one."""

from collections import deque
from dataclasses import replace

import pytest

from orchestrator.core import RunRules, RunState, RunStats, step, take_alike, transition_records
from orchestrator.core import events as ev
from orchestrator.core.alike import NUM_MAX

RULES = RunRules(run="r", min_workers=1, max_workers=4, total_steps=100)
NAMES = [f"w{number:04d}" for number in range(1, 5)]
LEFT = ev.WorkerLeft(
    at_s=9.0, attempt=1, worker="w0001", how=ev.Leaving.FENCED, step=3, detail="fenced"
)
FORMED = ev.WorkerFormed(at_s=5.0, attempt=1, worker="w0001")


def _taken(events: list[ev.Event]) -> list[ev.Event]:
    waiting = deque(events)
    taken = []
    while waiting:
        taken.append(take_alike(waiting))
    return taken


def test_members_that_tell_the_same_are_one_event() -> None:
    """80,000 leave a fenced attempt within a second, and each event is a line of the journal."""
    left = [replace(LEFT, at_s=9.0 + n, worker=name) for n, name in enumerate(NAMES)]
    formed = [replace(FORMED, worker=name, sources=(("memory", 5),)) for name in NAMES]

    assert _taken([*left, ev.Ticked(at_s=20.0), *formed]) == [
        replace(LEFT, at_s=12.0, worker="w0004", others=tuple(NAMES[:3])),
        ev.Ticked(at_s=20.0),
        replace(FORMED, worker="w0004", others=tuple(NAMES[:3]), sources=(("memory", 20),)),
    ]
    assert len(_taken([LEFT] * (NUM_MAX + 1))) == 2


@pytest.mark.parametrize(
    "other",
    [
        replace(LEFT, step=4),
        replace(LEFT, attempt=2),
        replace(LEFT, how=ev.Leaving.PEER_LOST),
        replace(LEFT, detail="another"),
        replace(LEFT, unreached="node"),
        replace(LEFT, told="SIGTERM"),
        replace(LEFT, damaged=((1, 1, "", "", 0, 0),)),
        FORMED,
        ev.WorkerExited(at_s=9.0, worker="w0001", cause="crash", detail="signal 9"),
    ],
)
def test_what_is_true_of_one_alone_stays_its_own_event(other: ev.Event) -> None:
    """A member's facts about sources, peers or its end would also be applied to others."""
    assert _taken([LEFT, other]) == [LEFT, other]
    assert _taken([other, LEFT]) == [other, LEFT]


def test_the_fold_of_several_is_the_fold_of_each() -> None:
    """The journal has what was folded, and its numbers are those of the members."""
    folded, counted = [], []
    for waiting in (_history(), _taken(_history())):
        state, stats = RunState(), RunStats()
        for event in waiting:
            state, actions = step(state, event, rules=RULES)
            for record in transition_records(event, actions, attempt=state.attempt.number):
                stats.add(record)
        folded.append(state)
        counted.append(stats.summary())
    assert len(_taken(_history())) < len(_history())
    assert folded[0].attempt.number == 2
    assert folded[0] == folded[1]
    assert counted[0] == counted[1]


def _history() -> list[ev.Event]:
    """Four workers train; one dies and the others leave, and three train on."""
    granted = (ev.ReservationGranted(at_s=1.0, reservation=n, node="a") for n in range(1, 5))
    ready = (ev.WorkerReady(at_s=2.0, worker=name, node="a", pid=1) for name in NAMES)
    return [
        ev.ControllerStarted(at_s=0.0, incarnation=1),
        *granted,
        *ready,
        *(replace(FORMED, worker=name) for name in NAMES),
        ev.StepCompleted(at_s=6.0, attempt=1, step=3, step_s=1.0),
        ev.WorkerExited(at_s=8.0, worker="w0004", cause="crash", detail="signal 9"),
        *(replace(LEFT, worker=name) for name in NAMES[:3]),
        ev.CommittedRead(at_s=9.5, attempt=1, step=3, committed_by=1, skipped=(), source="memory"),
        *(replace(FORMED, at_s=10.0, attempt=2, worker=name) for name in NAMES[:3]),
        ev.StepCompleted(at_s=11.0, attempt=2, step=4, step_s=1.0),
    ]
