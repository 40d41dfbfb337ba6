import math
from dataclasses import replace

import pytest

from orchestrator.core import Phase, RunRules, RunState, adopted, describe, next_deadline_s, step
from orchestrator.core import actions as act
from orchestrator.core import events as ev
from orchestrator.core.actions import (
    CollectEvidence,
    FinishRun,
    KillWorker,
    ReportIncident,
    StartWorker,
    YieldAttempt,
)
from orchestrator.core.events import Leaving
from orchestrator.core.handlers.survey import Adopted
from orchestrator.core.state import freeze, thaw
from tests.support.run_events import begun_on, formed_by, left_by
from workers.protocol import Source

MEMBERS = ("w0001", "w0002")
RULES = RunRules(run="test", min_workers=1, max_workers=2, total_steps=1000)


def _fold(state: RunState, *events: ev.Event, rules: RunRules = RULES) -> RunState:
    for event in events:
        state, _ = step(state, event, rules=rules)
    return state


def _ready(rules: RunRules = RULES) -> RunState:
    """Return a run that has begun its first attempt on nodes a and b."""
    return _fold(RunState(), *begun_on("ab"), rules=rules)


def _running() -> RunState:
    """Return a run whose first attempt has committed step 1."""
    return _fold(
        _ready(),
        *formed_by(MEMBERS, at_s=2.0),
        ev.StepCompleted(at_s=2.1, attempt=1, step=1, step_s=0.1),
        ev.CheckpointCommitted(at_s=2.1, attempt=1, step=1),
    )


def _kinds(actions: tuple[act.Action, ...]) -> list[type]:
    return [type(action) for action in actions]


def test_the_first_attempt_waits_for_all_until_the_grace_ends() -> None:
    """Starting with one worker and growing a second later would cost a re-formation."""
    state = _fold(RunState(), *begun_on("a"))
    assert state.phase is Phase.WAITING
    assert next_deadline_s(state) == 1.0 + RULES.bounds.grace_s

    state, actions = step(state, ev.Ticked(at_s=next_deadline_s(state)), rules=RULES)
    assert state.phase is Phase.FORMING
    assert _kinds(actions) == [act.StartAttempt]


def test_events_of_another_attempt_change_nothing() -> None:
    """S1: what a fenced attempt still says must not move the present one."""
    state = _running()
    stale: tuple[ev.Event, ...] = (
        ev.StepCompleted(at_s=3.0, attempt=7, step=99, step_s=0.1),
        ev.CheckpointCommitted(at_s=3.0, attempt=0, step=99),
        ev.WorkerLeft(at_s=3.0, attempt=0, worker="w0001", how=Leaving.FENCED, step=0, detail=""),
        ev.HangFound(at_s=3.0, attempt=7, guilty=("w0001",), evidence=""),
        ev.CommittedRead(at_s=3.0, attempt=0, step=9, committed_by=1, skipped=()),
    )
    for event in stale:
        after, actions = step(state, event, rules=RULES)
        assert after is state
        assert actions == ()


def test_a_second_fault_of_the_same_instant_is_in_the_incident_of_the_first() -> None:
    """One died and the other stopped: the second was killed for that, and no record named it."""
    state = _fold(
        _running(), ev.WorkerExited(at_s=3.0, worker="w0001", cause="crash", detail="SIGKILL")
    )
    actions: tuple[act.Action, ...] = ()
    while not any(isinstance(action, KillWorker) for action in actions):
        at_s = next_deadline_s(state)
        state, actions = step(state, ev.Ticked(at_s=at_s), rules=RULES)
    gone = ev.WorkerExited(at_s=at_s, worker="w0002", cause="killed", detail="")
    read = ev.CommittedRead(at_s=at_s, attempt=1, step=1, committed_by=1, skipped=())
    told: list[ReportIncident] = []
    for event in (gone, read, read):
        state, actions = step(state, event, rules=RULES)
        told += (one for one in actions if isinstance(one, ReportIncident))

    assert [(one.incident, one.guilty) for one in told] == [("crash", ("w0001",))]
    assert told[0].killed == ((1, "w0002", "b"),)
    assert told[0].evidence == "SIGKILL; stayed after the fence, so killed: rank 1 (w0002 on b)"


def test_a_second_fault_is_reported_once() -> None:
    """Seen: each later stop, drain or growth reported it again, and blamed its worker again."""
    rules = replace(RULES, max_workers=3)
    state, told = RunState(), list[ReportIncident]()

    def fold(*events: ev.Event) -> None:
        nonlocal state
        for event in events:
            state, actions = step(state, event, rules=rules)
            told.extend(one for one in actions if isinstance(one, ReportIncident))

    fold(*begun_on("abc"), *formed_by(("w0001", "w0002", "w0003"), at_s=2.0))
    fold(
        ev.StepCompleted(at_s=2.1, attempt=1, step=1, step_s=0.1),
        ev.WorkerExited(at_s=3.0, worker="w0001", cause="crash", detail=""),
        ev.NodeLost(at_s=3.0, node="b", cause="gone"),
        *left_by(["w0003"], at_s=3.1),
        ev.CommittedRead(at_s=3.2, attempt=1, step=1, committed_by=1, skipped=()),
        ev.Ticked(at_s=3.2 + rules.bounds.grace_s),
        *formed_by(["w0003"], at_s=60.0, attempt=2),
        ev.StepCompleted(at_s=61.0, attempt=2, step=2, step_s=0.1),
        ev.StopRequested(at_s=62.0, reason="enough"),
        *left_by(["w0003"], at_s=63.0, attempt=2, how=Leaving.YIELDED, step=2),
    )

    found = [(one.incident, one.guilty) for one in told]
    assert found == [("crash", ("w0001",)), ("node_loss", ("w0002",)), ("stop", ())]


def test_an_event_that_comes_twice_changes_nothing_the_second_time() -> None:
    """Reports are repeated until they are acknowledged, so each comes at least once."""
    state = _running()
    for event in (
        ev.WorkerExited(at_s=3.0, worker="w0001", cause="crash", detail=""),
        ev.WorkerLeft(at_s=3.1, attempt=1, worker="w0002", how=Leaving.FENCED, step=1, detail=""),
    ):
        state, _ = step(state, event, rules=RULES)
        again, actions = step(state, event, rules=RULES)
        assert again is state
        assert actions == ()


def test_a_tick_before_any_bound_is_free() -> None:
    """The shell ticks ten times a second; nothing may be journaled for that."""
    state = _running()
    after, actions = step(state, ev.Ticked(at_s=2.2), rules=RULES)

    assert after is state
    assert actions == ()


def test_evidence_of_a_hang_is_taken_before_anything_dies() -> None:
    """The kill ends the process that shows why. Survivors write their stacks before they obey."""
    hang = ev.HangFound(at_s=3.0, attempt=1, guilty=("w0001",), evidence="it sleeps")
    _, actions = step(_running(), hang, rules=RULES)

    assert _kinds(actions)[:3] == [CollectEvidence, KillWorker, act.FenceAttempt]
    assert actions[0] == CollectEvidence(attempt=1, nodes=("a", "b"), is_awaited=True)


@pytest.mark.parametrize(("maybe_well", "num_strikes"), [((), 1), (("w0001",), 0)])
def test_a_worker_that_may_be_well_costs_its_node_no_strike(
    maybe_well: tuple[str, ...], num_strikes: int
) -> None:
    """It is replaced either way, but a read that holds the interpreter accuses no machine."""
    hang = ev.HangFound(at_s=3.0, attempt=1, guilty=("w0001",), evidence="", maybe_well=maybe_well)
    state, actions = step(_running(), hang, rules=RULES)
    assert KillWorker in _kinds(actions)
    assert sum(len(node.strikes) for node in state.fleet.nodes.values()) == num_strikes


def test_a_dead_worker_fences_the_others_before_any_evidence_is_taken() -> None:
    """Survivors hold process groups with a dead peer. A crash explains itself."""
    crashed = ev.WorkerExited(at_s=3.0, worker="w0001", cause="crash", detail="SIGKILL")
    state, actions = step(_running(), crashed, rules=RULES)

    assert state.phase is Phase.FENCING
    assert actions[0] == act.FenceAttempt(attempt=1, workers=("w0002",), reason="SIGKILL")
    assert CollectEvidence(attempt=1, nodes=("a", "b"), is_awaited=False) in actions


def test_replacements_start_only_after_the_first_new_step() -> None:
    """Importing torch takes seconds of a core, and the recovery needs the cores."""
    state = _running()
    seen: list[type] = []
    for event in (
        ev.WorkerExited(at_s=3.0, worker="w0001", cause="crash", detail=""),
        ev.WorkerLeft(at_s=3.1, attempt=1, worker="w0002", how=Leaving.FENCED, step=1, detail=""),
        ev.WorkerFormed(at_s=3.4, attempt=2, worker="w0002"),
    ):
        state, actions = step(state, event, rules=RULES)
        seen += _kinds(actions)
    assert StartWorker not in seen

    stepped = ev.StepCompleted(at_s=3.5, attempt=2, step=2, step_s=0.1)
    state, actions = step(state, stepped, rules=RULES)
    assert StartWorker(worker="w0003", node="a") in actions


def test_survivors_keep_their_order_and_nodes_stay_together() -> None:
    """A rank's versions in memory stay near it, and neighbours on the mesh share a node."""
    rules = RunRules(run="t", min_workers=1, max_workers=4, total_steps=9, standby_per_node=1)
    state = _fold(
        RunState(),
        ev.ControllerStarted(at_s=0.0, incarnation=1),
        *(ev.ReservationGranted(at_s=0.0, reservation=s, node="ab"[s % 2]) for s in (1, 2, 3, 4)),
        *(ev.WorkerReady(at_s=1.0, worker=f"w{n:04d}", node="", pid=n) for n in (1, 2, 3, 4)),
        ev.StepCompleted(at_s=1.5, attempt=1, step=1, step_s=0.1),
        *(ev.WorkerReady(at_s=1.6, worker=f"w{n:04d}", node="", pid=n) for n in (5, 6)),
        rules=rules,
    )
    before = [state.fleet.workers[member] for member in state.attempt.members]
    assert [worker.node for worker in before] == [0, 0, 1, 1]

    dead = before[0].name
    left = [worker.name for worker in before[1:]]
    state = _fold(
        state,
        ev.WorkerExited(at_s=2.0, worker=dead, cause="crash", detail=""),
        *left_by(left, at_s=2.1),
        ev.CommittedRead(at_s=2.2, attempt=1, step=1, committed_by=1, skipped=()),
        rules=rules,
    )
    after = [state.fleet.workers[member] for member in state.attempt.members]
    assert [worker.node for worker in after] == [0, 0, 1, 1]
    assert [w.name for w in after if w.name in left] == left


def test_a_node_where_workers_keep_failing_is_avoided() -> None:
    """Three proven failures in the window: the next reservation is asked for elsewhere."""
    state = _running()
    actions: tuple[act.Action, ...] = ()
    for number, at_s in ((1, 3.0), (3, 4.0), (4, 5.0)):
        name = f"w{number:04d}"
        attempt = state.attempt.number
        ready = ev.WorkerReady(at_s=at_s, worker=name, node="a", pid=1)
        state = _fold(state, ready)
        crashed = ev.WorkerExited(at_s=at_s, worker=name, cause="crash", detail="")
        state, actions = step(state, crashed, rules=RULES)
        if state.phase is Phase.FENCING:
            left = ev.WorkerLeft(
                at_s=at_s, attempt=attempt, worker="w0002", how=Leaving.FENCED, step=1, detail=""
            )
            formed = ev.WorkerFormed(at_s=at_s, attempt=attempt + 1, worker="w0002")
            stepped = ev.StepCompleted(at_s=at_s, attempt=attempt + 1, step=2, step_s=0.1)
            state = _fold(state, left, formed, stepped)
    assert act.RequestReservation(reservation=3, avoid=("a",)) in actions


def test_a_node_that_fails_on_trial_is_avoided_for_twice_as_long() -> None:
    """Else a broken server ends an attempt every few minutes for as long as it is broken."""
    rules = RunRules(run="t", min_workers=1, max_workers=2, total_steps=9, standby_per_node=1)
    state = _fold(
        _ready(rules),
        ev.StepCompleted(at_s=2.0, attempt=1, step=1, step_s=0.1),
        ev.WorkerReady(at_s=3.0, worker="w0004", node="b", pid=14),
        rules=rules,
    )

    def fail(state: RunState, at_s: float) -> tuple[RunState, float]:
        spare = next(
            w.name
            for n, w in state.fleet.workers.items()
            if w.node == 0 and n not in state.attempt.members
        )
        state = _fold(
            state,
            ev.WorkerReady(at_s=at_s, worker=spare, node="a", pid=1),
            ev.WorkerExited(at_s=at_s, worker=spare, cause="crash", detail=""),
            ev.Ticked(at_s=at_s),
            rules=rules,
        )
        return state, state.fleet.nodes[0].avoid_until_s - at_s

    lengths = []
    # The third, the first two on trial, and those after a trial that went well.
    for at_s in (10.0, 20.0, 30.0, 640.0, 1850.0, 7000.0, 7010.0, 7020.0):
        state, length = fail(state, at_s)
        lengths.append(max(length, 0.0))

    assert lengths == [0.0, 0.0, 600.0, 1200.0, 2400.0, 0.0, 0.0, 600.0]


def test_nodes_that_fail_alike_are_not_avoided() -> None:
    """A run whose workers die everywhere would be left without any place to put new ones."""
    rules = RunRules(run="t", min_workers=1, max_workers=2, total_steps=9, standby_per_node=1)
    state = _fold(
        _ready(rules), ev.StepCompleted(at_s=2.0, attempt=1, step=1, step_s=0.1), rules=rules
    )
    for number in range(12):
        at_s, node = 3.0 + 20 * number, number % 2
        spare = next(
            (
                w.name
                for n, w in state.fleet.workers.items()
                if w.node == node and n not in state.attempt.members
            ),
            None,
        )
        assert spare is not None, f"node {node} gets no new worker after {number} failures"
        state = _fold(
            state,
            ev.WorkerReady(at_s=at_s, worker=spare, node="ab"[node], pid=1),
            ev.WorkerExited(at_s=at_s, worker=spare, cause="crash", detail=""),
            ev.Ticked(at_s=at_s + 10),
            rules=rules,
        )
    assert all(node.avoid_until_s == 0.0 for node in state.fleet.nodes.values())


def test_a_hint_never_avoids_a_node() -> None:
    """S5: lost peers, however often, are no proof against the node that reports them."""
    state = _running()
    for attempt in range(1, 8):
        at_s = 3.0 + attempt
        state = _fold(
            state,
            *left_by(MEMBERS, at_s=at_s, attempt=attempt, how=Leaving.PEER_LOST, step=attempt),
            ev.LinksProbed(at_s=at_s, number=attempt, heard=("a", "b")),
            ev.CommittedRead(
                at_s=at_s, attempt=attempt, step=attempt, committed_by=attempt, skipped=()
            ),
            ev.StepCompleted(at_s=at_s, attempt=attempt + 1, step=attempt + 1, step_s=0.1),
        )
    assert state.attempt.number == 8
    assert all(not node.strikes for node in state.fleet.nodes.values())
    assert len(state.attempt.members) == 2


def test_members_whose_lease_ran_out_are_taken_back_without_blame() -> None:
    """The controller had been cut off from all of them; they stopped, and it hears them again."""
    left = left_by(MEMBERS, at_s=60.0, how=Leaving.YIELDED, step=7)
    state = _fold(_running(), *left)
    assert (state.phase, state.cause and state.cause.kind) == (Phase.READING, "controller_restart")
    state = _fold(
        state,
        ev.CommittedRead(at_s=60.1, attempt=1, step=7, committed_by=1, skipped=()),
        ev.StepCompleted(at_s=61.0, attempt=2, step=8, step_s=0.1),
    )
    assert (state.phase, len(state.attempt.members), state.faults) == (Phase.TRAINING, 2, ())


def test_a_stop_while_waiting_ends_the_run_at_once() -> None:
    """There is no step boundary to wait for."""
    waiting = _fold(RunState(), ev.ControllerStarted(at_s=0.0, incarnation=1))
    state, _ = step(waiting, ev.StopRequested(at_s=1.0, reason=""), rules=RULES)

    assert state.phase is Phase.FINISHED


BOTH = RunRules(run="test", min_workers=2, max_workers=2, total_steps=1000)


def _taken_below_the_minimum() -> tuple[RunState, tuple[act.Action, ...]]:
    """Return a run of two at the end of the notice of node b, for 37 s, and what it does."""
    state = _fold(
        _ready(BOTH),
        *formed_by(MEMBERS, at_s=2.0),
        ev.StepCompleted(at_s=2.1, attempt=1, step=1, step_s=0.1),
        rules=BOTH,
    )
    drain = ev.NodeDraining(at_s=3.0, node="b", deadline_s=40.0)
    state, actions = step(state, drain, rules=BOTH)
    assert state.phase is Phase.TRAINING, "there is nowhere to go, and time to train"
    assert YieldAttempt not in _kinds(actions)
    assert act.RequestReservation(reservation=3, avoid=("b",)) in actions
    assert next_deadline_s(state) == 40.0 - BOTH.bounds.drain_lead_s
    return step(state, ev.Ticked(at_s=next_deadline_s(state)), rules=BOTH)


def _waiting_below_the_minimum() -> RunState:
    state, _ = _taken_below_the_minimum()
    left = left_by(MEMBERS, at_s=31.0, how=Leaving.YIELDED, step=900)
    state = _fold(state, *left, rules=BOTH)
    assert (state.phase, state.committed, state.attempt.number) == (Phase.WAITING, (900, 1), 1)
    return state


def test_where_the_rest_is_too_small_a_notice_ends_in_storage() -> None:
    """One of two nodes goes: its memory goes with it, and the other cannot train alone."""
    state, actions = _taken_below_the_minimum()
    assert state.phase is Phase.YIELDING
    (order,) = actions
    assert isinstance(order, YieldAttempt)
    assert order.durable

    state = _fold(
        _waiting_below_the_minimum(),
        ev.NodeLost(at_s=40.0, node="b", cause="taken"),
        ev.ReservationGranted(at_s=55.0, reservation=3, node="c"),
        ev.WorkerReady(at_s=58.0, worker="w0003", node="c", pid=13),
        rules=BOTH,
    )
    assert (state.phase, state.attempt.number, state.attempt.step) == (Phase.FORMING, 2, 900)


def test_a_worker_that_was_not_taken_in_time_trains_on() -> None:
    """A drained node stays until somebody ends it; the run must not wait for that for ever."""
    waiting = _waiting_below_the_minimum()
    assert next_deadline_s(waiting) == 40.0 + BOTH.bounds.drain_lead_s
    state = _fold(waiting, ev.Ticked(at_s=next_deadline_s(waiting)), rules=BOTH)
    assert (state.phase, state.attempt.number) == (Phase.FORMING, 2)
    state = _fold(
        state,
        *formed_by(MEMBERS, at_s=51.0, attempt=2),
        ev.StepCompleted(at_s=51.1, attempt=2, step=901, step_s=0.1),
        ev.StepCompleted(at_s=500.0, attempt=2, step=999, step_s=0.1),
        rules=BOTH,
    )
    assert state.phase is Phase.TRAINING


def test_a_notice_that_is_withdrawn_ends_the_wait() -> None:
    """Providers change their minds, and there is no other sign of it."""
    withdrawn = ev.NodeDraining(at_s=32.0, node="b", deadline_s=math.inf)
    state = _fold(_waiting_below_the_minimum(), withdrawn, rules=BOTH)
    assert (state.phase, state.attempt.number) == (Phase.FORMING, 2)


def test_before_the_controllers_machine_goes_the_state_is_in_storage_once() -> None:
    """The head may go with it, and the whole cluster with all its memory a minute later."""
    draining = ev.ControllerDraining(at_s=3.0, deadline_s=40.0)
    state = _fold(_running(), draining)
    assert state.phase is Phase.TRAINING
    state, (order,) = step(state, ev.Ticked(at_s=30.0), rules=RULES)
    assert isinstance(order, YieldAttempt)
    assert order.durable
    left = left_by(MEMBERS, at_s=31.0, how=Leaving.YIELDED, step=9)
    state = _fold(state, *left)
    assert (state.phase, state.attempt.number, state.attempt.step) == (Phase.FORMING, 2, 9)
    state = _fold(
        state,
        *formed_by(MEMBERS, at_s=31.5, attempt=2),
        ev.StepCompleted(at_s=32.0, attempt=2, step=10, step_s=0.1),
    )
    assert state.phase is Phase.TRAINING


def test_nothing_is_stored_for_a_controller_that_stays() -> None:
    """Its notice was withdrawn, or another machine has it by now."""
    draining = ev.ControllerDraining(at_s=3.0, deadline_s=40.0)
    for stays in (
        ev.ControllerDraining(at_s=4.0, deadline_s=math.inf),
        ev.ControllerStarted(at_s=4.0, incarnation=2),
    ):
        state, actions = step(_fold(_running(), draining, stays), ev.Ticked(at_s=35.0), rules=RULES)
        assert state.phase is Phase.TRAINING
        assert YieldAttempt not in _kinds(actions)


def test_a_start_that_took_too_long_gets_more_time_the_next_time() -> None:
    """On a slow file system torch takes minutes to import: killed each time it never would."""
    state = _fold(
        RunState(),
        ev.ControllerStarted(at_s=0.0, incarnation=1),
        ev.ReservationGranted(at_s=0.0, reservation=1, node="a"),
        ev.Ticked(at_s=RULES.bounds.start_s),
        ev.WorkerExited(at_s=RULES.bounds.start_s, worker="w0001", cause="killed", detail=""),
        ev.Ticked(at_s=RULES.bounds.start_s + RULES.bounds.backoff_s),
    )
    (second,) = state.fleet.workers.values()

    begun_s = RULES.bounds.start_s + RULES.bounds.backoff_s
    assert second.name == "w0002"
    assert second.deadline_s == begun_s + 2 * RULES.bounds.start_s


def test_an_attempt_that_did_not_form_in_time_gets_more_time_the_next_time() -> None:
    """The state may simply be that large."""
    state = _ready()
    bound_s = state.deadline_s
    actions: tuple[act.Action, ...] = ()
    while act.FenceAttempt not in _kinds(actions):
        # Until then only the network is looked at.
        bound_s = state.deadline_s
        state, actions = step(state, ev.Ticked(at_s=bound_s), rules=RULES)
        number = state.network.num_probes
        state = _fold(state, ev.LinksProbed(at_s=bound_s, number=number, heard=("a", "b")))
    assert bound_s == 1.0 + RULES.bounds.form_s
    state = _fold(
        state,
        *left_by(MEMBERS, at_s=bound_s, step=0),
    )
    nothing = replace(_read(bound_s, state), step=0, committed_by=0, source="")
    state = _fold(state, nothing)

    assert (state.phase, state.attempt.number) == (Phase.FORMING, 2)
    begun_s = bound_s
    while state.phase is Phase.FORMING:
        bound_s = state.deadline_s
        state = _fold(state, ev.Ticked(at_s=bound_s))
    assert bound_s - begun_s == 2 * RULES.bounds.form_s


def test_a_start_that_fails_for_ever_ends_the_run_with_the_last_words() -> None:
    """An import error in the worker process would otherwise be retried until the end of time."""
    rules = RunRules(run="t", min_workers=1, max_workers=1, total_steps=9, starts_failed_max=3)
    state = _fold(
        RunState(),
        ev.ControllerStarted(at_s=0.0, incarnation=1),
        ev.ReservationGranted(at_s=0.0, reservation=1, node="a"),
        rules=rules,
    )
    at_s, waits_for = 0.0, []
    for _ in range(20):
        if state.phase is Phase.FAILED:
            break
        name = f"w{state.fleet.next_worker - 1:04d}"
        died = ev.WorkerExited(at_s=at_s, worker=name, cause="crash", detail="no module torch")
        granted = ev.ReservationGranted(
            at_s=at_s, reservation=state.fleet.next_reservation - 1, node="a"
        )
        at_s += 100.0
        state = _fold(state, died, ev.Ticked(at_s=at_s), granted, rules=rules)
        waits_for.append(describe(state)["waits_for"])
    assert any("2 in a row did not start, the last: no module torch" in w for w in waits_for)
    assert state.phase is Phase.FAILED
    assert "no module torch" in state.reason


def _starting(num: int) -> RunState:
    """Return a run whose processes begin to start at 0 s, and must be ready after 60 s."""
    rules = replace(RULES, max_workers=num)
    grants = (ev.ReservationGranted(at_s=0.0, reservation=n + 1, node="a") for n in range(num))
    return _fold(RunState(), ev.ControllerStarted(at_s=0.0, incarnation=1), *grants, rules=rules)


def _killed(state: RunState, at_s: float) -> tuple[RunState, list[tuple[str, str]]]:
    state, actions = step(state, ev.Ticked(at_s=at_s), rules=RULES)
    kills = (one for one in actions if isinstance(one, KillWorker))
    return state, [(one.worker, one.reason) for one in kills]


def test_a_process_that_loads_modules_gets_up_to_ten_times_the_bound() -> None:
    """Eight workers that each needed 61 s to import were killed at 60 s, and began again."""
    state = _starting(1)
    for at_s in range(50, 610, 50):
        state = _fold(state, ev.StartsAdvanced(at_s=float(at_s), workers=("w0001", "w0009")))
        state, killed = _killed(state, at_s + 9.0)
        assert killed == ([] if at_s < 600 else [("w0001", killed[0][1])]), at_s
    assert killed[0][1] == "not ready after 609 s, so it was killed"


def test_one_of_several_late_processes_is_killed_at_a_time() -> None:
    """The machine makes all of them late: all would be late again."""
    state = _starting(3)
    assert _killed(state, 59.0)[1] == []
    state, first = _killed(state, 60.0)
    state, none = _killed(state, 74.0)
    state, second = _killed(state, 75.0)
    state = _fold(state, ev.WorkerReady(at_s=80.0, worker="w0003", node="a", pid=3))
    _, ready = _killed(state, 100.0)

    assert first == [("w0001", "not ready after 60 s, so it was killed")]
    assert [name for name, _ in (*none, *second, *ready)] == ["w0002"]


@pytest.mark.parametrize("order", [MEMBERS, ("w0002", "w0001")])
def test_a_worker_that_was_told_to_end_is_replaced_and_nothing_is_lost(
    order: tuple[str, str],
) -> None:
    """It is ready to be put to work again, and would die in the middle of the next attempt."""
    state = _running()
    told = {"w0001": "process 7 got SIGTERM", "w0002": ""}
    actions: list[act.Action] = []
    for worker in order:
        left = ev.WorkerLeft(
            at_s=31.0, attempt=1, worker=worker, how=Leaving.YIELDED, step=9, detail="",
            told=told[worker],
        )  # fmt: skip
        state, more = step(state, left, rules=RULES)
        actions += more

    assert state.cause is not None
    assert (state.cause.kind, state.cause.guilty) == ("preemption", ("w0001",))
    assert state.cause.evidence == "process 7 got SIGTERM"
    assert [a.worker for a in actions if isinstance(a, KillWorker)] == ["w0001"]
    assert state.committed == (9, 1)


def test_a_process_that_died_for_want_of_memory_is_an_incident_of_its_own_kind() -> None:
    """The remedy differs from that for a crash."""
    died = ev.WorkerExited(at_s=31.0, worker="w0001", cause="out_of_memory", detail="4 GiB")
    state, _ = step(_running(), died, rules=RULES)

    assert state.cause is not None
    assert (state.cause.kind, state.cause.guilty) == ("out_of_memory", ("w0001",))


def test_a_run_without_machines_ends_with_an_outcome_of_its_own() -> None:
    """A supervisor waits for machines and starts it again; a run that failed is for its author."""
    begun = _fold(RunState(), ev.ControllerStarted(at_s=0.0, incarnation=1))
    over, actions = step(begun, ev.Ticked(at_s=RULES.bounds.capacity_s), rules=RULES)
    again, repeated = step(over, ev.ControllerStarted(at_s=1e6, incarnation=2), rules=RULES)

    assert over.phase is again.phase is Phase.FAILED
    (finished,) = [action for action in actions if isinstance(action, FinishRun)]
    assert finished.outcome == "no_capacity"
    assert repeated == (finished,)


def test_a_completed_run_is_described_with_its_last_step() -> None:
    """Steps are reported about once a second, so a worker leaves with the last unreported."""
    state = _fold(
        _running(),
        *left_by(MEMBERS, at_s=3.0, how=Leaving.COMPLETED, step=1000),
    )

    assert state.phase is Phase.FINISHED
    assert describe(state)["step"] == describe(state)["committed_step"] == 1000


def test_description_has_what_status_promises() -> None:
    """Other programs read these names; a rename must fail here first."""
    document = describe(_running())

    assert document["phase"] == "training"
    assert document["attempt"] == 1
    assert document["step"] == 1
    assert document["committed_step"] == 1
    assert document["layout"] == "dp_shard=2"
    assert document["members"] == [
        {"rank": 0, "worker": "w0001", "node": "a", "pid": 1, "state": "training"},
        {"rank": 1, "worker": "w0002", "node": "b", "pid": 2, "state": "training"},
    ]
    assert document["standbys"] == []
    assert document["nodes"][0] == {"node": "a", "state": "alive", "reservations": [1]}
    assert document["pending_reservations"] == []
    assert document["cause"] is None


def _unloadable(at_s: float, attempt: int, source: Source | None = None) -> list[ev.Event]:
    """Return how both members leave an attempt of which one could not load."""
    return [
        ev.WorkerLeft(
            at_s=at_s,
            attempt=attempt,
            worker=worker,
            how=Leaving.UNLOADABLE,
            step=attempt,
            detail="",
            damaged=(source,) if source is not None and worker == "w0002" else (),
        )
        for worker in MEMBERS
    ]


def _read(at_s: float, state: RunState) -> ev.CommittedRead:
    return ev.CommittedRead(
        at_s=at_s,
        attempt=state.attempt.number,
        step=1,
        committed_by=1,
        skipped=(),
        number=state.reads.num,
        source="memory",
    )


def test_attempts_that_find_something_bad_cost_no_budget_and_no_time() -> None:
    """There may be dozens of bad sources, and the twelfth attempt without progress ends a run."""
    state = _fold(
        _running(),
        *left_by(MEMBERS, at_s=3.0, how=Leaving.PEER_LOST),
        ev.LinksProbed(at_s=3.0, number=1, heard=("a", "b")),
    )
    for number in range(40):
        state = _fold(state, _read(3.0, state))
        assert state.phase is Phase.FORMING, state.reason
        source = (1, 1, "a", "w0001.1", 0, 2 * number)
        state = _fold(state, *_unloadable(3.0, state.attempt.number, source))

    assert state.phase is Phase.READING
    assert len(state.bad) == 40
    assert not state.faults


def test_attempts_that_cannot_load_and_find_nothing_end_the_run() -> None:
    """Otherwise they would go on for ever."""
    state = _running()
    at_s = 3.0
    while state.phase is not Phase.FAILED:
        events = _unloadable(at_s, state.attempt.number) if state.attempt.num_inside else []
        state = _fold(state, *events)
        if state.phase is Phase.READING:
            state = _fold(state, _read(at_s, state))
        at_s += 20.0
        state = _fold(state, ev.Ticked(at_s=at_s))
        assert state.attempt.number < 20

    assert "without a new committed step" in state.reason


def test_a_recovery_waits_for_storage_as_long_as_for_workers() -> None:
    """After 200 s of silence the run was over, with all its nodes in good health."""
    state = _fold(_running(), ev.WorkerExited(at_s=3.0, worker="w0001", cause="crash", detail=""))
    left = ev.WorkerLeft(at_s=3.1, attempt=1, worker="w0002", how=Leaving.FENCED, step=1, detail="")
    state = _fold(state, left)
    while next_deadline_s(state) < RULES.bounds.capacity_s / 2:
        state = _fold(state, ev.Ticked(at_s=next_deadline_s(state)))
    assert state.phase is Phase.READING
    assert "storage does not answer" in describe(state)["waits_for"]

    answered = _fold(state, _read(RULES.bounds.capacity_s / 2, state))
    assert answered.phase is not Phase.READING
    assert not describe(answered)["waits_for"]

    over = state
    while over.phase is Phase.READING:
        over = _fold(over, ev.Ticked(at_s=next_deadline_s(over)))
    assert over.phase is Phase.FAILED
    assert "storage has not answered" in over.reason


def _in_other_order() -> RunState:
    """Return ``_running`` with rank 0 in the younger worker, as after a replacement."""
    run = thaw(_running())
    run.attempt.members, run.attempt.placed = run.attempt.members[::-1], run.attempt.placed[::-1]
    return freeze(run)


def test_a_member_that_does_not_answer_a_restarted_controller_is_still_watched() -> None:
    """It may be stuck inside, or late: otherwise its hang or end would not be learned.

    Members are known by rank: watched by name, one rank is blamed for what another does.
    """
    silent = [("w0001", "a", ev.UNKNOWN_ATTEMPT), ("w0002", "b", 1)]
    left = [("w0001", "a", 0), ("w0002", "b", 1)]

    both = ("w0002", "w0001")
    assert adopted(_in_other_order(), silent) == Adopted(members=both, inside=both)
    assert adopted(_in_other_order(), left) == Adopted(members=both, inside=("w0002",))
    assert adopted(RunState(), silent) == Adopted(members=(), inside=())
