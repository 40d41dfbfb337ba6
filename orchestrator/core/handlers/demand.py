"""What to ask the world for: as many slots as the run may use, and processes on them.

``settle`` runs at the end of every event, so no other place has to remember to ask.
"""

from __future__ import annotations

from math import inf

from orchestrator.core.actions import ReleaseSlot, RequestSlot, StartWorker
from orchestrator.core.handlers import fleet
from orchestrator.core.handlers.ending import finish
from orchestrator.core.state import Phase, WorkerStatus
from orchestrator.core.transition import Turn

_TRAINING = frozenset({Phase.RUNNING, Phase.YIELDING})


def settle(turn: Turn) -> None:
    """Ask for missing slots and start missing workers, if this is the moment for it."""
    draft = turn.draft
    if draft.surveying_until_s != inf:
        return
    if draft.num_slots < turn.rules.max_workers:
        _request(turn)
    if draft.short and may_start_workers(turn):
        short, draft.short = draft.short, ()
        for number in short:
            _staff(turn, number)
        draft.short = ()


def may_start_workers(turn: Turn) -> bool:
    """Return whether starting processes now does not slow a recovery down.

    Importing torch takes seconds of a core. While enough workers are there to go on, they
    get the machine until their first step is done; replacements come after it.
    """
    return _trains(turn) or turn.draft.phase is Phase.WAITING


def _trains(turn: Turn) -> bool:
    draft = turn.draft
    return draft.stepped and draft.phase in _TRAINING


def renew_pending(turn: Turn) -> None:
    """Ask anew for every pending slot, so that it avoids what is to be avoided now."""
    avoid = avoided_nodes(turn)
    pending = [n for n, slot in turn.draft.slots.items() if slot.node < 0 and slot.avoid != avoid]
    for number in sorted(pending):
        fleet.drop_slot(turn, number)
        turn.actions.append(ReleaseSlot(slot=number))
    _request(turn)


def forgive_nodes(turn: Turn) -> None:
    """Avoid no node any more: the run needs every one of them to reach its minimum."""
    for number, node in list(turn.draft.nodes.items()):
        if node.avoid_until_s > turn.now_s:
            fleet.put_node(turn, number, node._replace(avoid_until_s=turn.now_s, strikes=()))
    renew_pending(turn)


def avoided_nodes(turn: Turn) -> tuple[str, ...]:
    """Return the names of the nodes on which nothing new is to be placed, sorted."""
    now_s = turn.now_s
    return tuple(
        sorted(
            node.name
            for node in turn.draft.nodes.values()
            if node.alive and (node.draining or node.avoid_until_s > now_s)
        )
    )


def release_slot(turn: Turn, number: int) -> None:
    """Give a slot back; ``settle`` asks for another one."""
    fleet.drop_slot(turn, number)
    turn.actions.append(ReleaseSlot(slot=number))


def release_failing_slots(turn: Turn, number: int) -> None:
    """Move the unused slots of an avoided node elsewhere, if the run can do without them.

    It also can where no process comes up: such a node may long be gone.
    """
    node = turn.draft.nodes[number]
    if node.avoid_until_s <= turn.now_s:
        return
    nothing_starts = node.num_failed_starts >= turn.rules.avoid.strikes_max
    if turn.draft.num_usable < turn.rules.min_workers and not nothing_starts:
        return
    busy = [turn.draft.workers[w].status for w in node.workers].count(WorkerStatus.READY)
    for slot in fleet.free_slots(turn, node)[: len(node.slots) - busy]:
        release_slot(turn, slot)


def _request(turn: Turn) -> None:
    avoid = avoided_nodes(turn)
    while turn.draft.num_slots < turn.rules.max_workers:
        slot = fleet.add_slot(turn, avoid)
        turn.actions.append(RequestSlot(slot=slot, avoid=avoid))


def _staff(turn: Turn, number: int) -> None:
    """Start processes that a node lacks, and end those that it has too many."""
    draft = turn.draft
    node = draft.nodes[number]
    wanted = allowed = 0
    if node.alive and node.slots and not node.draining:
        wanted = len(node.slots)
        allowed = wanted + turn.rules.standby_per_node
        if _trains(turn):
            # Standbys come last: before the first step the members need the machine.
            wanted = allowed
    live = [w for w in node.workers if draft.workers[w].status is not WorkerStatus.DYING]
    if len(live) < wanted:
        if node.retry_s > turn.now_s:
            turn.wake_by(node.retry_s)
            return
        for _ in range(wanted - len(live)):
            name = fleet.add_worker(turn, number)
            turn.actions.append(StartWorker(worker=name, node=node.name))
    elif len(live) > allowed and node.alive:
        idle = [w for w in live if not draft.workers[w].inside and not draft.workers[w].slot]
        for worker in sorted(idle, reverse=True)[: len(live) - allowed]:
            fleet.kill_worker(turn, worker, "no slot for it on its node")
    if node.draining and draft.phase is Phase.RUNNING:
        for slot in fleet.free_slots(turn, draft.nodes[number]):
            release_slot(turn, slot)


def release_surplus(turn: Turn) -> None:
    """Give pending slots back that are one too many, as when a drain was called off."""
    pending = [number for number, slot in turn.draft.slots.items() if slot.node < 0]
    num_surplus = max(turn.draft.num_slots - turn.rules.max_workers, 0)
    for number in sorted(pending, reverse=True)[:num_surplus]:
        release_slot(turn, number)


def give_up_starting(turn: Turn) -> None:
    """End the run if processes only ever die at start and none is left that lives."""
    draft = turn.draft
    live = any(worker.status is WorkerStatus.READY for worker in draft.workers.values())
    if not live and draft.phase is Phase.WAITING:
        finish(
            turn,
            "failed",
            f"{draft.num_failed_starts} worker processes in a row died at start; "
            f"the last: {draft.failed_start}",
        )


def note_failed_start(turn: Turn, number: int, detail: str) -> None:
    """Note that a process did not come up on a node; pause there, twice as long each time."""
    draft = turn.draft
    draft.num_failed_starts += 1
    draft.failed_start = detail
    if draft.num_failed_starts >= turn.rules.starts_failed_max:
        turn.wake_by(turn.now_s)
    fleet.strike(turn, number)
    node = draft.nodes[number]
    # 2^6 times one second is about as long as a broken node needs to be noticed by people.
    pause_s = turn.rules.bounds.backoff_s * 2.0 ** min(node.num_failed_starts, 6)
    fleet.put_node(
        turn,
        number,
        node._replace(num_failed_starts=node.num_failed_starts + 1, retry_s=turn.now_s + pause_s),
    )
