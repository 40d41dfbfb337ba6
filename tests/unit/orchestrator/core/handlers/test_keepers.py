"""The life of keepers: one on every node of the run, restarted when silent, missed for a while."""

from math import inf

from orchestrator.core import Action, NodeLost, RunRules, RunState, step
from orchestrator.core import actions as act
from orchestrator.core import events as ev

RULES = RunRules(run="test", min_workers=1, max_workers=2, total_steps=1000)
STARTED: tuple[ev.Event, ...] = (
    ev.ControllerStarted(at_s=0.0, incarnation=1),
    ev.NodeJoined(at_s=0.0, node="a"),
    ev.SlotGranted(at_s=0.0, slot=1, node="a"),
    ev.WorkerReady(at_s=1.0, worker="w0001", node="a", pid=11),
    ev.KeeperReady(at_s=1.0, node="a"),
)


def _fold(state: RunState, *events: ev.Event) -> tuple[RunState, list[Action]]:
    ordered: list[Action] = []
    for event in events:
        state, actions = step(state, event, rules=RULES)
        ordered += actions
    return state, ordered


def test_a_node_gets_a_keeper_as_often_as_a_controller_meets_it() -> None:
    """A restarted controller has no handle of any keeper; to start one twice is to find it."""
    joined = ev.NodeJoined(at_s=0.0, node="a")
    state, first = _fold(RunState(), joined)
    _, again = _fold(state, joined)

    assert act.StartKeeper(node="a") in first
    assert act.StartKeeper(node="a") in again


def test_a_silent_keeper_is_restarted_while_its_node_lives() -> None:
    """Ray takes one that a signal has stopped for alive."""
    state, _ = _fold(RunState(), *STARTED)
    silent = ev.KeeperSilent(at_s=20.0, node="a", silent_s=15.0)
    assert _fold(state, silent)[1] == [act.RestartKeeper(node="a", reason="silent for 15 s")]

    lost, _ = _fold(state, NodeLost(at_s=21.0, node="a", cause="gone"))
    assert _fold(lost, silent)[1] == []


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


def test_the_wait_for_a_keeper_begins_anew_with_a_controller() -> None:
    """Nobody was there to hear that it is back."""
    state, _ = _fold(RunState(), *STARTED, ev.KeeperDied(at_s=20.0, node="a", detail=""))
    state, _ = _fold(
        state,
        ev.ControllerStarted(at_s=60.0, incarnation=2),
        ev.WorkersSurveyed(at_s=60.1, alive=(), slots=(), pending_slots=()),
    )
    assert state.fleet.nodes[0].keeper_by_s == 60.1 + RULES.bounds.keeper_return_s
