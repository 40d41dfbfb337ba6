"""Requests for capacity: alternatives in order, and the fate of the requests."""

from functools import partial

from orchestrator.core import RunRules, RunState, describe
from orchestrator.core import actions as act
from orchestrator.core import events as ev
from orchestrator.core.actions import Action
from orchestrator.policies import CapacityRules, LayoutRules
from tests.support.obedient_cluster import fold
from tests.support.run_events import formed_by, left_by

RULES = RunRules(
    run="r",
    min_workers=2,
    max_workers=4,
    total_steps=1000,
    layout=LayoutRules(dp_replicate=2, fixed=("dp_replicate",)),
    capacity=CapacityRules(usd_per_hour=(1.0, 3.0)),
)


_fold = partial(fold, rules=RULES)


def _requests(actions: list[Action], alternative: int) -> list[int]:
    return [
        action.reservation
        for action in actions
        if isinstance(action, act.RequestReservation) and action.alternative == alternative
    ]


def _train(
    state: RunState, at_s: float, workers: dict[str, str], rules: RunRules = RULES
) -> RunState:
    """Have the workers be ready, form, and make a step."""
    ready = [
        ev.WorkerReady(at_s=at_s, worker=worker, node=node, pid=1)
        for worker, node in workers.items()
    ]
    state, _ = _fold(state, *ready, ev.Ticked(at_s=at_s + 60.0), rules=rules)
    number = state.attempt.number
    formed = formed_by(workers, at_s=at_s + 60.0, attempt=number)
    done = ev.StepCompleted(at_s=at_s + 61.0, attempt=number, step=1, step_s=1.0)
    return _fold(state, *formed, done, rules=rules)[0]


def _on_second_choice() -> RunState:
    """Two workers train on what comes second; what comes first is refused."""
    state, _ = _fold(
        RunState(),
        ev.ControllerStarted(at_s=0.0, incarnation=1),
        ev.CapacityRefused(at_s=1.0, alternative=0, why="sold out"),
        ev.ReservationGranted(at_s=2.0, reservation=5, node="dear"),
        ev.ReservationGranted(at_s=2.0, reservation=6, node="dear"),
    )
    return _train(state, 3.0, {"w0001": "dear", "w0002": "dear"})


def test_what_is_not_granted_in_time_is_asked_for_elsewhere_as_well() -> None:
    """The first choice stays asked for: nothing else shows that it is back."""
    state, actions = _fold(RunState(), ev.ControllerStarted(at_s=0.0, incarnation=1))
    assert _requests(actions, 0) == [1, 2, 3, 4]

    state, actions = _fold(state, ev.Ticked(at_s=179.0))
    assert actions == []
    state, actions = _fold(state, ev.Ticked(at_s=180.0))
    assert actions[0] == act.NoteRefused(
        alternative=0, num_reservations=4, why="nothing was granted for 180 s"
    )
    assert len(_requests(actions, 1)) == 4
    (first, second) = describe(state)["capacity"]
    assert (first["refused"], first["refused_s"], second["refused"]) == (4, 180.0, 0)


def test_a_refusal_is_believed_at_once_and_a_grant_takes_it_back() -> None:
    """A provider that gives one machine may give more: the second choice is given up again."""
    state, _ = _fold(RunState(), ev.ControllerStarted(at_s=0.0, incarnation=1))
    refused = ev.CapacityRefused(at_s=1.0, alternative=0, why="sold out")
    state, actions = _fold(state, refused)
    assert len(_requests(actions, 1)) == 4
    assert _fold(state, refused)[1] == []

    state, actions = _fold(state, ev.ReservationGranted(at_s=2.0, reservation=1, node="cheap"))
    given_up = [
        action.reservation for action in actions if isinstance(action, act.ReleaseReservation)
    ]
    assert len(given_up) == 4
    assert [row["asked"] for row in describe(state)["capacity"]] == [4, 0]


def test_workers_move_back_in_numbers_that_a_layout_can_use() -> None:
    """One worker of the first choice replaces one of the second; no rank is left without a copy."""
    state = _on_second_choice()
    assert state.attempt.layout is not None
    assert state.attempt.layout.world_size == 2

    state, actions = _fold(
        state,
        ev.ReservationGranted(at_s=100.0, reservation=1, node="cheap"),
        ev.WorkerReady(at_s=110.0, worker="w0003", node="cheap", pid=3),
        ev.Ticked(at_s=120.0),
    )
    assert any(isinstance(action, act.YieldAttempt) for action in actions)
    left = left_by(("w0001", "w0002"), at_s=121.0, how=ev.Leaving.YIELDED, step=9)
    state, actions = _fold(state, *left)
    (incident,) = [each for each in actions if isinstance(each, act.ReportIncident)]
    (started,) = [each for each in actions if isinstance(each, act.StartAttempt)]
    assert incident.incident == "move"
    assert {worker for worker, _, _ in started.members} == {"w0001", "w0003"}
    assert started.resume_step == 9

    formed = formed_by(("w0001", "w0003"), at_s=122.0, attempt=2)
    done = ev.StepCompleted(at_s=123.0, attempt=2, step=10, step_s=1.0)
    state, actions = _fold(state, *formed, done)
    # Four are wanted, so what comes second is kept beside it.
    assert not [each for each in actions if isinstance(each, act.ReleaseReservation)]


def test_no_worker_moves_for_a_node_that_is_not_better() -> None:
    """A pause for nothing, again and again, would be all that comes of it."""
    state = _on_second_choice()
    state, actions = _fold(
        state,
        ev.ReservationGranted(at_s=100.0, reservation=7, node="dear2"),
        ev.WorkerReady(at_s=110.0, worker="w0003", node="dear2", pid=3),
        ev.Ticked(at_s=200.0),
    )
    assert not [each for each in actions if isinstance(each, act.YieldAttempt)]


def test_requests_that_are_renewed_wait_since_they_were_first_made() -> None:
    """A node that is to be avoided must not put off the second choice for ever."""
    state, _ = _fold(
        RunState(),
        ev.ControllerStarted(at_s=0.0, incarnation=1),
        ev.NodeJoined(at_s=100.0, node="a"),
        ev.NodeDraining(at_s=100.0, node="a", deadline_s=900.0),
        ev.ReservationGranted(at_s=101.0, reservation=2, node="a"),
    )
    (first,) = describe(state)["capacity"]
    assert (first["asked"], first["since_s"]) == (4, 0.0)
    assert _requests(_fold(state, ev.Ticked(at_s=180.0))[1], 1)


#: Six nodes with a worker each; nothing replaces one.
FLEET = RunRules(run="r", min_workers=2, max_workers=6, total_steps=1000)


def _noticed() -> tuple[RunState, list[Action]]:
    """Six workers train; four of their nodes get notice, one after the other."""
    nodes = {f"w{number:04d}": f"n{number}" for number in range(1, 7)}
    granted = (
        ev.ReservationGranted(at_s=1.0, reservation=number, node=f"n{number}")
        for number in range(1, 7)
    )
    started = ev.ControllerStarted(at_s=0.0, incarnation=1)
    state, _ = _fold(RunState(), started, *granted, rules=FLEET)
    state = _train(state, 2.0, nodes, FLEET)
    notices = (
        ev.NodeDraining(at_s=100.0 + number, node=f"n{number}", deadline_s=1000.0)
        for number in range(1, 5)
    )
    return _fold(state, *notices, rules=FLEET)


def _released(actions: list[Action]) -> list[int]:
    return [each.reservation for each in actions if isinstance(each, act.ReleaseReservation)]


def test_a_notice_asks_for_what_replaces_its_node_and_for_nothing_again() -> None:
    """If each notice renewed what is pending, many of them would fill the journal."""
    state, actions = _noticed()

    assert _requests(actions, 0) == [7, 8, 9, 10]
    assert _released(actions) == []
    assert state.fleet.reservations[9].avoid == ("n1", "n2", "n3")


def test_what_waits_avoids_the_nodes_that_are_left_before_they_are_free() -> None:
    """Their room is free from then on, and requests that know of fewer notices would take it."""
    state, _ = _noticed()
    number = state.attempt.number
    left = (
        ev.WorkerLeft(
            at_s=991.0,
            attempt=number,
            worker=f"w{worker:04d}",
            how=ev.Leaving.YIELDED,
            step=9,
            detail="",
        )
        for worker in range(1, 7)
    )
    formed = formed_by(("w0005", "w0006"), at_s=992.0, attempt=number + 1)
    done = ev.StepCompleted(at_s=993.0, attempt=number + 1, step=10, step_s=1.0)
    state, actions = _fold(state, ev.Ticked(at_s=990.0), *left, *formed, done, rules=FLEET)

    assert _released(actions) == [7, 8, 9, 1, 2, 3, 4]
    pending = [each for each in state.fleet.reservations.values() if each.node < 0]
    assert [each.avoid for each in pending] == [("n1", "n2", "n3", "n4")] * 4


def test_what_is_granted_on_a_node_that_is_left_is_asked_for_elsewhere() -> None:
    """All that would be placed there next is asked for again with it, and only once."""
    state, _ = _noticed()
    granted = ev.ReservationGranted(at_s=200.0, reservation=8, node="n4")
    state, actions = _fold(state, granted, rules=FLEET)
    assert (_released(actions), _requests(actions, 0)) == ([7, 8, 9], [11, 12, 13])

    again = ev.ReservationGranted(at_s=201.0, reservation=10, node="n4")
    state, actions = _fold(state, again, rules=FLEET)
    assert (_released(actions), _requests(actions, 0)) == ([10], [14])
