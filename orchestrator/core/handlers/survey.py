"""After a controller restart: reconcile the state with the living workers and reservations.

The new controller does not know which of the last actions the old one performed. So it repeats
every action that may have been lost; all are idempotent. It leaves an undisturbed attempt alone.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from orchestrator.core.actions import (
    FenceAttempt,
    FinishRun,
    KillWorker,
    ReleaseReservation,
    SurveyWorkers,
)
from orchestrator.core.consequences import AttemptFailed, KeepersOutdated
from orchestrator.core.events import UNKNOWN_ATTEMPT, ControllerStarted, WorkersSurveyed
from orchestrator.core.handlers import demand, fleet, formation, planned, recovery
from orchestrator.core.state import ACTIVE, RunState, WorkerStatus, worker_name
from orchestrator.core.transition import Transition
from orchestrator.fault_kinds import FaultKind


def controller_started(transition: Transition, event: ControllerStarted) -> None:
    """Start the run, or survey the workers if an earlier controller started it."""
    run = transition.run
    run.incarnation = max(run.incarnation, event.incarnation)
    # This controller may be on another machine, and gets a new notice if that one is taken, too.
    run.store_by_s = inf
    if event.incarnation > 1:
        _expect_keepers(transition)
        ask(transition)
    elif run.deadline_s == inf:
        run.waiting_since_s = transition.now_s
        run.deadline_s = transition.now_s + transition.rules.bounds.capacity_s


def finish_again(transition: Transition, event: ControllerStarted) -> None:
    """Repeat the order to finish: the earlier controller may not have performed it."""
    run = transition.run
    run.incarnation = max(run.incarnation, event.incarnation)
    run.store_by_s = inf
    assert run.outcome is not None
    transition.actions.append(FinishRun(outcome=run.outcome, reason=run.reason))


def _expect_keepers(transition: Transition) -> None:
    """Expect a report from every keeper: one may have died while no controller ran."""
    run, bounds = transition.run, transition.rules.bounds
    by_s = transition.now_s + bounds.survey_s + bounds.keeper_return_s
    for number, node in list(run.fleet.nodes.items()):
        if node.alive and node.is_kept:
            run.fleet.nodes = run.fleet.nodes.set(number, node._replace(keeper_by_s=by_s))


def ask(transition: Transition) -> None:
    """Survey the living workers."""
    transition.run.surveying_until_s = transition.now_s + transition.rules.bounds.survey_s
    transition.actions.append(SurveyWorkers(attempt=transition.run.attempt.number))


@dataclass(frozen=True, slots=True)
class Adopted:
    """The workers that a restarted controller adopts."""

    members: tuple[str, ...]  #: Members of the attempt, in rank order, for the detector.
    #: Members that are or may be still inside, and that will report how they leave.
    inside: tuple[str, ...]


def adopted(state: RunState, alive: Iterable[tuple[str, str, int]]) -> Adopted:
    """Return the workers to adopt, given ``WorkersSurveyed.alive``.

    A worker that did not answer may be stuck in the attempt, so it counts as inside.
    """
    if state.phase not in ACTIVE:
        return Adopted((), ())
    attempts = {worker: attempt for worker, _, attempt in alive}
    inside: list[str] = []
    for number in state.attempt.members:
        worker = state.fleet.workers.get(number)
        if worker is not None and worker.name in attempts:
            attempt = attempts[worker.name]
            is_unknown = attempt == UNKNOWN_ATTEMPT and number in state.attempt.inside
            if is_unknown or attempt == state.attempt.number:
                inside.append(worker.name)
    return Adopted(tuple(map(worker_name, state.attempt.members)), tuple(inside))


def surveyed_waiting(transition: Transition, event: WorkersSurveyed) -> None:
    """Reconcile the state with the survey, and restart the wait."""
    if _reconcile(transition, event) is not None:
        formation.wait(transition)


def surveyed_forming(transition: Transition, event: WorkersSurveyed) -> None:
    """Fence the attempt: perhaps not every member got its assignment."""
    unheard = _reconcile(transition, event)
    if unheard is not None and not _fences(transition, *unheard):
        evidence = "restarted while the attempt formed"
        transition.follow(AttemptFailed(FaultKind.CONTROLLER_RESTART, (), evidence))


def surveyed_training(transition: Transition, event: WorkersSurveyed) -> None:
    """Leave an attempt alone if it trains with all its members."""
    unheard = _reconcile(transition, event)
    if unheard is not None and not _fences(transition, *unheard):
        transition.follow(KeepersOutdated())


def surveyed_yielding(transition: Transition, event: WorkersSurveyed) -> None:
    """Ask the members to leave again, unless some left or died unnoticed."""
    run = transition.run
    unheard = _reconcile(transition, event)
    if unheard is None or _fences(transition, *unheard):
        return
    if run.cause is not None and not run.attempt.completed:
        run.deadline_s = planned.yield_deadline_s(transition)
        transition.actions.append(planned.yield_order(transition))
        planned.all_left(transition)
    transition.follow(KeepersOutdated())


def surveyed_fencing(transition: Transition, event: WorkersSurveyed) -> None:
    """Fence the members again that have not left."""
    if _reconcile(transition, event) is None:
        return
    recovery.expect_leaving(transition)
    inside = recovery.members_inside(transition)
    if inside:
        number = transition.run.attempt.number
        transition.actions.append(
            FenceAttempt(attempt=number, workers=inside, reason="the controller restarted")
        )
    transition.run.reads.pending = 0
    recovery.advance(transition)


def surveyed_reading(transition: Transition, event: WorkersSurveyed) -> None:
    """Read again: the answer went to the dead controller."""
    if _reconcile(transition, event) is not None:
        run = transition.run
        run.deadline_s = transition.now_s + transition.rules.bounds.read_s
        run.reads.pending = 0
        recovery.advance(transition)


def _reconcile(
    transition: Transition, event: WorkersSurveyed
) -> tuple[list[str], list[str]] | None:
    """Reconcile the state with the survey; return None if the run did not wait for one.

    Otherwise return the members of the current attempt that died unnoticed, and those that left it
    unnoticed.
    """
    run = transition.run
    if run.surveying_until_s == inf:
        return None
    run.surveying_until_s = inf
    _reconcile_reservations(transition, event)
    unheard = _reconcile_workers(transition, event)
    for number, node in list(run.fleet.nodes.items()):
        if node.keeper_by_s != inf:
            # The keeper may have come back while no controller could note it.
            by_s = transition.now_s + transition.rules.bounds.keeper_return_s
            run.fleet.nodes = run.fleet.nodes.set(number, node._replace(keeper_by_s=by_s))
            transition.wake_by(by_s)
    # Ordered starts may have been lost, so check every node again.
    run.fleet.short = tuple(range(len(run.fleet.node_ids)))
    return unheard


def _fences(transition: Transition, dead: list[str], left: list[str]) -> bool:
    """Fence the attempt if it lost members unnoticed; return whether it did."""
    if dead:
        evidence = f"{', '.join(dead)} died while the controller was away"
        transition.follow(AttemptFailed(FaultKind.CRASH, tuple(dead), evidence))
    elif left:
        evidence = f"{', '.join(left)} left while the controller was away"
        transition.follow(AttemptFailed(FaultKind.CONTROLLER_RESTART, (), evidence))
    return bool(dead or left)


def _reconcile_reservations(transition: Transition, event: WorkersSurveyed) -> None:
    run = transition.run
    granted = dict(event.reservations)
    pending = set(event.pending_reservations)
    for number, reservation in sorted(run.fleet.reservations.items()):
        if reservation.node >= 0:
            if granted.get(number) != run.fleet.nodes[reservation.node].name:
                demand.release_reservations(transition, [number])
        elif number in granted:
            node = fleet.find_node(transition, granted[number])
            if not run.fleet.nodes[node].alive:
                fleet.revive_node(transition, node)
            fleet.place_reservation(transition, number, node)
        elif number not in pending:
            transition.actions.append(demand.request(transition, number))
    for number in sorted((*granted, *pending)):
        if number not in run.fleet.reservations:
            transition.actions.append(ReleaseReservation(reservation=number))


def _reconcile_workers(
    transition: Transition, event: WorkersSurveyed
) -> tuple[list[str], list[str]]:
    """Return the members of the current attempt that died, and those that left, unnoticed."""
    run = transition.run
    alive = {worker: attempt for worker, _, attempt in event.alive}
    dead: list[str] = []
    left: list[str] = []
    for number, worker in sorted(run.fleet.workers.items()):
        if worker.name not in alive:
            if number in run.attempt.inside:
                dead.append(worker.name)
            fleet.drop_worker(transition, number)
            # A worker that was not found may still live: kill it if the shell can reach it.
            transition.actions.append(
                KillWorker(worker=worker.name, reason="not found after the controller restarted")
            )
        elif worker.status is WorkerStatus.READY:
            # A member that never formed may yet get its assignment from the dead controller. Only
            # its answer to a fence proves that it is out.
            has_entered = run.attempt.inside.get(number) or run.attempt.stepped
            answered = alive[worker.name] != UNKNOWN_ATTEMPT
            is_out = answered and alive[worker.name] != run.attempt.number and has_entered
            if number in run.attempt.inside and is_out:
                # Perhaps it told only the dead controller why. Its answer to a fence repeats it.
                left.append(worker.name)
        else:
            # No controller ran in the meantime, so the bounds restart.
            is_dying = worker.status is WorkerStatus.DYING
            bounds = transition.rules.bounds
            deadline_s = transition.now_s + (
                bounds.kill_s if is_dying else bounds.start_bound_s(run.fleet.num_failed_starts)
            )
            renewed = worker._replace(deadline_s=deadline_s, begun_s=transition.now_s)
            fleet.put_worker(transition, number, renewed)
            transition.wake_by(deadline_s)
            if is_dying:
                transition.actions.append(
                    KillWorker(worker=worker.name, reason="killed before the controller restarted")
                )
    for name in sorted(alive):
        if fleet.find_worker(transition, name) is None:
            transition.actions.append(KillWorker(worker=name, reason="not known to the run"))
    return dead, left
