"""Events about nodes, slots and worker processes."""

from __future__ import annotations

from orchestrator.core.actions import KillWorker, ReleaseSlot
from orchestrator.core.events import (
    NodeDraining,
    NodeJoined,
    NodeLost,
    SlotGranted,
    WorkerExited,
    WorkerReady,
)
from orchestrator.core.handlers import demand, fleet, formation, recovery
from orchestrator.core.state import Phase, WorkerStatus
from orchestrator.core.transition import Turn


def node_joined(turn: Turn, event: NodeJoined) -> None:
    """Note that a node is there, perhaps again."""
    number = fleet.find_node(turn, event.node)
    node = turn.draft.nodes[number]
    if not node.alive or node.draining:
        fleet.revive_node(turn, number)
        demand.release_surplus(turn)
        # Slots that are still pending may have been asked for anywhere but here.
        demand.renew_pending(turn)


def node_lost(turn: Turn, event: NodeLost) -> None:
    """Take everything on the node for gone."""
    number = turn.draft.node_ids.get(event.node)
    if number is not None:
        lose_node(turn, number, event.cause)


def lose_node(turn: Turn, number: int, cause: str) -> None:
    """Drop the node's workers and slots; what trained there ends the attempt."""
    draft = turn.draft
    node = draft.nodes[number]
    names = [draft.workers[worker].name for worker in node.workers]
    members: list[str] = []
    for worker_number in node.workers:
        worker = draft.workers[worker_number]
        if worker.inside:
            members.append(worker.name)
        fleet.drop_worker(turn, worker_number)
        # A node that is only cut off goes on training: end what can be reached.
        turn.actions.append(KillWorker(worker=worker.name, reason=f"node lost: {cause}"))
    for slot in node.slots:
        demand.release_slot(turn, slot)
    preempted = draft.nodes[number].draining
    fleet.put_node(turn, number, draft.nodes[number]._replace(alive=False))
    recovery.memory_shrank(turn)
    kind = "preemption" if preempted else "node_loss"
    if members:
        recovery.fault(turn, kind, tuple(members), f"node {node.name[:8]}: {cause}")
    elif names:
        recovery.loss(turn, kind, f"node {node.name[:8]} with {', '.join(names)}: {cause}")
    recovery.proceed(turn)


def node_draining(turn: Turn, event: NodeDraining) -> None:
    """Note that the provider takes a node back; ``planned`` leaves it in time."""
    number = fleet.find_node(turn, event.node)
    node = turn.draft.nodes[number]
    if node.leave_by_s != event.deadline_s:
        fleet.put_node(turn, number, node._replace(leave_by_s=event.deadline_s))
        demand.renew_pending(turn)


def slot_granted(turn: Turn, event: SlotGranted) -> None:
    """Take a slot into use, or give it back if nobody wants it any more."""
    draft = turn.draft
    slot = draft.slots.get(event.slot)
    if slot is None:
        turn.actions.append(ReleaseSlot(slot=event.slot))
        return
    number = fleet.find_node(turn, event.node)
    if slot.node == number:
        return
    if slot.node >= 0 or draft.nodes[number].draining:
        # Moved by whoever places it, or on a node that is about to go: start over.
        demand.release_slot(turn, event.slot)
        return
    if not draft.nodes[number].alive:
        fleet.revive_node(turn, number)
    fleet.place_slot(turn, event.slot, number)
    if draft.phase is Phase.WAITING:
        formation.try_start(turn)


def worker_ready(turn: Turn, event: WorkerReady) -> None:
    """Note that a process can be assigned."""
    found = fleet.find_worker(turn, event.worker)
    if found is None or found[1].status is not WorkerStatus.STARTING:
        return
    draft = turn.draft
    number, worker = found
    draft.num_failed_starts = 0
    node = draft.nodes[worker.node]
    if node.num_failed_starts:
        fleet.put_node(turn, worker.node, node._replace(num_failed_starts=0))
    fleet.put_worker(turn, number, worker._replace(status=WorkerStatus.READY, pid=event.pid))
    if draft.phase is Phase.WAITING:
        formation.try_start(turn)


def worker_exited(turn: Turn, event: WorkerExited) -> None:
    """Forget a process; if it was in the attempt, the attempt cannot go on."""
    found = fleet.find_worker(turn, event.worker)
    if found is None:
        return
    draft = turn.draft
    number, worker = found
    node = draft.nodes[worker.node]
    if event.cause == "node" and node.alive:
        lose_node(turn, worker.node, event.detail)
        return
    fleet.drop_worker(turn, number)
    failed_start = worker.status is WorkerStatus.STARTING and event.cause == "crash"
    if failed_start:
        demand.note_failed_start(turn, worker.node, event.detail)
    elif worker.status is WorkerStatus.READY and event.cause == "crash":
        fleet.strike(turn, worker.node)
    demand.release_failing_slots(turn, worker.node)
    if not worker.inside:
        return
    if worker.status is not WorkerStatus.DYING:
        preempted = event.cause == "preempted" or node.draining
        kind = "preemption" if preempted else "crash"
        recovery.fault(turn, kind, (worker.name,), event.detail)
    recovery.proceed(turn)
