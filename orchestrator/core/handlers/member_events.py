"""Events of the current attempt. Those of any other attempt are stale and change nothing."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from orchestrator.core.events import (
    CheckpointCommitted,
    CommittedRead,
    HangFound,
    StepCompleted,
    WorkerFormed,
    WorkerLeft,
    WorkerRaised,
)
from orchestrator.core.handlers import fleet, planned, recovery
from orchestrator.core.state import ACTIVE, Draft, Phase, Worker
from orchestrator.core.transition import Turn
from orchestrator.policies import UserError

#: Weight of the newest step in the smoothed duration: about the last ten steps count.
_STEP_WEIGHT = 0.1


def worker_formed(turn: Turn, event: WorkerFormed) -> None:
    """Note that a member is ready to step; with the last one the attempt runs."""
    found = _member(turn, event.attempt, event.worker)
    if found is None:
        _gone(turn, event)
        return
    if found[1].formed:
        return
    draft = turn.draft
    recovery.leave_out(turn, event.damaged)
    number, worker = found
    draft.workers = draft.workers.set(number, worker._replace(formed=True))
    draft.num_unformed -= 1
    if draft.num_unformed == 0 and draft.phase is Phase.FORMING:
        _run(turn)


def step_completed(turn: Turn, event: StepCompleted) -> None:
    """Note a step of the history; it also proves that every member has formed."""
    draft = turn.draft
    attempt_is_over = draft.phase not in ACTIVE and draft.phase is not Phase.FENCING
    if event.attempt != draft.attempt or attempt_is_over or event.step <= draft.step:
        return
    draft.step = event.step
    if draft.phase is Phase.FORMING:
        _run(turn)
    if not draft.stepped:
        draft.stepped = True
        if turn.rules.standby_per_node:
            draft.short = tuple(range(len(draft.node_ids)))
        draft.trained_since_s = event.at_s
        if draft.phase is not Phase.FENCING and draft.down_since_s != inf:
            draft.pause_s = event.at_s - draft.down_since_s
            draft.down_since_s = inf
    if draft.step_s:
        draft.step_s += _STEP_WEIGHT * (event.step_s - draft.step_s)
    else:
        draft.step_s = event.step_s


def _run(turn: Turn) -> None:
    turn.draft.phase = Phase.RUNNING
    turn.draft.deadline_s = inf


def checkpoint_committed(turn: Turn, event: CheckpointCommitted) -> None:
    """Note a commit of the current attempt."""
    draft = turn.draft
    # Keepers store on when nobody trains: what lands before the next attempt begins is not lost.
    is_over = draft.phase in (Phase.FENCING, Phase.READING, Phase.WAITING)
    if event.attempt == draft.attempt and (draft.phase in ACTIVE or is_over):
        _know(draft, event.step, in_memory=False)


def worker_left(turn: Turn, event: WorkerLeft) -> None:
    """Note that a member is out of the attempt; unless that was asked for, fence the others."""
    found = _member(turn, event.attempt, event.worker)
    if found is None:
        _gone(turn, event)
        return
    draft = turn.draft
    number, worker = found
    _leave(turn, number, worker, event.step)
    if event.how == "unloadable":
        _could_not_load(turn, event)
        return
    if event.how in ("yielded", "completed"):
        # It left only after it had seen the commit.
        _know(draft, event.step, in_memory=event.how == "yielded")
    if draft.phase is Phase.FENCING:
        recovery.proceed(turn)
    elif event.how == "completed":
        planned.member_completed(turn, event.step)
    elif event.how == "yielded" and draft.phase is Phase.YIELDING:
        planned.member_yielded(turn, event.step)
    else:
        # A collective failed under it. That says that somebody is gone, not who.
        recovery.fault(turn, "peer_lost", (), f"{worker.name} left: {event.detail}")
        recovery.proceed(turn)


def _gone(turn: Turn, event: WorkerFormed | WorkerLeft) -> None:
    """Take from somebody who is out of the attempt only what it found bad."""
    if event.attempt == turn.draft.attempt:
        unread = event.unread if isinstance(event, WorkerLeft) else ()
        recovery.heard_late(turn, event.damaged, unread)


def _could_not_load(turn: Turn, event: WorkerLeft) -> None:
    """Leave out what the worker found bad, and fence the others, who leave as well."""
    why = event.detail or "another rank could not"
    evidence = f"{event.worker} could not load step {event.step}: {why}"
    recovery.leave_out(turn, event.damaged, event.unread)
    recovery.fault(turn, "unloadable", (), evidence)
    cause = turn.draft.cause
    if cause is not None and cause.kind == "unloadable" and event.detail:
        # Who found nothing may have been the first to say that it left.
        turn.draft.cause = replace(cause, evidence=evidence)
    recovery.proceed(turn)


def worker_raised(turn: Turn, event: WorkerRaised) -> None:
    """Keep the error for the verdict, and fence the others."""
    found = _member(turn, event.attempt, event.worker)
    if found is None:
        return
    number, worker = found
    rank = turn.draft.members.index(number)
    _leave(turn, number, worker, event.step - 1)
    recovery.note_raised(turn, UserError(rank, event.step, event.error, event.traceback))
    recovery.fault(turn, "exception", (worker.name,), event.error)
    recovery.proceed(turn)


def _leave(turn: Turn, number: int, worker: Worker, step: int) -> None:
    draft = turn.draft
    fleet.put_worker(turn, number, worker._replace(inside=False))
    step = max(step, 0)
    draft.left_step = step if draft.left_step < 0 else min(draft.left_step, step)


def hang_found(turn: Turn, event: HangFound) -> None:
    """Kill who was proven guilty, and fence the others; blame nobody if it is undecided."""
    draft = turn.draft
    if event.attempt != draft.attempt or draft.phase not in {*ACTIVE, Phase.FENCING}:
        return
    guilty: list[str] = []
    for name in event.guilty:
        found = _member(turn, event.attempt, name)
        if found is not None:
            number, worker = found
            guilty.append(name)
            fleet.kill_worker(turn, number, f"hang: {event.evidence}")
            fleet.strike(turn, worker.node)
    if guilty or draft.phase is not Phase.FENCING:
        kind = "hang" if guilty else "undecided"
        recovery.fault(turn, kind, tuple(guilty), event.evidence)
        recovery.proceed(turn)


def committed_read(turn: Turn, event: CommittedRead) -> None:
    """Take what keepers and storage say, if they were asked about this attempt."""
    if event.attempt == turn.draft.attempt:
        recovery.committed_read(turn, event)


def _know(draft: Draft, step: int, *, in_memory: bool) -> None:
    """Note a version of the current attempt, if it is newer than the known one."""
    if (step, draft.attempt) > draft.known:
        draft.known = (step, draft.attempt)
        draft.known_in_memory = in_memory


def _member(turn: Turn, attempt: int, name: str) -> tuple[int, Worker] | None:
    """Return the worker if it is inside ``attempt`` and that is the current one."""
    if attempt != turn.draft.attempt:
        return None
    found = fleet.find_worker(turn, name)
    return found if found is not None and found[1].inside else None
