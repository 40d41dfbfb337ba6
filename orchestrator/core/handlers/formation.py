"""Who trains next, as which rank, on which slot; and the start of an attempt."""

from __future__ import annotations

from math import inf

from orchestrator.core.actions import StartAttempt
from orchestrator.core.handlers import demand, fleet
from orchestrator.core.handlers.ending import finish
from orchestrator.core.state import Node, Phase, WorkerStatus
from orchestrator.core.transition import Turn
from orchestrator.policies import layout as layout_policy
from orchestrator.policies import quarantine


def capacity(turn: Turn) -> int:
    """Return how many workers an attempt would have now, 0 if fewer than the minimum.

    Draining nodes are used only where the run would stand still without them.
    """
    rules = turn.rules
    staying = min(turn.draft.num_usable, rules.max_workers)
    for offered in (staying, min(staying + turn.draft.num_leaving, rules.max_workers)):
        used = layout_policy.usable(offered, rules.layout)
        if used >= rules.min_workers:
            return used
    return 0


def wait(turn: Turn) -> None:
    """Enter WAITING, and leave it at once if the workers that are left are enough."""
    draft = turn.draft
    draft.phase = Phase.WAITING
    draft.waiting_since_s = turn.now_s
    draft.deadline_s = turn.now_s + turn.rules.bounds.capacity_s
    try_start(turn)
    if draft.phase is Phase.WAITING and draft.num_usable < turn.rules.min_workers:
        demand.forgive_nodes(turn)


def try_start(turn: Turn) -> None:
    """Start an attempt if there are workers enough; the first one waits a while for all."""
    draft = turn.draft
    used = capacity(turn)
    if used == 0 or draft.surveying_until_s != inf:
        return
    if turn.now_s < draft.hold_until_s:
        draft.deadline_s = min(draft.deadline_s, draft.hold_until_s)
        return
    if not draft.members and used < layout_policy.usable(turn.rules.max_workers, turn.rules.layout):
        draft.enough_since_s = min(draft.enough_since_s, turn.now_s)
        grace_end_s = draft.enough_since_s + turn.rules.bounds.grace_s
        if turn.now_s < grace_end_s:
            draft.deadline_s = min(draft.deadline_s, grace_end_s)
            return
    _start(turn)


def waited_too_long(turn: Turn) -> None:
    """Handle the bound of WAITING: the end of the grace, or of all patience."""
    draft = turn.draft
    try_start(turn)
    if draft.phase is not Phase.WAITING:
        return
    patience_end_s = draft.waiting_since_s + turn.rules.bounds.capacity_s
    if turn.now_s >= patience_end_s:
        finish(
            turn,
            "failed",
            f"no capacity: {draft.num_usable} of at least {turn.rules.min_workers} workers "
            f"could be had for {turn.rules.bounds.capacity_s:.0f} s",
        )
    else:
        draft.deadline_s = min(draft.deadline_s, patience_end_s)


def _start(turn: Turn) -> None:
    """Start the next attempt on the best of what is there."""
    draft = turn.draft
    candidates = _candidates(turn)
    choice = layout_policy.choose(len(candidates), turn.rules.layout)
    assert choice is not None, f"{len(candidates)} workers, {draft.num_usable} were counted usable"
    members = candidates[: len(candidates) - choice.num_idle]
    resume_step, resume_attempt = draft.known
    draft.attempt += 1
    draft.lineage = (*draft.lineage, (draft.attempt, resume_step))
    draft.layout = choice.layout
    placed = _bind(turn, members)
    draft.members = tuple(members)
    draft.num_inside = draft.num_unformed = len(members)
    draft.step = resume_step
    draft.stepped = draft.completed = draft.read_seen = draft.yield_asked = False
    draft.judged = False
    draft.known_at_start = draft.known
    draft.bad = quarantine.still_bad(draft.bad, draft.lineage)
    draft.num_bad_at_start = len(draft.bad)
    unread = (*draft.unread_before, *draft.unread)
    draft.unread_before = quarantine.still_bad(unread, draft.lineage)
    draft.unread = ()
    draft.left_step = draft.yielded_step = -1
    draft.reads_pending = 0
    draft.raised = ()
    draft.newcomer_since_s = inf
    draft.phase = Phase.FORMING
    draft.deadline_s = turn.now_s + turn.rules.bounds.form_bound_s(draft.num_stuck)
    turn.actions.append(
        StartAttempt(
            attempt=draft.attempt,
            members=placed,
            layout=choice.layout,
            resume_step=resume_step,
            resume_attempt=resume_attempt,
            lineage=draft.lineage,
            bad=draft.bad,
        )
    )


def _candidates(turn: Turn) -> list[int]:
    """Return all workers that may train, at most ``max_workers``, in rank order.

    Survivors keep their order, so that what they hold stays near; workers of a node are
    neighbours; newcomers follow the survivors of their node, new nodes come last.
    """
    draft = turn.draft
    ranks = {number: rank for rank, number in enumerate(draft.members)}
    workers = draft.workers
    order: dict[int, None] = {
        worker.node: None
        for worker in (workers.get(member) for member in draft.members)
        if worker is not None
    }
    for number, node in draft.nodes.items():
        if node.usable:
            order.setdefault(number)
    staying: list[int] = []
    leaving: list[int] = []
    for number in order:
        node = draft.nodes[number]
        if node.usable:
            (leaving if node.draining else staying).extend(_ready_on(turn, node, ranks))
    rules = turn.rules
    chosen = staying[: rules.max_workers]
    if layout_policy.usable(len(chosen), rules.layout) < rules.min_workers:
        chosen = (staying + leaving)[: rules.max_workers]
    return chosen


def _ready_on(turn: Turn, node: Node, ranks: dict[int, int]) -> list[int]:
    """Return the workers of ``node`` that may train: survivors first, one per slot."""
    workers = turn.draft.workers
    ready = [w for w in node.workers if workers[w].status is WorkerStatus.READY]
    newest_rank = len(ranks)
    ready.sort(key=lambda w: (ranks.get(w, newest_rank), w))
    return ready[: node.usable]


def _bind(turn: Turn, members: list[int]) -> tuple[tuple[str, str, int], ...]:
    """Give every member a slot on its node; return (worker, node, slot) in rank order."""
    draft = turn.draft
    chosen = set(members)
    # Who is left out gives its slot to the node's pool first.
    for number in [*draft.members, *members]:
        worker = draft.workers.get(number)
        if worker is not None and worker.slot and number not in chosen:
            draft.workers = draft.workers.set(number, worker._replace(slot=0))
            fleet.put_node(turn, worker.node, draft.nodes[worker.node])
    placed: list[tuple[str, str, int]] = []
    for number in members:
        worker = draft.workers[number]
        node = draft.nodes[worker.node]
        slot = worker.slot or fleet.free_slots(turn, node)[0]
        draft.workers = draft.workers.set(
            number, worker._replace(slot=slot, inside=True, formed=False)
        )
        placed.append((worker.name, node.name, slot))
    return tuple(placed)
