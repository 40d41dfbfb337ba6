"""Handlers for bounds that are reached, and for requests of the user."""

from math import inf
from typing import Final

from orchestrator.core.consequences import AttemptFailed, BoundReached, CapacityChanged
from orchestrator.core.events import (
    FaultInjected,
    SaveRequested,
    StopRequested,
    Ticked,
    WorkersSet,
)
from orchestrator.core.handlers import (
    demand,
    fleet,
    fleet_events,
    recovery,
    slow,
    survey,
)
from orchestrator.core.network import search
from orchestrator.core.state import Node, RunOutcome, Worker, WorkerStatus
from orchestrator.core.transition import Transition
from orchestrator.fault_kinds import FaultKind

#: Share of ``start_s`` after which the next late process is killed.
_SPARED_SHARE: Final = 0.25


def ticked(transition: Transition, event: Ticked) -> None:
    """Handle every bound that has been reached."""
    run = transition.run
    if run.surveying_until_s != inf:
        # Events may have been missed while no controller ran, so wait for the survey first.
        if run.surveying_until_s <= event.at_s:
            survey.ask(transition)
        return
    if run.fleet.wake_s <= event.at_s:
        _look_at_fleet(transition)
    if run.deadline_s > event.at_s:
        return
    run.deadline_s = inf
    transition.follow(BoundReached())


def _look_at_fleet(transition: Transition) -> None:
    """Handle the bounds of workers and nodes, and find the next one."""
    transition.run.fleet.wake_s = inf
    _look_at_workers(transition)
    _look_at_nodes(transition)
    if transition.run.network.links:
        search.probe_due_links(transition)
    if transition.run.fleet.num_failed_starts >= transition.rules.starts_failed_max:
        demand.give_up_starting(transition)


def _look_at_workers(transition: Transition) -> None:
    """Handle the bounds of processes; kill only one late process at a time.

    Processes are often late together, for a cause that passes.
    """
    spared_s = transition.now_s + transition.rules.bounds.start_s * _SPARED_SHARE
    has_killed = False
    for number, worker in transition.run.fleet.workers.where(_is_awaited):
        if worker.deadline_s > transition.now_s:
            transition.wake_by(worker.deadline_s)
        elif worker.status is WorkerStatus.STARTING:
            if has_killed:
                fleet.put_worker(transition, number, worker._replace(deadline_s=spared_s))
                transition.wake_by(spared_s)
                continue
            has_killed = True
            late = f"not ready after {transition.now_s - worker.begun_s:.0f} s, so it was killed"
            fleet.kill_worker(transition, number, late)
            demand.note_failed_start(transition, worker.node, late)
        elif worker.status is WorkerStatus.DYING and number not in transition.run.attempt.inside:
            recovery.give_up(transition, number)


def _is_awaited(worker: Worker) -> bool:
    return worker.deadline_s != inf


def _is_watched(node: Node) -> bool:
    has_bound = node.keeper_by_s != inf or bool(node.retry_s or node.avoid_until_s)
    return has_bound or node.is_slow


def _look_at_nodes(transition: Transition) -> None:
    run, now_s = transition.run, transition.now_s
    forgiven = False
    for number, node in run.fleet.nodes.where(_is_watched):
        if node.keeper_by_s <= now_s:
            fleet_events.give_up_node(transition, number)
            continue
        if node.keeper_by_s != inf:
            transition.wake_by(node.keeper_by_s)
        if node.retry_s and node.retry_s <= now_s:
            fleet.put_node(transition, number, node._replace(retry_s=0.0))
        elif node.retry_s:
            transition.wake_by(node.retry_s)
        if now_s < node.avoid_until_s:
            transition.wake_by(node.avoid_until_s)
        forgiven |= 0.0 < node.avoid_until_s <= now_s
        forgiven |= slow.look(transition, number)
    if forgiven:
        demand.renew_pending(transition)


def fault_injected(transition: Transition, event: FaultInjected) -> None:
    """Change nothing: an injected fault must be detected like a real one."""


def save_requested(transition: Transition, event: SaveRequested) -> None:
    """Change nothing: keepers store what is in memory while training continues."""


def workers_set(transition: Transition, event: WorkersSet) -> None:
    """Note the new limit; ``demand`` and ``planned`` act on it."""
    transition.run.most_workers = event.num
    transition.follow(CapacityChanged())


def stop_requested(transition: Transition, event: StopRequested) -> None:
    """Note the request: training stops at a step boundary, a recovery after its read."""
    run = transition.run
    if event.step > run.attempt.step:
        run.stop_at = (event.step, event.reason)
        return
    run.stop_reason = run.stop_reason or event.reason or "stopped by the user"


def stop_requested_waiting(transition: Transition, event: StopRequested) -> None:
    """Stop at once: nothing trains."""
    stop_requested(transition, event)
    if transition.run.stop_reason:
        transition.finish(RunOutcome.STOPPED, transition.run.stop_reason)


def stop_requested_forming(transition: Transition, event: StopRequested) -> None:
    """Fence the attempt: it has not trained yet, so no step can be lost."""
    if event.step > transition.run.attempt.step:
        stop_requested(transition, event)
    elif not transition.run.stop_reason:
        stop_requested(transition, event)
        transition.follow(AttemptFailed(FaultKind.STOP, (), transition.run.stop_reason))
