"""Events of the current attempt. Events of another attempt are stale and change nothing."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from orchestrator.core.events import (
    AttemptStalled,
    CheckpointCommitted,
    CommittedRead,
    HangFound,
    MembersAtWork,
    NotFiniteFound,
    StepCompleted,
    WorkerFormed,
    WorkerLeft,
    WorkerRaised,
)
from orchestrator.core.handlers import fleet, planned, protection, recovery
from orchestrator.core.network import search
from orchestrator.core.state import ACTIVE, Cause, MutableRunState, Phase, Worker
from orchestrator.core.transition import Transition
from orchestrator.policies import STORAGE, FaultKind, UserError

#: Weight of the newest step in the smoothed duration: about the last ten steps count.
_STEP_WEIGHT = 0.1


def worker_formed(transition: Transition, event: WorkerFormed) -> None:
    """Note that a member is ready to step; with the last one the attempt runs."""
    found = _member(transition, event.attempt, event.worker)
    if found is None:
        _gone(transition, event)
        return
    if found[1].formed:
        return
    run = transition.run
    if recovery.leave_out(transition, event.damaged):
        protection.order_keepers(transition)
    number, worker = found
    if not run.attempt.from_storage and any(kind == STORAGE for kind, _ in event.sources):
        run.attempt.from_storage = True
        run.faults_seen = run.faults_seen.and_load(run.cause.kind if run.cause else None)
    run.fleet.workers = run.fleet.workers.set(number, worker._replace(formed=True))
    run.attempt.num_unformed -= 1
    if run.attempt.num_unformed == 0 and run.phase is Phase.FORMING:
        _run(transition)


def step_completed(transition: Transition, event: StepCompleted) -> None:
    """Note a step of the history; it also proves that every member has formed."""
    run = transition.run
    attempt_is_over = run.phase not in ACTIVE and run.phase is not Phase.FENCING
    if event.attempt != run.attempt.number or attempt_is_over or event.step <= run.attempt.step:
        return
    run.attempt.step = event.step
    if event.stored > run.stored:
        # It says which version the run may not fall behind, and is read before one is loaded.
        run.stored, run.reads.stored_from = event.stored, run.reads.num + 1
        if run.phase in ACTIVE:
            fleet.end_needless_keepers(transition)
    if run.phase is Phase.FORMING:
        _run(transition)
    if not run.attempt.stepped:
        run.attempt.stepped = True
        if transition.rules.standby_per_node:
            run.fleet.short = tuple(range(len(run.fleet.node_ids)))
        run.attempt.trained_since_s = event.at_s
        if run.phase is not Phase.FENCING and run.down_since_s != inf:
            run.pause_s = event.at_s - run.down_since_s
            run.down_since_s = inf
    if run.step_s:
        run.step_s += _STEP_WEIGHT * (event.step_s - run.step_s)
    else:
        run.step_s = event.step_s


def _run(transition: Transition) -> None:
    run = transition.run
    run.phase = Phase.RUNNING
    run.deadline_s = inf
    # Half of what an unusual one took is forgotten each time.
    run.form_s = max(transition.now_s - run.attempt.started_s, run.form_s / 2)
    search.forget(transition)


def checkpoint_committed(transition: Transition, event: CheckpointCommitted) -> None:
    """Note a commit of the current attempt."""
    run = transition.run
    # Keepers store while nobody trains: a commit before the next attempt starts counts.
    is_over = run.phase in (Phase.FENCING, Phase.READING, Phase.WAITING)
    if event.attempt == run.attempt.number and (run.phase in ACTIVE or is_over):
        _know(run, event.step, in_memory=False)
        if run.phase in ACTIVE:
            fleet.end_needless_keepers(transition)


def worker_left(transition: Transition, event: WorkerLeft) -> None:
    """Note that a member left; unless it was asked to, fence the others."""
    found = _member(transition, event.attempt, event.worker)
    if found is None:
        _gone(transition, event)
        return
    run = transition.run
    number, worker = found
    _leave(transition, number, worker, event.step)
    if event.unreached:
        way = (run.fleet.nodes[worker.node].name, event.unreached)
        run.network = run.network._replace(suspects=(*run.network.suspects, way))
    if event.how == "unloadable":
        _could_not_load(transition, event)
        return
    if event.how in ("yielded", "completed"):
        # It left only after it had seen the commit.
        _know(run, event.step, in_memory=event.how == "yielded")
    if event.told:
        _was_told_to_end(transition, number, event)
    elif run.phase is Phase.FENCING:
        recovery.proceed(transition)
    elif event.how == "completed":
        planned.member_completed(transition, event.step, event.detail)
    elif event.how == "yielded" and run.phase is Phase.YIELDING:
        planned.member_yielded(transition, event.step)
    elif event.how == "yielded":
        evidence = f"{worker.name} left: it had long not heard the controller"
        recovery.fault(transition, FaultKind.CONTROLLER_RESTART, (), evidence)
        recovery.proceed(transition)
    else:
        # A collective failed. That shows that a peer is gone, not which one.
        recovery.fault(transition, FaultKind.PEER_LOST, (), f"{worker.name} left: {event.detail}")
        recovery.proceed(transition)


def _was_told_to_end(transition: Transition, number: int, event: WorkerLeft) -> None:
    """Continue without a worker that somebody else has told to end: nothing is lost."""
    fleet.kill_worker(transition, number, event.told)
    recovery.fault(transition, FaultKind.PREEMPTION, (event.worker,), event.told)
    recovery.proceed(transition)


def _gone(transition: Transition, event: WorkerFormed | WorkerLeft) -> None:
    """Take from a worker that is out of the attempt only the sources that it found bad."""
    if event.attempt == transition.run.attempt.number:
        unread = event.unread if isinstance(event, WorkerLeft) else ()
        recovery.heard_late(transition, event.damaged, unread)


def _could_not_load(transition: Transition, event: WorkerLeft) -> None:
    """Exclude the sources that the worker found bad, and fence the others."""
    why = event.detail or "another rank could not"
    evidence = f"{event.worker} could not load step {event.step}: {why}"
    recovery.leave_out(transition, event.damaged, event.unread)
    recovery.fault(transition, FaultKind.UNLOADABLE, (), evidence)
    cause = transition.run.cause
    if cause is not None and cause.kind is FaultKind.UNLOADABLE and event.detail:
        # A rank that found nothing bad may have left first.
        transition.run.cause = replace(cause, evidence=evidence)
    recovery.proceed(transition)


def worker_raised(transition: Transition, event: WorkerRaised) -> None:
    """Keep the error for the verdict, and fence the others."""
    found = _member(transition, event.attempt, event.worker)
    if found is None:
        return
    number, worker = found
    rank = transition.run.attempt.members.index(number)
    _leave(transition, number, worker, event.step - 1)
    error = UserError(rank, event.step, event.error, event.traceback)
    recovery.note_raised(transition, error)
    if error.is_of_all:
        recovery.fault(transition, FaultKind.NOT_FINITE, (), error.message)
    else:
        recovery.fault(transition, FaultKind.EXCEPTION, (worker.name,), event.error)
    recovery.proceed(transition)


def _leave(transition: Transition, number: int, worker: Worker, step: int) -> None:
    run = transition.run
    fleet.put_worker(transition, number, worker._replace(inside=False))
    step = max(step, 0)
    run.attempt.left_step = step if run.attempt.left_step < 0 else min(run.attempt.left_step, step)


def not_finite_found(transition: Transition, event: NotFiniteFound) -> None:
    """Put a number that is not finite on record; a restarted controller hears of it again."""
    attempt = transition.run.attempt
    if event.attempt == attempt.number and event.number > attempt.num_noted:
        attempt.num_noted = event.number
        found = Cause(FaultKind.NOT_FINITE, (), event.evidence, transition.now_s)
        transition.report(found, fenced_s=transition.now_s)


def hang_found(transition: Transition, event: HangFound) -> None:
    """Kill the workers that are proven guilty and fence the others; undecided blames nobody."""
    run = transition.run
    if event.attempt != run.attempt.number or run.phase not in {*ACTIVE, Phase.FENCING}:
        return
    guilty: list[str] = []
    for name in event.guilty:
        found = _member(transition, event.attempt, name)
        if found is not None:
            number, worker = found
            guilty.append(name)
            fleet.kill_worker(transition, number, f"hang: {event.evidence}")
            fleet.strike(transition, worker.node)
    if guilty or run.phase is not Phase.FENCING:
        kind = FaultKind.HANG if guilty else FaultKind.UNDECIDED
        run.attempt.is_program |= event.is_program
        recovery.fault(transition, kind, tuple(guilty), event.evidence)
        recovery.proceed(transition)


def attempt_stalled(transition: Transition, event: AttemptStalled) -> None:
    """Look at the network, which disturbs nobody."""
    run = transition.run
    if event.attempt == run.attempt.number and run.phase in (Phase.RUNNING, Phase.YIELDING):
        search.begin(transition)


def members_at_work(transition: Transition, event: MembersAtWork) -> None:
    """Note who computes and will leave late. One that did and got stuck gets no more time."""
    run = transition.run
    if run.phase is not Phase.FENCING:
        return
    found = (_member(transition, event.attempt, name) for name in event.workers)
    before, run.attempt.at_work = run.attempt.at_work, tuple(one[0] for one in found if one)
    if not set(before) <= set(run.attempt.at_work):
        run.deadline_s = min(run.deadline_s, run.attempt.leave_by_s)


def committed_read(transition: Transition, event: CommittedRead) -> None:
    """Take the answer of keepers and storage, if it is about this attempt."""
    if event.attempt == transition.run.attempt.number:
        recovery.committed_read(transition, event)


def _know(run: MutableRunState, step: int, *, in_memory: bool) -> None:
    """Note a version of the current attempt, if it is newer than the known one."""
    version = (step, run.attempt.number)
    if not in_memory:
        run.stored = max(run.stored, step)
        if version >= run.committed:
            run.reads.stored_from = run.reads.num + 1
    if version > run.committed:
        run.committed = version
        run.committed_in_memory = in_memory


def _member(transition: Transition, attempt: int, name: str) -> tuple[int, Worker] | None:
    """Return the worker if it is inside ``attempt`` and that is the current one."""
    if attempt != transition.run.attempt.number:
        return None
    found = fleet.find_worker(transition, name)
    return found if found is not None and found[1].inside else None
