"""Keepers: one on each node with a reservation, restarted when silent, missed for a while."""

from dataclasses import replace
from functools import partial
from math import inf

import pytest

from orchestrator.core import AvoidRules, Phase, RunRules, RunState, step
from orchestrator.core import actions as act
from orchestrator.core import events as ev
from orchestrator.policies import LayoutRules
from tests.support.obedient_cluster import Cluster, fold
from tests.support.run_events import formed_by

RULES = RunRules(run="test", min_workers=1, max_workers=2, total_steps=1000)
STARTED: tuple[ev.Event, ...] = (
    ev.ControllerStarted(at_s=0.0, incarnation=1),
    ev.NodeJoined(at_s=0.0, node="a"),
    ev.ReservationGranted(at_s=0.0, reservation=1, node="a"),
    ev.WorkerReady(at_s=1.0, worker="w0001", node="a", pid=11),
    ev.KeeperReady(at_s=1.0, node="a"),
)


_fold = partial(fold, rules=RULES)


def test_a_node_gets_a_keeper_with_its_first_reservation_and_whenever_a_controller_meets_it() -> (
    None
):
    """A node that the run does not use stays idle, so that it can be given back."""
    joined = ev.NodeJoined(at_s=0.0, node="a")
    start = act.StartKeeper(node="a")
    state, first = _fold(RunState(), STARTED[0], joined)
    assert start not in first

    state, granted = _fold(state, STARTED[2])
    assert granted.count(start) == 1
    # A restarted controller has no handle of any keeper; to start one twice is to find it.
    _, again = _fold(state, joined)
    assert start in again


def _run_on_two_nodes() -> RunState:
    state, _ = _fold(
        RunState(),
        *STARTED,
        ev.NodeJoined(at_s=1.0, node="b"),
        ev.ReservationGranted(at_s=1.0, reservation=2, node="b"),
        ev.KeeperReady(at_s=1.5, node="b"),
        ev.WorkerReady(at_s=2.0, worker="w0002", node="b", pid=12),
        ev.Ticked(at_s=60.0),
    )
    return state


def test_a_keeper_of_an_earlier_controller_is_ended_if_the_node_is_not_used() -> None:
    """Its end may have been ordered and not happened; who finds it says that it is there."""
    state = _run_on_two_nodes()
    formed = formed_by(("w0001", "w0002"), at_s=61.0, attempt=state.attempt.number)
    state, _ = _fold(
        state,
        *formed,
        ev.NodeJoined(at_s=61.0, node="c"),
        ev.KeeperReady(at_s=61.5, node="c"),
    )
    commit = ev.StepCompleted(at_s=62.0, attempt=state.attempt.number, step=2, step_s=1.0, stored=1)
    state, actions = _fold(state, commit)
    assert actions == [act.EndKeeper(node="c")]

    _, actions = _fold(state, commit)
    assert actions == []
    assert _fold(state, ev.KeeperSilent(at_s=63.0, node="c", silent_s=15.0))[1] == []


def test_a_keeper_is_ended_when_others_protect_what_is_newer() -> None:
    """The next version in storage may be minutes away, and the node costs as much as a used one."""
    state = _run_on_two_nodes()
    number = state.attempt.number
    formed = formed_by(("w0001", "w0002"), at_s=61.0, attempt=number)
    joined = (ev.NodeJoined(at_s=61.0, node="c"), ev.KeeperReady(at_s=61.5, node="c"))
    state, _ = _fold(state, *formed, *joined)

    assert _fold(state, ev.MemoryProtected(at_s=62.0, attempt=number - 1))[1] == []
    state, actions = _fold(state, ev.MemoryProtected(at_s=62.0, attempt=number))
    assert actions == [act.EndKeeper(node="c")]
    assert _fold(state, ev.MemoryProtected(at_s=62.0, attempt=number))[1] == []


def test_a_silent_keeper_is_restarted_while_its_node_lives() -> None:
    """Ray takes one that a signal has stopped for alive."""
    state, _ = _fold(RunState(), *STARTED)
    silent = ev.KeeperSilent(at_s=20.0, node="a", silent_s=15.0)
    assert _fold(state, silent)[1] == [act.RestartKeeper(node="a", reason="silent for 15 s")]
    assert _fold(state, replace(silent, silent_s=2.5))[1] == [], "it may be back soon"
    (restart,) = _fold(state, replace(silent, silent_s=2.5, is_awaited=True))[1]
    assert isinstance(restart, act.RestartKeeper)

    lost, _ = _fold(state, ev.NodeLost(at_s=21.0, node="a", cause="gone"))
    assert _fold(lost, silent)[1] == []


@pytest.mark.parametrize("how", ["silent", "died"])
def test_growth_waits_for_a_keeper_of_the_run(how: str) -> None:
    """Members commit to its memory when they leave, and the next attempt would not get it."""
    cluster = Cluster(replace(RULES, max_workers=4, layout=LayoutRules(), total_steps=10_000))
    cluster.start(2)
    cluster.send(ev.KeeperReady(at_s=cluster.at_s, node="n0"))
    cluster.train(20)
    away = {
        "silent": ev.KeeperSilent(at_s=cluster.at_s, node="n0", silent_s=2.5),
        "died": ev.KeeperDied(at_s=cluster.at_s, node="n0", detail=""),
    }
    cluster.send(away[how])
    cluster.add(3, 4)
    cluster.train(250)
    assert [len(each.members) for each in cluster.started] == [2]

    cluster.send(ev.KeeperReady(at_s=cluster.at_s, node="n0"))
    assert [len(each.members) for each in cluster.started] == [2, 4]


def test_a_keeper_that_is_back_in_time_costs_nothing() -> None:
    """Training goes on meanwhile: only who holds memory is away."""
    state, _ = _fold(RunState(), *STARTED)
    died, _ = _fold(state, ev.KeeperDied(at_s=20.0, node="a", detail=""))
    assert died.fleet.wake_s == 20.0 + RULES.bounds.keeper_return_s

    back, _ = _fold(died, ev.KeeperReady(at_s=21.0, node="a"))
    late = ev.Ticked(at_s=21.0 + RULES.bounds.keeper_return_s)
    assert not any(isinstance(each, act.GiveUpNode) for each in _fold(back, late)[1])


def test_a_node_whose_keeper_stays_away_is_given_up() -> None:
    """Nothing that its workers do would be kept."""
    state, _ = _fold(RunState(), *STARTED, ev.KeeperDied(at_s=20.0, node="a", detail=""))
    state, actions = _fold(state, ev.Ticked(at_s=20.0 + RULES.bounds.keeper_return_s))

    given_up = [action for action in actions if isinstance(action, act.GiveUpNode)]
    assert [(each.node, each.reason) for each in given_up] == [
        ("a", "its keeper was not back after 30 s")
    ]
    assert not state.fleet.nodes[0].alive
    assert state.fleet.nodes[0].keeper_by_s == inf


def test_the_wait_for_a_keeper_restarts_with_a_controller() -> None:
    """There was no controller to hear that it is back."""
    state, _ = _fold(RunState(), *STARTED, ev.KeeperDied(at_s=20.0, node="a", detail=""))
    state, _ = _fold(
        state,
        ev.ControllerStarted(at_s=60.0, incarnation=2),
        ev.WorkersSurveyed(at_s=60.1, alive=(), reservations=(), pending_reservations=()),
    )
    assert state.fleet.nodes[0].keeper_by_s == 60.1 + RULES.bounds.keeper_return_s


def test_the_keeper_of_a_member_that_has_yielded_stays_although_its_worker_dies() -> None:
    """It holds what the next attempt resumes from; one simulated history in 100,000 lost a step."""
    state = _run_on_two_nodes()
    number = state.attempt.number
    once = replace(RULES, avoid=AvoidRules(strikes_max=1))
    for event in (
        ev.WorkerFormed(at_s=61.0, attempt=number, worker="w0001"),
        ev.WorkerFormed(at_s=61.0, attempt=number, worker="w0002"),
        ev.StepCompleted(at_s=62.0, attempt=number, step=2, step_s=1.0),
        ev.StopRequested(at_s=63.0, reason=""),
        ev.WorkerLeft(
            at_s=64.0, attempt=number, worker="w0002", how=ev.Leaving.YIELDED, step=2, detail=""
        ),
        ev.WorkerExited(at_s=64.1, worker="w0002", cause="crash", detail=""),
    ):
        state, _ = step(state, event, rules=once)
    node = state.fleet.nodes[state.fleet.node_ids["b"]]
    assert (state.phase, node.reservations, node.workers) == (Phase.YIELDING, (), ())

    assert _fold(state, ev.MemoryProtected(at_s=64.3, attempt=number))[1] == []
