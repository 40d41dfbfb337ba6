"""Form groups of nodes that protect each other and do not fail together. Pure.

A failure domain is a rack, or a node whose rack is unknown. Every attempt has its own groups, whose
sizes differ by at most one.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias, TypeVar

Groups: TypeAlias = tuple[tuple[str, ...], ...]

T = TypeVar("T")


def form_groups(domains: Mapping[str, str], *, size_min: int, size_max: int) -> Groups:
    """Return groups in which no two nodes share a domain, if possible.

    Nodes are dealt in turn, domain by domain, so n nodes of a domain get into n different groups if
    there are as many. For this there may be more groups than ``size_max`` requires, as long as each
    has ``size_min`` nodes. ``shared_domains`` returns the domains that groups still share.

    Args:
        size_min: Smallest size of a group; only a run with fewer nodes has a smaller one.
        size_max: Largest size, exceeded if ``size_min`` requires it.
    """
    if not domains:
        return ()
    nodes_of: dict[str, list[str]] = {}
    for node, domain in domains.items():
        nodes_of.setdefault(domain, []).append(node)
    wanted = max(-(-len(domains) // size_max), *map(len, nodes_of.values()))
    num_groups = min(wanted, max(1, len(domains) // size_min))
    in_turn = sorted(nodes_of, key=lambda domain: (-len(nodes_of[domain]), domain))
    dealt = [node for domain in in_turn for node in sorted(nodes_of[domain])]
    return tuple(tuple(dealt[first::num_groups]) for first in range(num_groups))


def shared_domains(groups: Groups, domains: Mapping[str, str]) -> tuple[str, ...]:
    """Return the domains with more than one node in some group, sorted."""
    shared = set()
    for group in groups:
        counts = Counter(domains[node] for node in group)
        shared |= {domain for domain, count in counts.items() if count > 1}
    return tuple(sorted(shared))


def partners(
    groups: Groups,
    domains: Mapping[str, str],
    copies: int,
    met: Callable[[str, str], float] | None = None,
) -> dict[str, tuple[str, ...]]:
    """Return, for each node, the others of its group that keep copies of its data.

    The next nodes in the group come first, so that each node keeps as many copies as others keep of
    its data. A small group has fewer copies than configured.

    ``met`` returns the cost of a copy from one node to another. Among nodes that protect equally
    well the cheapest comes first, unless some node would then keep more.
    """
    found: dict[str, tuple[str, ...]] = {}
    for group in groups:
        plain = _deal(group, domains, copies, None)
        found |= plain if met is None else _nearest(group, domains, copies, met, plain)
    return found


def _nearest(
    group: tuple[str, ...],
    domains: Mapping[str, str],
    copies: int,
    met: Callable[[str, str], float],
    plain: dict[str, tuple[str, ...]],
) -> dict[str, tuple[str, ...]]:
    """Return the cheapest way to deal, over all starting nodes and both directions."""

    def cost(dealt: Mapping[str, tuple[str, ...]]) -> tuple[int, float]:
        sums = sum(met(node, keeper) for node, keepers in dealt.items() for keeper in keepers)
        return max(_most_kept(plain), _most_kept(dealt)), sums

    turns = ((*way[at:], *way[:at]) for way in (group, group[::-1]) for at in range(len(group)))
    best = min((*(_deal(turn, domains, copies, met) for turn in turns), plain), key=cost)
    return {node: best[node] for node in group}


def _deal(
    group: tuple[str, ...],
    domains: Mapping[str, str],
    copies: int,
    met: Callable[[str, str], float] | None,
) -> dict[str, tuple[str, ...]]:
    num_kept: Counter[str] = Counter()
    found: dict[str, tuple[str, ...]] = {}
    for at, node in enumerate(group):
        others = [*group[at + 1 :], *group[:at]]
        if met is not None:
            others.sort(key=partial(met, node))
        found[node] = holders(
            node,
            others,
            node_of=str,
            domains=domains,
            num_kept=num_kept,
            copies=copies,
        )
    return found


def _most_kept(keepers: Mapping[str, tuple[str, ...]]) -> int:
    return max(Counter(each for names in keepers.values() for each in names).values(), default=0)


def holders(
    one: T,
    others: Sequence[T],
    *,
    node_of: Callable[[T], str],
    domains: Mapping[str, str],
    num_kept: Counter[T],
    copies: int,
) -> tuple[T, ...]:
    """Return up to ``copies`` of ``others`` to keep the data of ``one``, each on another node.

    Prefer a node in a domain without a copy, even if it then keeps more than its share. Otherwise
    prefer one that then keeps at most its share, and then the first in order. ``num_kept`` has the
    number of copies that each keeps so far; the new ones are added.
    """
    found: list[T] = []
    while len(found) < copies:
        used = {node_of(each) for each in (one, *found)}
        has_one = {domains[node] for node in used}
        left = [other for other in others if node_of(other) not in used]
        if not left:
            break
        found.append(
            min(
                left,
                key=lambda x: (domains[node_of(x)] in has_one, max(0, num_kept[x] + 1 - copies)),
            )
        )
        num_kept[found[-1]] += 1
    return tuple(found)
