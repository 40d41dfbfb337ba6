"""A run gives workers back to others or to its user, and takes them again or stops."""

from dataclasses import replace

from orchestrator.core import RunRules, RunState, describe, own_share, step
from orchestrator.core import actions as act
from orchestrator.core import events as ev
from orchestrator.core.actions import Action
from orchestrator.policies import CapacityRules, Share, SharingRules
from tests.simulation.checkers import check
from tests.support.run_events import formed_by, left_by
from workers.settings import SnapshotSettings

NEEDS = (("CPU", 1.0),)
RULES = RunRules(
    run="r", min_workers=1, max_workers=4, total_steps=1000, sharing=SharingRules(needs=NEEDS)
)
CHOICE = replace(RULES, capacity=CapacityRules(usd_per_hour=(1.0, 3.0)))
OTHER = Share(run="other", priority=1, num_min=1, num_held=1, num_lacking=2, needs=NEEDS)


class Fold:
    """A run, and what it orders."""

    def __init__(self, rules: RunRules = RULES) -> None:
        self.rules = rules
        self.state = RunState()
        self(ev.ControllerStarted(at_s=0.0, incarnation=1))

    def __call__(self, *events: ev.Event) -> list[Action]:
        ordered: list[Action] = []
        for event in events:
            self.state, actions = step(self.state, event, rules=self.rules)
            check(self.state)
            ordered += actions
        return ordered

    def train(self, at_s: float, reservations: dict[int, str]) -> None:
        """Grant reservations, and have a worker on each train."""
        self(
            *(
                ev.ReservationGranted(at_s=at_s, reservation=reservation, node=node)
                for reservation, node in reservations.items()
            )
        )
        ready = [
            ev.WorkerReady(at_s=at_s, worker=worker.name, node=node.name, pid=1)
            for worker in self.state.fleet.workers.values()
            for node in [self.state.fleet.nodes[worker.node]]
        ]
        self(*ready, ev.Ticked(at_s=at_s + 60.0))
        self.make_step(at_s + 61.0)

    def make_step(self, at_s: float) -> list[Action]:
        """Have the members form, and make a step."""
        number, done = self.state.attempt.number, self.state.attempt.step + 1
        return self(
            *formed_by(self.members(), at_s=at_s, attempt=number),
            ev.StepCompleted(at_s=at_s, attempt=number, step=done, step_s=1.0),
        )

    def leave(self, at_s: float) -> list[Action]:
        """Have the members leave as asked, at the step that they have."""
        number, done = self.state.attempt.number, self.state.attempt.step
        return self(
            *left_by(self.members(), at_s=at_s, attempt=number, how=ev.Leaving.YIELDED, step=done)
        )

    def see(self, at_s: float, *others: Share) -> list[Action]:
        return self(ev.OthersSeen(at_s=at_s, run="own", others=others))

    def members(self) -> list[str]:
        return [self.state.fleet.workers[member].name for member in self.state.attempt.members]


def _kinds(actions: list[Action]) -> list[str]:
    return [type(action).__name__ for action in actions]


def _released(actions: list[Action]) -> list[int]:
    return [action.reservation for action in actions if isinstance(action, act.ReleaseReservation)]


def test_workers_are_given_at_a_step_boundary_and_come_back() -> None:
    """The members leave together, so that nothing is lost; then the room is given back."""
    run = Fold()
    run.train(1.0, {1: "a", 2: "a", 3: "b", 4: "b"})
    assert len(run.members()) == 4

    (asked,) = run.see(100.0, OTHER)
    assert isinstance(asked, act.YieldAttempt)
    assert not asked.durable
    assert run.see(102.0, OTHER) == [], "what it has given is not taken yet"
    actions = run.leave(103.0)
    (incident,) = [each for each in actions if isinstance(each, act.ReportIncident)]
    (started,) = [each for each in actions if isinstance(each, act.StartAttempt)]
    assert (incident.incident, incident.guilty) == ("share", ())
    assert incident.evidence == "giving 2 of its workers to other"
    assert started.resume_step == 1
    assert [node for _, node, _ in started.members] == ["a", "a"]
    assert _released(actions) == [3, 4]
    assert describe(run.state)["shared"] == {"limit": 2, "runs": ["other"]}
    actions = run.make_step(104.0)
    assert "RequestReservation" not in _kinds(actions)
    assert {each.worker for each in actions if isinstance(each, act.KillWorker)} <= {
        "w0003",
        "w0004",
    }

    assert run.see(106.0, replace(OTHER, num_held=2, num_lacking=1)) == []
    helped = replace(OTHER, num_held=3, num_lacking=0)
    assert _kinds(run.see(120.0, helped)) == ["RequestReservation", "RequestReservation"]
    assert describe(run.state)["shared"] is None
    run.train(121.0, {5: "b", 6: "b"})
    assert run.state.attempt.yield_asked, "it grows back"


def test_a_lower_or_satisfied_run_gets_nothing() -> None:
    """A run that gives workers to whoever asks would never finish."""
    run = Fold()
    run.train(1.0, {1: "a", 2: "a", 3: "b", 4: "b"})

    assert run.see(100.0, replace(OTHER, priority=-1)) == []
    assert run.see(102.0, replace(OTHER, num_lacking=0)) == []
    assert run.see(104.0, replace(OTHER, needs=(("GPU", 1.0),))) == []


def test_a_run_keeps_its_least_number() -> None:
    """With fewer it would only wait, and hold what it has for nothing."""
    run = Fold(replace(RULES, min_workers=3))
    run.train(1.0, {1: "a", 2: "a", 3: "b", 4: "b"})
    run.see(100.0, replace(OTHER, num_lacking=9))
    actions = run.leave(101.0)

    (started,) = [each for each in actions if isinstance(each, act.StartAttempt)]
    assert len(started.members) == 3
    assert _released(actions) == [4]


def test_what_is_asked_for_or_unused_is_given_first() -> None:
    """No member has to leave for it, so no step waits."""
    run = Fold(replace(RULES, max_workers=6))
    run.train(1.0, {1: "a", 2: "a", 3: "b"})
    run(ev.ReservationGranted(at_s=90.0, reservation=4, node="b"))
    assert len(run.members()) == 3

    actions = run.see(100.0, replace(OTHER, num_lacking=1))
    assert _released(actions) == [6, 5, 4]
    assert "YieldAttempt" not in _kinds(actions)
    assert len(run.members()) == 3


def test_the_worst_alternative_is_given_back_and_all_are_requested_again() -> None:
    """Otherwise a refused request stays open, and would take nodes that the other run waits for."""
    run = Fold(CHOICE)
    run(ev.ReservationGranted(at_s=1.0, reservation=1, node="cheap"))
    run(ev.CapacityRefused(at_s=1.5, alternative=0, why="sold out"))
    dear = [n for n, reservation in run.state.fleet.reservations.items() if reservation.alternative]
    run.train(2.0, {dear[0]: "dear", dear[1]: "dear2"})
    assert len(run.members()) == 3

    asked = run.see(100.0, replace(OTHER, num_lacking=2))
    pending = {n for n, reservation in run.state.fleet.reservations.items() if reservation.node < 0}
    assert not pending
    assert "YieldAttempt" in _kinds(asked)
    actions = run.leave(101.0)
    (started,) = [each for each in actions if isinstance(each, act.StartAttempt)]
    assert [node for _, node, _ in started.members] == ["cheap"]
    assert sorted(_released(actions)) == sorted(dear[:2])
    run.make_step(102.0)

    actions = run.see(130.0)
    wanted = [each for each in actions if isinstance(each, act.RequestReservation)]
    assert [each.alternative for each in wanted] == [0, 0, 0]
    actions = run(ev.CapacityRefused(at_s=131.0, alternative=0, why="sold out"))
    assert _kinds(actions) == ["NoteRefused", *["RequestReservation"] * 3]


def test_a_restarted_controller_goes_on_sharing() -> None:
    """It would take back what the other run is just about to use."""
    run = Fold()
    run.train(1.0, {1: "a", 2: "a", 3: "b", 4: "b"})
    run.see(100.0, OTHER)
    run.leave(101.0)
    run.make_step(102.0)

    run(ev.ControllerStarted(at_s=103.0, incarnation=2))
    assert run.see(103.5) == [], "the run's capacity is unknown until the survey is there"
    alive = tuple((worker, "a", 2) for worker in run.members())
    found = ev.WorkersSurveyed(
        at_s=104.0, alive=alive, reservations=((1, "a"), (2, "a")), pending_reservations=()
    )
    assert "RequestReservation" not in _kinds(run(found))
    assert describe(run.state)["shared"]["limit"] == 2
    assert _kinds(run.see(106.0)) == ["RequestReservation", "RequestReservation"]


def test_what_a_run_lacks_counts_once_ray_had_time_to_place_it() -> None:
    """A run that starts asks for all at once: none of the others is to give anything for that."""
    run = Fold()
    (early, late) = (
        own_share(run.state, RULES, run="own", now_s=now_s).num_lacking for now_s in (1.0, 6.0)
    )
    assert (early, late) == (0, 4)

    run.train(1.0, {1: "a", 2: "a", 3: "b", 4: "b"})
    share = own_share(run.state, RULES, run="own", now_s=200.0)
    assert (share.num_held, share.num_lacking, share.has_begun) == (4, 0, True)
    run.see(200.0, OTHER)
    run.leave(201.0)
    share = own_share(run.state, RULES, run="own", now_s=201.0)
    assert (share.num_held, share.num_lacking) == (2, 2), "it lacks what it has given"
    run.make_step(202.0)
    run(ev.StopRequested(at_s=203.0, reason="enough"))
    run.leave(204.0)
    assert own_share(run.state, RULES, run="own", now_s=205.0).num_lacking == 0


def test_the_user_sets_how_many_workers_train() -> None:
    """As for another run: at a step boundary, nothing lost, and back when the user says so."""
    run = Fold()
    run.train(1.0, {1: "a", 2: "a", 3: "b", 4: "b"})

    (asked,) = run(ev.WorkersSet(at_s=100.0, num=2))
    assert isinstance(asked, act.YieldAttempt)
    assert own_share(run.state, RULES, run="own", now_s=100.0).num_lacking == 0
    actions = run.leave(101.0)
    (incident,) = [each for each in actions if isinstance(each, act.ReportIncident)]
    assert (incident.incident, incident.evidence) == ("resize", "the user set 2 workers")
    assert _released(actions) == [3, 4]
    run.make_step(102.0)
    assert (len(run.members()), describe(run.state)["shared"]) == (2, None)

    assert _kinds(run(ev.WorkersSet(at_s=103.0, num=4))) == ["RequestReservation"] * 2


def test_what_the_user_set_and_what_others_need_count_both() -> None:
    """The lower of the two; and what the user set holds when the other run is helped."""
    run = Fold()
    run.train(1.0, {1: "a", 2: "a", 3: "b", 4: "b"})
    run(ev.WorkersSet(at_s=100.0, num=3))
    run.leave(101.0)
    run.make_step(102.0)

    run.see(110.0, replace(OTHER, num_lacking=2))
    actions = run.leave(111.0)
    (incident,) = [each for each in actions if isinstance(each, act.ReportIncident)]
    assert (incident.incident, len(run.members())) == ("share", 1)
    run.make_step(112.0)
    wanted = run.see(120.0, replace(OTHER, num_held=3, num_lacking=0))
    assert _kinds(wanted) == ["RequestReservation"] * 2


def test_a_run_stops_behind_the_step_that_the_user_names() -> None:
    """Without it a person has to catch step 3 by hand."""
    run = Fold()
    run.train(1.0, {1: "a", 2: "a", 3: "b", 4: "b"})

    assert run(ev.StopRequested(at_s=100.0, reason="at 3", step=3)) == []
    assert run.make_step(101.0) == []
    (asked,) = run.make_step(102.0)
    assert isinstance(asked, act.YieldAttempt)
    assert (asked.durable, asked.reason, run.state.attempt.step) == (True, "at 3", 3)
    actions = run.leave(103.0)
    assert _kinds(actions)[-1] == "FinishRun"


def test_a_step_to_stop_at_ends_no_run_that_waits_or_forms() -> None:
    """It is not reached yet: a stop at the next boundary ends both at once."""
    run = Fold()
    run(ev.StopRequested(at_s=0.5, reason="at 3", step=3))
    run(
        *(ev.ReservationGranted(at_s=1.0, reservation=n, node="a") for n in range(1, 5)),
        *(ev.WorkerReady(at_s=1.0, worker=f"w000{n}", node="a", pid=n) for n in range(1, 5)),
        ev.StopRequested(at_s=1.5, reason="at 2", step=2),
    )
    run.make_step(2.0)

    assert (run.state.outcome, run.state.stop_reason) == (None, "")
    run.make_step(3.0)
    assert run.state.stop_reason == "at 2"


def test_fewer_workers_keep_as_many_nodes_as_protect_them() -> None:
    """A person who wanted two workers of four got both on one node, and no protection."""
    places = []
    for tolerance in (0, 1):
        run = Fold(replace(RULES, snapshot=SnapshotSettings(tolerance=tolerance)))
        run.train(1.0, {1: "a", 2: "a", 3: "b", 4: "b"})
        run(ev.WorkersSet(at_s=100.0, num=2))
        actions = run.leave(101.0)
        (started,) = [each for each in actions if isinstance(each, act.StartAttempt)]
        places.append([node for _, node, _ in started.members])
        run.make_step(102.0)
        run(ev.Ticked(at_s=200.0))
        assert len(run.state.fleet.reservations) == 2
        assert not run.state.attempt.yield_asked, "it stays so"

    assert places == [["a", "a"], ["a", "b"]]


def test_protection_takes_no_capacity_that_the_user_likes_less() -> None:
    """A second node of the dear kind costs more than what a loss of the cheap one would."""
    run = Fold(replace(CHOICE, snapshot=SnapshotSettings(tolerance=1)))
    run(
        ev.ReservationGranted(at_s=1.0, reservation=1, node="cheap"),
        ev.ReservationGranted(at_s=1.0, reservation=2, node="cheap"),
        ev.CapacityRefused(at_s=1.5, alternative=0, why="sold out"),
    )
    dear = [n for n, reservation in run.state.fleet.reservations.items() if reservation.alternative]
    run.train(2.0, dict.fromkeys(dear, "dear"))
    assert len(run.members()) == 4
    run(ev.WorkersSet(at_s=100.0, num=2))
    actions = run.leave(101.0)

    (started,) = [each for each in actions if isinstance(each, act.StartAttempt)]
    assert [node for _, node, _ in started.members] == ["cheap", "cheap"]


def test_a_drain_says_who_asked_for_it_and_no_id_that_fills_a_line() -> None:
    """The provider was blamed for what a person had asked for on the page."""
    node = "aeed281d" * 7
    run = Fold()
    run.train(1.0, {1: node, 2: node, 3: "b", 4: "b"})
    run(ev.NodeDraining(at_s=90.0, node=node, deadline_s=120.0, notice="drained from the page"))
    asked = run(ev.Ticked(at_s=119.0))

    (left,) = [each for each in asked if isinstance(each, act.YieldAttempt)]
    assert left.reason == "leaving node aeed281d (drained from the page)"
