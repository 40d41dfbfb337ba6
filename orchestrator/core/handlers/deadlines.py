"""Bounds: what happens when something that was waited for did not come."""

from __future__ import annotations

from math import inf

from orchestrator.core.events import FaultInjected, StopRequested, Ticked
from orchestrator.core.handlers import demand, fleet, formation, recovery, survey
from orchestrator.core.handlers.ending import finish
from orchestrator.core.state import Phase, WorkerStatus
from orchestrator.core.transition import Turn


def ticked(turn: Turn, event: Ticked) -> None:
    """Compare every bound with the present."""
    draft = turn.draft
    if draft.surveying_until_s != inf:
        # What did not come may have come while nobody listened: only the survey's bound counts.
        if draft.surveying_until_s <= event.at_s:
            survey.ask(turn)
        return
    if draft.wake_s <= event.at_s:
        _look_at_fleet(turn)
    if draft.deadline_s > event.at_s:
        return
    draft.deadline_s = inf
    match draft.phase:
        case Phase.WAITING:
            formation.waited_too_long(turn)
        case Phase.FORMING | Phase.YIELDING:
            recovery.phase_bound(turn)
        case Phase.FENCING:
            recovery.fence_bound(turn)
        case Phase.READING:
            recovery.read_bound(turn)
        case _:
            # RUNNING: ``planned`` is consulted after every event and only wanted to be woken.
            pass


def _look_at_fleet(turn: Turn) -> None:
    """Handle the bounds of workers and nodes, and find the next one."""
    turn.draft.wake_s = inf
    _look_at_workers(turn)
    _look_at_nodes(turn)
    if turn.draft.num_failed_starts >= turn.rules.starts_failed_max:
        demand.give_up_starting(turn)


def _look_at_workers(turn: Turn) -> None:
    for number, worker in list(turn.draft.workers.items()):
        if worker.deadline_s > turn.now_s:
            if worker.deadline_s != inf:
                turn.wake_by(worker.deadline_s)
        elif worker.status is WorkerStatus.STARTING:
            late = f"not ready after {turn.rules.bounds.start_s:g} s or more"
            fleet.kill_worker(turn, number, late)
            demand.note_failed_start(turn, worker.node, late)
        elif worker.status is WorkerStatus.DYING and not worker.inside:
            recovery.give_up(turn, number)


def _look_at_nodes(turn: Turn) -> None:
    draft, now_s = turn.draft, turn.now_s
    forgiven = False
    for number, node in list(draft.nodes.items()):
        if node.retry_s and node.retry_s <= now_s:
            fleet.put_node(turn, number, node._replace(retry_s=0.0))
        elif node.retry_s:
            turn.wake_by(node.retry_s)
        if now_s < node.avoid_until_s:
            turn.wake_by(node.avoid_until_s)
        forgiven |= 0.0 < node.avoid_until_s <= now_s
    if forgiven:
        demand.renew_pending(turn)


def fault_injected(turn: Turn, event: FaultInjected) -> None:
    """Change nothing: whoever causes a fault must not help to find it."""


def stop_requested(turn: Turn, event: StopRequested) -> None:
    """Stop at the next step boundary, or at once where nothing is to be gained by waiting."""
    draft = turn.draft
    if draft.stop_reason:
        return
    draft.stop_reason = event.reason or "stopped by the user"
    if draft.phase is Phase.WAITING:
        finish(turn, "stopped", draft.stop_reason)
    elif draft.phase is Phase.FORMING:
        recovery.fault(turn, "stop", (), draft.stop_reason)
        recovery.proceed(turn)
