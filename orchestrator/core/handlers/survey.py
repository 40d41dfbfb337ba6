"""After a controller restart: bring what the journal says in line with what is there.

Nobody knows which of the last actions were performed. So every one that may have been lost is
given again (all are idempotent), and an attempt that trains undisturbed is left alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from orchestrator.core.actions import (
    FenceAttempt,
    FinishRun,
    KillWorker,
    ReleaseSlot,
    RequestSlot,
    SurveyWorkers,
)
from orchestrator.core.events import UNKNOWN_ATTEMPT, ControllerStarted, WorkersSurveyed
from orchestrator.core.handlers import demand, fleet, formation, planned, recovery
from orchestrator.core.state import ACTIVE, TERMINAL, Phase, RunState, WorkerStatus, worker_name
from orchestrator.core.transition import Turn


def controller_started(turn: Turn, event: ControllerStarted) -> None:
    """Begin the run, or ask what lives if it was begun by an earlier controller."""
    draft = turn.draft
    draft.life = max(draft.life, event.life)
    if draft.phase in TERMINAL:
        outcome = "failed" if draft.phase is Phase.FAILED else "completed"
        if draft.phase is Phase.FINISHED and draft.stop_reason:
            outcome = "stopped"
        turn.actions.append(FinishRun(outcome=outcome, reason=draft.reason))
    elif event.life > 1:
        ask(turn)
    elif draft.deadline_s == inf:
        draft.waiting_since_s = turn.now_s
        draft.deadline_s = turn.now_s + turn.rules.bounds.capacity_s


def ask(turn: Turn) -> None:
    """Ask what lives."""
    turn.draft.surveying_until_s = turn.now_s + turn.rules.bounds.survey_s
    turn.actions.append(SurveyWorkers(attempt=turn.draft.attempt))


@dataclass(frozen=True, slots=True)
class Adopted:
    """Whom a restarted controller goes on with.

    Attributes:
        members: Of the attempt, in rank order, which is how the detector knows them.
        inside: Those that are in it for all that is known, and so will say how they left it.
    """

    members: tuple[str, ...]
    inside: tuple[str, ...]


def adopted(state: RunState, alive: Iterable[tuple[str, str, int]]) -> Adopted:
    """Return whom to go on with.

    Args:
        state: The run, as the journal says.
        alive: What was found, as ``WorkersSurveyed.alive``. Who did not answer in time may be
            stuck in the attempt, and nobody else would ever learn of it.
    """
    if state.phase not in ACTIVE:
        return Adopted((), ())
    attempts = {worker: attempt for worker, _, attempt in alive}
    inside: list[str] = []
    for number in state.members:
        worker = state.workers.get(number)
        if worker is not None and worker.name in attempts:
            attempt = attempts[worker.name]
            is_unknown = attempt == UNKNOWN_ATTEMPT and worker.inside
            if is_unknown or attempt == state.attempt:
                inside.append(worker.name)
    return Adopted(tuple(map(worker_name, state.members)), tuple(inside))


def surveyed(turn: Turn, event: WorkersSurveyed) -> None:
    """Take the answer, and go on from there."""
    draft = turn.draft
    if draft.surveying_until_s == inf:
        return
    draft.surveying_until_s = inf
    _reconcile_slots(turn, event)
    dead, left = _reconcile_workers(turn, event)
    # Starts that were ordered may have been lost: look at every node again.
    draft.short = tuple(range(len(draft.node_ids)))
    if draft.phase in ACTIVE:
        _resume_attempt(turn, dead, left)
    elif draft.phase is Phase.FENCING:
        draft.deadline_s = turn.now_s + turn.rules.bounds.fence_s
        inside = recovery.members_inside(turn)
        if inside:
            turn.actions.append(
                FenceAttempt(
                    attempt=draft.attempt, workers=inside, reason="the controller restarted"
                )
            )
        draft.reads_pending = 0
        recovery.proceed(turn)
    elif draft.phase is Phase.READING:
        draft.deadline_s = turn.now_s + turn.rules.bounds.read_s
        draft.reads_pending = 0
        recovery.proceed(turn)
    else:
        formation.wait(turn)


def _resume_attempt(turn: Turn, dead: list[str], left: list[str]) -> None:
    """Leave an attempt alone that trains with all its members; fence any other."""
    draft = turn.draft
    if dead:
        evidence = f"{', '.join(dead)} died while the controller was away"
        recovery.fault(turn, "crash", tuple(dead), evidence)
    elif left:
        evidence = f"{', '.join(left)} left while the controller was away"
        recovery.fault(turn, "controller_restart", (), evidence)
    elif draft.phase is Phase.FORMING:
        # Whether each member was given its assignment is not known.
        recovery.fault(turn, "controller_restart", (), "restarted while the attempt formed")
    elif draft.phase is Phase.YIELDING and draft.cause is not None and not draft.completed:
        draft.deadline_s = planned.yield_deadline_s(turn)
        turn.actions.append(planned.yield_order(turn))
        planned.all_left(turn)
    recovery.proceed(turn)


def _reconcile_slots(turn: Turn, event: WorkersSurveyed) -> None:
    draft = turn.draft
    granted = dict(event.slots)
    pending = set(event.pending_slots)
    for number, slot in sorted(draft.slots.items()):
        if slot.node >= 0:
            if granted.get(number) != draft.nodes[slot.node].name:
                demand.release_slot(turn, number)
        elif number in granted:
            node = fleet.find_node(turn, granted[number])
            if not draft.nodes[node].alive:
                fleet.revive_node(turn, node)
            fleet.place_slot(turn, number, node)
        elif number not in pending:
            turn.actions.append(RequestSlot(slot=number, avoid=slot.avoid))
    for number in sorted((*granted, *pending)):
        if number not in draft.slots:
            turn.actions.append(ReleaseSlot(slot=number))


def _reconcile_workers(turn: Turn, event: WorkersSurveyed) -> tuple[list[str], list[str]]:
    """Return the members of the current attempt that died, and those that left it, unheard."""
    draft = turn.draft
    alive = {worker: attempt for worker, _, attempt in event.alive}
    dead: list[str] = []
    left: list[str] = []
    for number, worker in sorted(draft.workers.items()):
        if worker.name not in alive:
            if worker.inside:
                dead.append(worker.name)
            fleet.drop_worker(turn, number)
            # Not to be found is not to be dead: end what can be reached.
            turn.actions.append(
                KillWorker(worker=worker.name, reason="not found after the controller restarted")
            )
        elif worker.status is WorkerStatus.READY:
            # A member that never formed may yet get its assignment from the dead controller:
            # only its answer to a fence shows that it is out.
            has_entered = worker.formed or draft.stepped
            answered = alive[worker.name] != UNKNOWN_ATTEMPT
            is_out = answered and alive[worker.name] != draft.attempt and has_entered
            if worker.inside and is_out:
                left.append(worker.name)
                fleet.put_worker(turn, number, worker._replace(inside=False))
        else:
            # Nobody was there to hear of it in time: the bounds begin anew.
            is_dying = worker.status is WorkerStatus.DYING
            bounds = turn.rules.bounds
            deadline_s = turn.now_s + (
                bounds.kill_s if is_dying else bounds.start_bound_s(draft.num_failed_starts)
            )
            fleet.put_worker(turn, number, worker._replace(deadline_s=deadline_s))
            turn.wake_by(deadline_s)
            if is_dying:
                turn.actions.append(
                    KillWorker(worker=worker.name, reason="killed before the controller restarted")
                )
    for name in sorted(alive):
        if fleet.find_worker(turn, name) is None:
            turn.actions.append(KillWorker(worker=name, reason="not known to the run"))
    return dead, left
