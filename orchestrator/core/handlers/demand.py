"""Requests for slots, as many as the run may use, and for worker processes on them.

``settle`` runs after every event, so no other place has to make requests.
"""

from __future__ import annotations

from math import inf

from orchestrator.core.actions import ReleaseSlot, RequestSlot, StartWorker
from orchestrator.core.handlers import fleet, reach
from orchestrator.core.state import Phase, WorkerStatus
from orchestrator.core.transition import Transition

_TRAINING = frozenset({Phase.RUNNING, Phase.YIELDING})


def settle(transition: Transition) -> None:
    """Request missing slots and start missing workers, unless that would slow a recovery."""
    run = transition.run
    if run.surveying_until_s != inf:
        return
    if run.fleet.num_slots < transition.rules.max_workers:
        _request(transition)
    if run.fleet.short and may_start_workers(transition):
        short, run.fleet.short = run.fleet.short, ()
        for number in short:
            _staff(transition, number)
        run.fleet.short = ()


def may_start_workers(transition: Transition) -> bool:
    """Return whether starting processes now does not slow a recovery down.

    Importing torch takes seconds of a core. If enough workers are left, their first step comes
    first and replacements start after it.
    """
    return _trains(transition) or transition.run.phase is Phase.WAITING


def _trains(transition: Transition) -> bool:
    run = transition.run
    return run.attempt.stepped and run.phase in _TRAINING


def renew_pending(transition: Transition) -> None:
    """Request every pending slot again if the nodes to avoid have changed."""
    avoid = avoided_nodes(transition)
    pending = [
        n for n, slot in transition.run.fleet.slots.items() if slot.node < 0 and slot.avoid != avoid
    ]
    for number in sorted(pending):
        fleet.drop_slot(transition, number)
        transition.actions.append(ReleaseSlot(slot=number))
    _request(transition)


def forgive_nodes(transition: Transition) -> None:
    """Stop avoiding nodes: the run needs all of them to reach its minimum."""
    for number, node in list(transition.run.fleet.nodes.items()):
        if node.avoid_until_s > transition.now_s:
            fleet.put_node(
                transition, number, node._replace(avoid_until_s=transition.now_s, strikes=())
            )
    renew_pending(transition)


def avoided_nodes(transition: Transition) -> tuple[str, ...]:
    """Return the names of the nodes on which nothing new is to be placed, sorted."""
    now_s = transition.now_s
    given_up = reach.given_up(transition)
    return tuple(
        sorted(
            node.name
            for number, node in transition.run.fleet.nodes.items()
            if node.alive and (node.draining or node.avoid_until_s > now_s or number in given_up)
        )
    )


def release_slot(transition: Transition, number: int) -> None:
    """Release a slot; ``settle`` requests another."""
    fleet.drop_slot(transition, number)
    transition.actions.append(ReleaseSlot(slot=number))


def release_failing_slots(transition: Transition, number: int) -> None:
    """Release the unused slots of an avoided node, if the run can do without them.

    A node where no process starts may be gone, so its slots are released in any case.
    """
    node = transition.run.fleet.nodes[number]
    if node.avoid_until_s <= transition.now_s:
        return
    nothing_starts = node.num_failed_starts >= transition.rules.avoid.strikes_max
    if transition.run.fleet.num_usable < transition.rules.min_workers and not nothing_starts:
        return
    busy = [transition.run.fleet.workers[w].status for w in node.workers].count(WorkerStatus.READY)
    for slot in fleet.free_slots(transition, node)[: len(node.slots) - busy]:
        release_slot(transition, slot)


def _request(transition: Transition) -> None:
    avoid = avoided_nodes(transition)
    while transition.run.fleet.num_slots < transition.rules.max_workers:
        slot = fleet.add_slot(transition, avoid)
        transition.actions.append(RequestSlot(slot=slot, avoid=avoid))


def _staff(transition: Transition, number: int) -> None:
    """Start the processes that a node lacks and kill surplus ones."""
    run = transition.run
    node = run.fleet.nodes[number]
    wanted = allowed = 0
    if node.alive and node.slots and not node.draining:
        wanted = len(node.slots)
        allowed = wanted + transition.rules.standby_per_node
        if _trains(transition):
            # Standbys start last: until the first step the members need the cores.
            wanted = allowed
    live = [w for w in node.workers if run.fleet.workers[w].status is not WorkerStatus.DYING]
    if len(live) < wanted:
        if node.retry_s > transition.now_s:
            transition.wake_by(node.retry_s)
            return
        for _ in range(wanted - len(live)):
            name = fleet.add_worker(transition, number)
            transition.actions.append(StartWorker(worker=name, node=node.name))
    elif len(live) > allowed and node.alive:
        idle = [
            w for w in live if not run.fleet.workers[w].inside and not run.fleet.workers[w].slot
        ]
        for worker in sorted(idle, reverse=True)[: len(live) - allowed]:
            fleet.kill_worker(transition, worker, "no slot for it on its node")
    if node.draining and run.phase is Phase.RUNNING:
        for slot in fleet.free_slots(transition, run.fleet.nodes[number]):
            release_slot(transition, slot)


def replace_unreached(transition: Transition) -> None:
    """Request slots elsewhere for nodes that have been without a link for too long."""
    for number in sorted(reach.given_up(transition)):
        for slot in transition.run.fleet.nodes[number].slots:
            release_slot(transition, slot)
    # Also where a link is whole again: there are nodes that need not be avoided any more.
    renew_pending(transition)


def release_surplus(transition: Transition) -> None:
    """Release surplus pending slots, for example after a drain was called off."""
    pending = [number for number, slot in transition.run.fleet.slots.items() if slot.node < 0]
    num_surplus = max(transition.run.fleet.num_slots - transition.rules.max_workers, 0)
    for number in sorted(pending, reverse=True)[:num_surplus]:
        release_slot(transition, number)


def give_up_starting(transition: Transition) -> None:
    """End the run if every process died at its start and none is left."""
    run = transition.run
    live = any(worker.status is WorkerStatus.READY for worker in run.fleet.workers.values())
    if not live and run.phase is Phase.WAITING:
        transition.finish(
            "failed",
            f"{run.fleet.num_failed_starts} worker processes in a row died at start; "
            f"the last: {run.fleet.failed_start}",
        )


def note_failed_start(transition: Transition, number: int, detail: str) -> None:
    """Note a process that died at its start, and pause on its node, twice as long each time."""
    run = transition.run
    run.fleet.num_failed_starts += 1
    run.fleet.failed_start = detail
    if run.fleet.num_failed_starts >= transition.rules.starts_failed_max:
        transition.wake_by(transition.now_s)
    fleet.strike(transition, number)
    node = run.fleet.nodes[number]
    # 2^6 times one second is about as long as a broken node needs to be noticed by people.
    pause_s = transition.rules.bounds.backoff_s * 2.0 ** min(node.num_failed_starts, 6)
    fleet.put_node(
        transition,
        number,
        node._replace(
            num_failed_starts=node.num_failed_starts + 1, retry_s=transition.now_s + pause_s
        ),
    )
