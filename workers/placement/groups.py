"""Which nodes protect each other: groups whose members do not fail together. Pure.

A failure domain is a rack, or a node of unknown rack. Every attempt has groups of its own, which
differ in size by one at most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TypeAlias

Groups: TypeAlias = tuple[tuple[str, ...], ...]


def form_groups(domains: Mapping[str, str], *, size_min: int, size_max: int) -> Groups:
    """Return groups in which no two nodes share a domain, if there are such groups.

    Nodes are dealt in turn, domain by domain: n nodes of a domain land in n different groups if
    there are as many. For that there may be more groups than ``size_max`` asks for, as long as each
    has ``size_min`` nodes; see ``shared_domains`` for what then shares a domain.

    Args:
        size_min: Least size of a group; only a run of fewer nodes has a smaller one.
        size_max: Greatest size, exceeded if ``size_min`` requires it.
    """
    counts = Counter(domains.values())
    if not counts:
        return ()
    wanted = max(-(-len(domains) // size_max), *counts.values())
    num_groups = min(wanted, max(1, len(domains) // size_min))
    dealt = sorted(domains, key=lambda node: (-counts[domains[node]], domains[node], node))
    return tuple(tuple(dealt[first::num_groups]) for first in range(num_groups))


def shared_domains(groups: Groups, domains: Mapping[str, str]) -> tuple[str, ...]:
    """Return the domains of which some group has more than one node, sorted."""
    shared = set()
    for group in groups:
        counts = Counter(domains[node] for node in group)
        shared |= {domain for domain, count in counts.items() if count > 1}
    return tuple(sorted(shared))


def partners(groups: Groups, domains: Mapping[str, str], copies: int) -> dict[str, tuple[str, ...]]:
    """Return, for each node, the others of its group that keep copies of its data.

    The next ones in the group, so that each node keeps as many copies as are kept of it. But a node
    of a domain without a copy comes first, even if it then keeps more than its share. A small group
    has fewer copies than asked for.
    """
    num_kept: Counter[str] = Counter()
    found: dict[str, tuple[str, ...]] = {}
    for group in groups:
        for at, node in enumerate(group):
            left = [*group[at + 1 :], *group[:at]]
            keepers: list[str] = []
            has_one = {domains[node]}
            while left and len(keepers) < copies:
                # The first of equally good ones.
                keeper = min(
                    left, key=lambda n: (domains[n] in has_one, max(0, num_kept[n] + 1 - copies))
                )
                left.remove(keeper)
                keepers.append(keeper)
                has_one.add(domains[keeper])
                num_kept[keeper] += 1
            found[node] = tuple(keepers)
    return found


def parity_places(stripe: int, *, num_nodes: int, num_parities: int) -> tuple[int, ...]:
    """Return the places in a group of the nodes that keep the parities of a stripe."""
    return tuple((stripe + which) % num_nodes for which in range(num_parities))
