"""Bookkeeping of slots, workers and nodes; every count in the state is kept here.

Each function costs the size of one node, never of the fleet. What to ask for is decided in
``demand``, who trains in ``formation``.
"""

from __future__ import annotations

from math import inf

from orchestrator.core.actions import KillWorker
from orchestrator.core.state import Node, Slot, Worker, WorkerStatus, worker_name, worker_number
from orchestrator.core.transition import Turn


def find_worker(turn: Turn, name: str) -> tuple[int, Worker] | None:
    """Return number and record of a worker that is known and not known to be gone."""
    number = worker_number(name)
    worker = turn.draft.workers.get(number) if number >= 0 else None
    return None if worker is None else (number, worker)


def find_node(turn: Turn, name: str) -> int:
    """Return the number of a node, which is made known if it was not."""
    draft = turn.draft
    number = draft.node_ids.get(name)
    if number is None:
        number = len(draft.node_ids)
        draft.node_ids = {**draft.node_ids, name: number}
        draft.nodes = draft.nodes.set(number, Node(name=name))
    return number


def put_node(turn: Turn, number: int, node: Node) -> None:
    """Store ``node`` with its usable workers counted anew, and keep the fleet's counts."""
    draft = turn.draft
    before = draft.nodes[number]
    usable = 0
    if node.alive and node.slots:
        workers = draft.workers
        num_ready = [workers[w].status for w in node.workers].count(WorkerStatus.READY)
        usable = min(len(node.slots), num_ready)
    # As ``draining``, without the call: nearly every event comes here.
    if before.leave_by_s != inf:
        draft.num_leaving -= before.usable
    else:
        draft.num_usable -= before.usable
        draft.num_slots -= len(before.slots)
    if node.leave_by_s != inf:
        draft.num_leaving += usable
    else:
        draft.num_usable += usable
        draft.num_slots += len(node.slots)
    if node.usable != usable:
        node = node._replace(usable=usable)
    draft.nodes = draft.nodes.set(number, node)
    if number not in draft.short:
        draft.short = (*draft.short, number)


def put_worker(turn: Turn, number: int, worker: Worker) -> None:
    """Store a worker that exists, and keep the counts."""
    draft = turn.draft
    before = draft.workers[number]
    draft.workers = draft.workers.set(number, worker)
    if before.inside != worker.inside:
        draft.num_inside += 1 if worker.inside else -1
    if before.status is not worker.status:
        draft.num_starting += (worker.status is WorkerStatus.STARTING) - (
            before.status is WorkerStatus.STARTING
        )
        put_node(turn, worker.node, draft.nodes[worker.node])


def add_worker(turn: Turn, node_number: int) -> str:
    """Make a starting worker known on a node; return its name."""
    draft = turn.draft
    number = draft.next_worker
    draft.next_worker += 1
    name = worker_name(number)
    deadline_s = turn.now_s + turn.rules.bounds.start_bound_s(draft.num_failed_starts)
    draft.workers = draft.workers.set(
        number, Worker(name, node_number, WorkerStatus.STARTING, deadline_s)
    )
    draft.num_starting += 1
    node = draft.nodes[node_number]
    # Who only starts changes no count of its node's.
    draft.nodes = draft.nodes.set(node_number, node._replace(workers=(*node.workers, number)))
    turn.wake_by(deadline_s)
    return name


def drop_worker(turn: Turn, number: int) -> None:
    """Forget a worker that is gone."""
    draft = turn.draft
    worker = draft.workers[number]
    draft.workers = draft.workers.without(number)
    draft.num_inside -= worker.inside
    draft.num_starting -= worker.status is WorkerStatus.STARTING
    node = draft.nodes[worker.node]
    rest = tuple(w for w in node.workers if w != number)
    put_node(turn, worker.node, node._replace(workers=rest))


def kill_worker(turn: Turn, number: int, reason: str) -> None:
    """Order the end of a worker; it counts as inside its attempt until it is gone."""
    worker = turn.draft.workers[number]
    if worker.status is WorkerStatus.DYING:
        return
    deadline_s = turn.now_s + turn.rules.bounds.kill_s
    put_worker(
        turn, number, worker._replace(status=WorkerStatus.DYING, deadline_s=deadline_s, slot=0)
    )
    turn.wake_by(deadline_s)
    turn.actions.append(KillWorker(worker=worker.name, reason=reason))


def add_slot(turn: Turn, avoid: tuple[str, ...]) -> int:
    """Make a pending slot known; return its number."""
    draft = turn.draft
    number = draft.next_slot
    draft.next_slot += 1
    draft.slots = draft.slots.set(number, Slot(node=-1, avoid=avoid))
    draft.num_slots += 1
    return number


def place_slot(turn: Turn, number: int, node_number: int) -> None:
    """Note that a pending slot was granted on a node."""
    draft = turn.draft
    slot = draft.slots[number]
    assert slot.node < 0, f"slot {number} is already on node {slot.node}"
    draft.slots = draft.slots.set(number, Slot(node=node_number, avoid=slot.avoid))
    draft.num_slots -= 1
    node = draft.nodes[node_number]
    put_node(turn, node_number, node._replace(slots=tuple(sorted((*node.slots, number)))))


def drop_slot(turn: Turn, number: int) -> None:
    """Forget a slot; whoever used it uses none."""
    draft = turn.draft
    slot = draft.slots[number]
    draft.slots = draft.slots.without(number)
    if slot.node < 0:
        draft.num_slots -= 1
        return
    node = draft.nodes[slot.node]
    for worker_id in node.workers:
        worker = draft.workers[worker_id]
        if worker.slot == number:
            draft.workers = draft.workers.set(worker_id, worker._replace(slot=0))
    put_node(turn, slot.node, node._replace(slots=tuple(s for s in node.slots if s != number)))


def free_slots(turn: Turn, node: Node) -> list[int]:
    """Return the slots of a node that no worker uses, ascending."""
    used = [turn.draft.workers[w].slot for w in node.workers]
    return [slot for slot in node.slots if slot not in used]


def strike(turn: Turn, number: int) -> None:
    """Note a proven failure of a worker on a node; the node is avoided if it stands out.

    Where every node fails alike the cause is a common one, and to avoid them all would only
    leave healthy ones idle: a node is compared with the best of the others.
    """
    rules = turn.rules.avoid
    node = turn.draft.nodes[number]
    oldest_s = turn.now_s - rules.window_s
    strikes = (*(at_s for at_s in node.strikes if at_s > oldest_s), turn.now_s)
    others = [
        sum(at_s > oldest_s for at_s in other.strikes)
        for other in turn.draft.nodes.values()
        if other.alive and not other.draining and other.name != node.name
    ]
    avoid_until_s = node.avoid_until_s
    if others and len(strikes) >= min(others) + rules.strikes_max:
        avoid_until_s = turn.now_s + rules.avoid_s
        turn.wake_by(avoid_until_s)
    put_node(turn, number, node._replace(strikes=strikes, avoid_until_s=avoid_until_s))


def revive_node(turn: Turn, number: int) -> None:
    """Note that a node is in the cluster and not draining."""
    node = turn.draft.nodes[number]
    put_node(turn, number, node._replace(alive=True, leave_by_s=inf))
