"""Choose the order of an attempt's nodes, in which their ranks are numbered. Pure.

Collectives send around the ring of ranks. The all-gather of NCCL and gloo sends to the next rank,
gloo's all-reduce to the previous one, and trees use both directions. So a slow link between
neighbours counts in either direction. A ring that enters each rack once crosses between racks as
rarely as possible, and each crossing shares the racks' uplink. (C4, arXiv 2406.04594, section 4,
plans paths; above a transport only the order can be chosen.)

In order of priority, it minimises slow links between neighbours, crossings, and the state that
ranks would load from other nodes. With three nodes, all are neighbours.
"""

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, combinations, groupby
from math import inf
from types import MappingProxyType
from typing import Final, Generic, TypeAlias, TypeVar

Node = TypeVar("Node", bound=Hashable)

#: Up to this many nodes all orders are compared; with more, single nodes move where that helps.
EXACT_MAX: Final = 8
#: Resolution of the parts of the state.
_PARTS: Final = 1000

#: (slow links between neighbours, crossings, parts of the state to move).
Cost: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True)
class _Case(Generic[Node]):
    counts: Mapping[Node, int]
    racks: Mapping[Node, str]
    slow: Collection[tuple[Node, Node]]
    held: Mapping[Node, tuple[float, float]]
    total: int

    def step(self, before: Node, node: Node) -> Cost:
        """Return the cost of two neighbours."""
        rack, other = self.racks.get(before, ""), self.racks.get(node, "")
        is_crossing = bool(rack and other and rack != other)
        num_slow = ((before, node) in self.slow) + ((node, before) in self.slow)
        return (num_slow, is_crossing, 0)

    def moved(self, node: Node, first: int) -> int:
        """Return how much a node would load from others if this is its first rank."""
        low, high = first / self.total, (first + self.counts[node]) / self.total
        had = self.held.get(node, (0.0, 0.0))
        kept = max(0.0, min(high, had[1]) - max(low, had[0]))
        return round(_PARTS * (high - low - kept))


def chosen(
    nodes: Sequence[tuple[Node, int]],
    *,
    racks: Mapping[Node, str] = MappingProxyType({}),
    slow: Collection[tuple[Node, Node]] = frozenset(),
    held: Mapping[Node, tuple[float, float]] = MappingProxyType({}),
) -> list[Node]:
    """Return the best order of ``nodes``; the given one if none is better.

    Args:
        nodes: Each with its number of ranks, in their current order.
        racks: The rack (or zone) of each node, if known.
        slow: (sender, receiver) of each slow link.
        held: The part of the ranks' state that each node has, as (from, to) within (0, 1), if ranks
            were numbered in the given order.
    """
    counts, where = dict(nodes), held or _as_they_are(nodes)
    used = frozenset((a, b) for a, b in slow if a in counts and b in counts)
    known = tuple((node, racks[node]) for node in counts if racks.get(node))
    if (len({rack for _, rack in known}) < 2 and not used) or len(counts) < 3:  # noqa: PLR2004
        return list(counts)
    had = tuple((node, where[node]) for node in counts if node in where)
    return list(_chosen(tuple(nodes), known, used, had))


def is_by_rack(racks: Iterable[str]) -> bool:
    """Return whether nodes of each rack are together, given the rack of each node in order.

    If so, and no link is slow, no other order is better. Racks are unknown of all nodes or of none.
    """
    runs = [rack for rack, _ in groupby(racks)]
    return len(runs) == len(set(runs)) and ("" not in runs or len(runs) == 1)


@lru_cache(maxsize=32)
def _chosen(
    nodes: tuple[tuple[Node, int], ...],
    racks: tuple[tuple[Node, str], ...],
    slow: frozenset[tuple[Node, Node]],
    held: tuple[tuple[Node, tuple[float, float]], ...],
) -> tuple[Node, ...]:
    """Return the order; cached, because eight nodes take 40 ms and every step asks again."""
    names, total = [node for node, _ in nodes], sum(num for _, num in nodes)
    case = _Case(dict(nodes), dict(racks), slow, dict(held), total)
    found = _exact(names, case) if len(names) <= EXACT_MAX else _greedy(names, case)
    is_better = found != names and _on_network(found, case) < _on_network(names, case)
    return tuple(found if is_better else names)


def _as_they_are(nodes: Sequence[tuple[Node, int]]) -> dict[Node, tuple[float, float]]:
    total, first = sum(num for _, num in nodes), 0
    held: dict[Node, tuple[float, float]] = {}
    for node, num in nodes:
        held[node] = (first / total, (first + num) / total)
        first += num
    return held


def cost(
    nodes: Sequence[tuple[Node, int]],
    *,
    racks: Mapping[Node, str] = MappingProxyType({}),
    slow: Collection[tuple[Node, Node]] = frozenset(),
) -> tuple[int, int]:
    """Return how many slow links join neighbours in an order, and how often it changes racks."""
    names = [node for node, _ in nodes]
    case = _Case(dict(nodes), racks, slow, {}, sum(num for _, num in nodes))
    return _on_network(names, case)


def _on_network(names: Sequence[Node], case: _Case[Node]) -> tuple[int, int]:
    steps = [case.step(names[at - 1], node) for at, node in enumerate(names)]
    return sum(num for num, _, _ in steps), sum(num for _, num, _ in steps)


def _cost(names: Sequence[Node], case: _Case[Node]) -> Cost:
    firsts = accumulate((case.counts[node] for node in names), initial=0)
    return (*_on_network(names, case), sum(map(case.moved, names, firsts)))


def _sum(one: Cost, other: Cost) -> Cost:
    return (one[0] + other[0], one[1] + other[1], one[2] + other[2])


def _exact(names: Sequence[Node], case: _Case[Node]) -> list[Node]:
    """Return the best of all orders (Held and Karp, 1962), by sets of the first nodes."""
    best: tuple[tuple[float, ...], list[Node]] = ((inf,), list(names))
    for start in names:
        others = [node for node in names if node != start]
        reached: dict[tuple[frozenset[Node], Node], tuple[Cost, list[Node]]] = {
            (frozenset([start]), start): ((0, 0, case.moved(start, 0)), [start])
        }
        for size in range(1, len(names)):
            for some in combinations(others, size):
                used = frozenset([start, *some])
                for last in some:
                    rest = used - {last}
                    first = sum(case.counts[node] for node in rest)
                    moved = (0, 0, case.moved(last, first))
                    reached[used, last] = min(
                        (_sum(_sum(before, case.step(node, last)), moved), [*way, last])
                        for node in (some if size > 1 else (start,))
                        if (found := reached.get((rest, node))) is not None
                        for before, way in (found,)
                    )
        for last in others:
            price, way = reached[frozenset(names), last]
            price = _sum(price, case.step(last, start))
            best = min(best, (price, way), key=lambda each: each[0])
    return best[1]


def _greedy(names: Sequence[Node], case: _Case[Node]) -> list[Node]:
    """Return a good order: group nodes by rack, then move single nodes that have slow links."""
    racks: dict[str, list[Node]] = {}
    for node in names:
        racks.setdefault(case.racks.get(node, ""), []).append(node)
    order = [node for rack in racks.values() for node in rack]
    for node in names:
        if any(node in pair for pair in case.slow):
            rest = [other for other in order if other != node]
            tried = [[*rest[:at], node, *rest[at:]] for at in range(len(names))]
            order = min(tried, key=lambda each: _cost(each, case))
    return order
