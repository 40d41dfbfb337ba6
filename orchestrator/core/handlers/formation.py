"""Decide which workers train next, with which ranks and reservations; start the attempt."""

from collections.abc import Iterable, Mapping
from itertools import accumulate, chain, repeat
from math import inf

from orchestrator.core.actions import StartAttempt
from orchestrator.core.consequences import (
    BoundReached,
    CapacityChanged,
    LinksDue,
    ReachChanged,
)
from orchestrator.core.handlers import demand, fleet, protection
from orchestrator.core.network import reach, search
from orchestrator.core.state import (
    Attempt,
    Node,
    Phase,
    Reads,
    RunOutcome,
    Table,
    WorkerStatus,
)
from orchestrator.core.transition import Transition
from orchestrator.policies import (
    bad_sources,
    choose,
    node_order,
    num_workers,
    other_layouts,
    spread,
)
from ucp_core.layout import ParallelLayout
from ucp_core.numerics import counted


def capacity(transition: Transition) -> int:
    """Return how many workers an attempt would have now; 0 if fewer than the minimum.

    Draining nodes count only if the run cannot train without them and they are not about to go.
    """
    for leaving in (False, True):
        if used := reach.num_together(transition, leaving=leaving):
            return used
    return 0


def wait(transition: Transition) -> None:
    """Enter WAITING; start at once if there are enough workers."""
    run = transition.run
    transition.enter(Phase.WAITING, transition.now_s + transition.rules.bounds.capacity_s)
    run.waiting_since_s = transition.now_s
    if run.network.links:
        transition.wake_by(reach.patience_end_s(transition))
    if not _try_start(transition) and run.fleet.num_usable < transition.rules.min_workers:
        demand.forgive_nodes(transition)


def capacity_changed(transition: Transition, _: CapacityChanged) -> None:
    """Start an attempt if there are enough workers."""
    _try_start(transition)


def reach_changed_waiting(transition: Transition, _: ReachChanged) -> None:
    """Start an attempt, or request other nodes, after links changed."""
    _try_start(transition)
    demand.replace_unreached(transition)


def links_due(transition: Transition, _: LinksDue) -> None:
    """Start an attempt, or request other nodes: a pause or the patience for links may be over."""
    _try_start(transition)
    demand.replace_unreached(transition)
    transition.wake_by(reach.patience_end_s(transition))


def _try_start(transition: Transition) -> bool:
    """Start an attempt if there are enough workers; return whether the run stopped waiting.

    The first attempt waits for all workers for a while, but not for replacements of lost ones.
    """
    run = transition.run
    used = capacity(transition)
    if used == 0 or run.surveying_until_s != inf:
        _wait_for_due(transition)
        return False
    if transition.now_s < run.hold_until_s:
        run.deadline_s = min(run.deadline_s, run.hold_until_s)
        return False
    if not run.attempt.members and used < _first_wanted(transition):
        run.enough_since_s = min(run.enough_since_s, transition.now_s)
        grace_end_s = run.enough_since_s + transition.rules.bounds.grace_s
        if transition.now_s < grace_end_s:
            run.deadline_s = min(run.deadline_s, grace_end_s)
            return False
    if run.attempt.members and run.network.unread != reach.unreached(transition):
        # The last read excluded other nodes: read again at once.
        transition.enter(Phase.READING, transition.now_s)
        run.reads.bad_from = run.reads.num + 1
        run.reads.seen = False
    else:
        _start(transition)
    return True


def _first_wanted(transition: Transition) -> int:
    """Return how many workers the first attempt waits for.

    Replacements for a lost node or process join later, as in any attempt.
    """
    run, num = transition.run, transition.max_workers
    if run.fleet.nodes.where(_has_lost):
        # Count ready processes, and starting ones that do not replace a failed one.
        nodes = list(run.fleet.nodes.values())
        num = sum(max(_num_live(transition, one) - len(one.strikes), one.usable) for one in nodes)
    return transition.rules.wanted(min(num, transition.max_workers), run.refused)


def _has_lost(node: Node) -> bool:
    return not node.alive or bool(node.strikes)


def _num_live(transition: Transition, node: Node) -> int:
    """Return how many processes of ``node`` train or may soon train, one per reservation."""
    statuses = [transition.run.fleet.workers[number].status for number in node.workers]
    num = sum(status is not WorkerStatus.DYING for status in statuses)
    return min(num, len(node.reservations))


def _wait_for_due(transition: Transition) -> None:
    """Set a time to check nodes that are about to be taken: they may have stayed."""
    if transition.run.fleet.leaving:
        lead_s = transition.rules.bounds.drain_lead_s
        ends = [node.leave_by_s + lead_s for node in reach.due(transition).values()]
        transition.run.deadline_s = min([transition.run.deadline_s, *ends])


def wait_bound(transition: Transition, _: BoundReached) -> None:
    """Start with fewer workers when WAITING reaches its bound, or fail for lack of capacity."""
    run = transition.run
    if _try_start(transition):
        return
    patience_end_s = run.waiting_since_s + transition.rules.bounds.capacity_s
    if transition.now_s >= patience_end_s:
        transition.finish(RunOutcome.NO_CAPACITY, f"no capacity: {_lacking(transition)}")
    else:
        run.deadline_s = min(run.deadline_s, patience_end_s)


def _lacking(transition: Transition) -> str:
    """Return as text which workers the run could not get."""
    rules = transition.rules
    together = num_workers(reach.offered(transition, leaving=True))
    usable = transition.run.fleet.num_usable
    which = " that reach each other" if together < usable else ""
    num = together if which else usable
    for_s = f"could be had for {rules.bounds.capacity_s:.0f} s"
    if num < rules.min_workers:
        return f"{num} of at least {rules.min_workers} workers{which} {for_s}"
    if transition.run.refused:
        last = transition.run.refused[-1]
        return f"{counted(num, 'worker')}{which} {for_s}, but {last.layout} was refused: {last.why}"
    return (
        f"{counted(num, 'worker')}{which} {for_s}, but not so that {rules.layout} fits their nodes"
    )


def _start(transition: Transition) -> None:
    """Start the next attempt on the best of the available workers."""
    run, rules = transition.run, transition.rules
    leaving = not reach.num_together(transition)
    rooms = reach.offered(transition, leaving=leaving)
    layout_rules = transition.layout_rules
    layout = choose(rooms, transition.max_workers, layout_rules, rules.min_workers)
    assert layout is not None, f"no layout fits {rooms}"
    had = dict(run.attempt.placed)
    chosen = _best(transition, layout, had, leaving=leaving)
    others = other_layouts(layout, rooms, transition.max_workers, layout_rules, rules.min_workers)
    resume_step, resume_attempt = run.committed
    number = run.attempt.number + 1
    unreached = reach.unreached(transition)
    placed = _bind(transition, chosen, had)
    members, on_nodes = (*chain.from_iterable(chosen.values()),), (*chosen.items(),)
    # The run may have gone back as if this attempt had resumed earlier.
    before = (one for one in run.lineage if one[0] < number)
    run.lineage = (*before, (number, resume_step))
    # A resume may leave out attempts that trained nothing, and then what they hid counts again.
    trained = [one for one in run.lineage if one[0] <= run.trained]
    run.bad = bad_sources.still_bad(run.bad, trained)
    unread = (*run.unread_before, *run.attempt.unread)
    run.unread_before = bad_sources.still_bad(unread, run.lineage)
    run.attempt = Attempt(
        number=number,
        layout=layout,
        other_layouts=others,
        members=members,
        placed=on_nodes,
        plan=protection.plan(transition, on_nodes, layout),
        inside=Table.of(zip(members, repeat(False))),
        num_inside=len(members),
        num_unformed=len(members),
        started_s=transition.now_s,
        step=resume_step,
        committed_at_start=run.committed,
        num_bad_at_start=len(run.bad),
    )
    run.reads = Reads(num=run.reads.num)
    search.restart(transition)
    transition.enter(Phase.FORMING, search.form_deadline_s(transition))
    transition.actions.append(
        StartAttempt(
            attempt=run.attempt.number,
            placed=placed,
            layout=layout,
            other_layouts=others,
            resume_step=resume_step,
            resume_attempt=resume_attempt,
            lineage=run.lineage,
            bad=run.bad,
            plan=run.attempt.plan,
            unreached=unreached,
        )
    )


def best_workers(transition: Transition, layout: ParallelLayout, *, leaving: bool) -> list[int]:
    """Return the workers that would train in ``layout``, in rank order; see ``_best``."""
    before = dict(transition.run.attempt.placed)
    return [*chain.from_iterable(_best(transition, layout, before, leaving=leaving).values())]


def _best(
    transition: Transition,
    layout: ParallelLayout,
    before: Mapping[int, tuple[int, ...]],
    *,
    leaving: bool,
) -> dict[int, tuple[int, ...]]:
    """Return the workers that would train in ``layout``, by node, all in rank order.

    Survivors keep their order, so that their state stays on their nodes. Workers of one node have
    consecutive ranks; new workers follow the survivors of their node, and new nodes come last.
    Known racks and slow links may change the order (``policies.node_order``). If there are too
    many workers, enough nodes keep one so that snapshots survive ``snapshot.tolerance`` lost nodes.

    Args:
        before: The members of the last attempt, by node.
        leaving: Whether to use nodes that are about to leave, as the last ones.
    """
    run = transition.run
    ready = _ready(transition, before, leaving=leaving)
    used = ready
    if sum(map(len, ready.values())) > layout.world_size:
        # Nodes that stay come first, then preferred capacity; ties keep order.
        nodes = run.fleet.nodes
        places = {
            number: (nodes[number].draining, fleet.alternative_of(transition, number))
            for number in ready
        }
        preferred = sorted(ready, key=places.__getitem__)
        rooms = [len(ready[number]) for number in preferred]
        last = max(at for at, num in enumerate(spread(rooms, layout)) if num)
        # For protection, add no node that the user prefers less than the last one needed.
        alike = [places[number] <= places[preferred[last]] for number in preferred]
        num_nodes = min(sum(alike), transition.rules.snapshot.tolerance + 1)
        nums = dict(zip(preferred, spread(rooms, layout, num_nodes), strict=True))
        used = {number: ready[number][: nums[number]] for number in ready if nums[number]}
    if leaving:
        return used
    return {number: used[number] for number in _in_order(transition, used)}


def _ready(
    transition: Transition, before: Mapping[int, tuple[int, ...]], *, leaving: bool
) -> dict[int, tuple[int, ...]]:
    """Return the workers that may train, by node: those of survivors first, in their order."""
    run = transition.run
    nodes = run.fleet.nodes.to_dict()
    out = reach.left_out(transition, leaving=leaving)
    out |= reach.due(transition).keys() if run.fleet.leaving else frozenset()
    ready: dict[int, tuple[int, ...]] = {}
    for number, members in before.items():
        node = nodes[number]
        stays = members == node.workers or not set(members).isdisjoint(node.workers)
        if stays and node.usable and number not in out:
            ready[number] = _ready_on(transition, node, members)
    for number, node in nodes.items():
        if node.usable and number not in ready and number not in out:
            ready[number] = _ready_on(transition, node, ())
    if run.fleet.leaving:
        late = {number: ready.pop(number) for number in [*ready] if nodes[number].draining}
        if leaving:
            ready |= late
    return ready


def _in_order(transition: Transition, used: Mapping[int, tuple[int, ...]]) -> Iterable[int]:
    """Return the nodes that workers are used on, in the best order for the network."""
    run = transition.run
    nodes, ids, size = run.fleet.nodes.to_dict(), run.fleet.node_ids, len(run.attempt.members)
    racks = {number: nodes[number].rack for number in used}
    slow = {(ids[a], ids[b]) for a, b, _ in run.network.slow if a in ids and b in ids}
    if not slow and node_order.is_by_rack(racks.values()):
        return used
    counts = {number: len(members) for number, members in run.attempt.placed}
    ends = accumulate(counts.values())
    held = {
        number: ((end - num) / size, end / size)
        for (number, num), end in zip(counts.items(), ends, strict=True)
    }
    sizes = [(number, len(workers)) for number, workers in used.items()]
    return node_order.chosen(sizes, racks=racks, slow=slow, held=held)


def _ready_on(transition: Transition, node: Node, members: tuple[int, ...]) -> tuple[int, ...]:
    """Return the workers of ``node`` that may train, survivors first, one per reservation.

    Args:
        members: The members of the last attempt there, in rank order.
    """
    if node.usable == len(node.workers) and members in ((), node.workers):
        # Nearly all nodes are like this: all workers are ready, and in order.
        return node.workers
    workers = transition.run.fleet.workers
    ready = [w for w in node.workers if workers[w].status is WorkerStatus.READY]
    # ``node.workers`` is in ascending order, which decides among newcomers.
    ready.sort(key=lambda w: members.index(w) if w in members else len(members))
    return tuple(ready[: node.usable])


def _bind(
    transition: Transition,
    chosen: Mapping[int, tuple[int, ...]],
    before: Mapping[int, tuple[int, ...]],
) -> tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]:
    """Give every member a reservation on its node; most have kept theirs.

    Return the members as ``StartAttempt.placed``.
    """
    run = transition.run
    # A worker that is left out releases its reservation to its node first.
    for on, had in before.items():
        if had != chosen.get(on):
            left = set(had).difference(chosen.get(on, ()))
            if fleet.unbind(transition, left):
                fleet.put_node(transition, on, run.fleet.nodes[on])
    # The largest runs have 80,000 members, and nothing else happens meanwhile.
    nodes, bound, new = run.fleet.nodes.to_dict(), run.fleet.bound.to_dict(), dict[int, int]()
    placed: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
    for on, workers in chosen.items():
        if None in map(bound.get, workers):
            node, unbound = nodes[on], [number for number in workers if number not in bound]
            # If no worker of the node has a reservation, all are free.
            is_new = len(unbound) == len(node.workers)
            free = node.reservations if is_new else fleet.free_reservations(transition, node)
            bound.update(zip(unbound, free, strict=False))
            new |= {number: bound[number] for number in unbound}
        placed.append((nodes[on].name, workers, (*map(bound.__getitem__, workers),)))
    run.fleet.bound = run.fleet.bound.update(new)
    return tuple(placed)
