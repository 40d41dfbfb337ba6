"""Decide which nodes can train together when links between some of them are lost."""

from collections import Counter

from orchestrator.core.network import links
from orchestrator.core.state import CONTROLLER, Node, Pair, Phase
from orchestrator.core.transition import Transition
from orchestrator.policies import Rooms, choose, rooms_of
from ucp_core.layout import ParallelLayout

_EPSILON = 1e-6


def offered(transition: Transition, *, leaving: bool = False) -> Rooms:
    """Return the room for workers on nodes that reach each other.

    ``leaving`` includes draining nodes, except those that the provider takes about now.
    """
    fleet = transition.run.fleet
    gone: list[Node] = []
    if transition.run.network.links:
        gone += (fleet.nodes[number] for number in left_out(transition, leaving=leaving))
    is_more = leaving and bool(fleet.leaving)
    if not gone and not is_more:
        return fleet.staying
    rooms = Counter(dict(fleet.staying))
    if is_more:
        rooms.update(dict(fleet.leaving))
        gone += due(transition).values()
    rooms.subtract(node.usable for node in gone)
    return rooms_of(rooms.elements())


def layout(transition: Transition, *, leaving: bool = False) -> ParallelLayout | None:
    """Return the layout of the workers that ``offered`` has room for; None if too few."""
    rooms = offered(transition, leaving=leaving)
    rules = transition.layout_rules
    return choose(rooms, transition.max_workers, rules, transition.rules.min_workers)


def num_together(transition: Transition, *, leaving: bool = False) -> int:
    """Return how many workers could train together; 0 if fewer than the minimum."""
    chosen = layout(transition, leaving=leaving)
    return 0 if chosen is None else chosen.world_size


def due(transition: Transition) -> dict[int, Node]:
    """Return the nodes that the provider takes about now; no worker may be there."""
    now_s, lead_s = transition.now_s, transition.rules.bounds.drain_lead_s
    taken = transition.run.fleet.nodes.where(_is_taken)
    return {number: node for number, node in taken if node.is_due(now_s, lead_s)}


def _is_taken(node: Node) -> bool:
    return node.alive and node.is_taken


def _apart(transition: Transition, *, paused: bool) -> list[Pair]:
    """Return the pairs of nodes that could both train but must not be together."""
    fleet = transition.run.fleet
    known = transition.run.network.links
    return [
        pair
        for pair in links.apart(known, transition.now_s, paused=paused)
        if all(end == CONTROLLER or fleet.nodes[fleet.node_ids[end]].usable for end in pair)
    ]


def left_out(transition: Transition, *, leaving: bool = False) -> frozenset[int]:
    """Return the nodes to exclude, so that the others reach each other.

    A link that is still in its pause is used only if the run could not train without it.
    """
    run, min_workers = transition.run, transition.rules.min_workers
    out: frozenset[int] = frozenset()
    if not run.network.links:
        return out
    too_late = due(transition)
    for paused in (True, False):
        pairs = _apart(transition, paused=paused)
        if not pairs:
            return frozenset()
        nodes = {
            node.name: node.usable
            for number, node in run.fleet.nodes.items()
            if node.usable and (leaving or not node.draining) and number not in too_late
        }
        members = {run.fleet.nodes[number].name for number, _ in run.attempt.placed}
        names = links.left_out(nodes, pairs, preferred=members)
        out = frozenset(run.fleet.node_ids[name] for name in names)
        rooms = rooms_of(room for name, room in nodes.items() if name not in names)
        if choose(rooms, transition.max_workers, transition.layout_rules, min_workers):
            break
    return out


def unreached(transition: Transition) -> tuple[str, ...]:
    """Return the nodes that some next member cannot reach, sorted."""
    run = transition.run
    pairs = links.apart(run.network.links, transition.now_s, paused=False)
    if not pairs:
        return ()
    # Choose as ``formation`` does: use draining nodes only if the run cannot train without them.
    leaving = not num_together(transition)
    out = left_out(transition, leaving=leaving)
    ids = run.fleet.node_ids
    known = {ids[end] for pair in pairs for end in pair if end in ids}
    stay = {
        node.name
        for node in map(run.fleet.nodes.__getitem__, known - out)
        if node.usable and (leaving or not node.draining)
    }
    ends = {end for pair in pairs if not stay.isdisjoint(pair) for end in pair}
    return tuple(sorted(ends - stay - {CONTROLLER}))


def patience_end_s(transition: Transition) -> float:
    """Return when a waiting run gives up on lost links, or tries the next set of nodes.

    Until then, waiting costs less than new workers on other nodes would.
    """
    period_s = transition.rules.bounds.start_s
    return transition.run.waiting_since_s + period_s * (_num_tries(transition) + 1)


def _num_tries(transition: Transition) -> int:
    waited_s = transition.now_s - transition.run.waiting_since_s
    # The small addition makes the exact end of a period count as the start of the next one.
    return int(waited_s / transition.rules.bounds.start_s + _EPSILON)


def given_up(transition: Transition) -> frozenset[int]:
    """Return the nodes to replace if too few nodes have reached each other for too long; else none.

    The run does not know where the cluster has room. So it tries the sets of nodes that reach each
    other in turn, each for as long as a worker may take to start.
    """
    run = transition.run
    num_tries = _num_tries(transition)
    lost = links.apart(run.network.links, transition.now_s, paused=False)
    pairs = [pair for pair in lost if CONTROLLER not in pair]
    is_waiting = run.phase is Phase.WAITING and pairs and num_tries
    if not is_waiting or num_together(transition, leaving=True):
        return frozenset()
    sets = links.choices(pairs)
    kept = sets[(num_tries - 1) % len(sets)]
    ends = {end for pair in pairs for end in pair}
    return frozenset(run.fleet.node_ids[name] for name in ends - kept)
