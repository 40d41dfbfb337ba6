"""Which nodes protect each other: groups whose members do not fail together.

Pure. A failure domain is a rack, or the node itself where none is named. Nodes come and go, in
any number: groups differ in size by one at most when they are formed, and later only those
change that must.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TypeAlias

__all__ = [
    "Groups",
    "adjust_groups",
    "form_groups",
    "parity_places",
    "partners",
    "shared_domains",
]

Groups: TypeAlias = tuple[tuple[str, ...], ...]


def form_groups(domains: Mapping[str, str], *, size_min: int, size_max: int) -> Groups:
    """Return groups of all nodes that no two nodes of one domain share, if there are such groups.

    Nodes are dealt in turn, domain by domain: n nodes of a domain land in n different groups if
    there are as many. More groups than ``size_max`` asks for are made for that, as long as each
    has ``size_min`` nodes; what then shares a domain, ``shared_domains`` tells.

    Args:
        domains: The domain of every node.
        size_min: A smaller group is no protection; only a run of fewer nodes has one.
        size_max: Of a group, exceeded where ``size_min`` leaves no other way.
    """
    counts = Counter(domains.values())
    if not counts:
        return ()
    wanted = max(-(-len(domains) // size_max), *counts.values())
    num_groups = min(wanted, max(1, len(domains) // size_min))
    dealt = sorted(domains, key=lambda node: (-counts[domains[node]], domains[node], node))
    return tuple(tuple(dealt[first::num_groups]) for first in range(num_groups))


def adjust_groups(
    before: Groups, domains: Mapping[str, str], *, size_min: int, size_max: int
) -> Groups:
    """Return groups for the nodes that there are now, with as little change as can be.

    A group that lost a member stays as it is if it is large enough, a newcomer joins the
    smallest group that it shares no domain with. All are formed anew only if some would share a
    domain that could be kept apart, or be too small.

    Args:
        before: The groups until now.
        domains: The domain of every node now.
        size_min: As for ``form_groups``.
        size_max: As for ``form_groups``.
    """
    anew = form_groups(domains, size_min=size_min, size_max=size_max)
    groups = [[node for node in group if node in domains] for group in before]
    groups = [group for group in groups if group]
    groups, homeless = _dissolve(groups, size_min)
    known = {node for group in groups for node in group}
    homeless += sorted(node for node in domains if node not in known and node not in homeless)
    for node in homeless:
        groups = _join(groups, node, domains, size_min)
    adjusted: list[tuple[str, ...]] = []
    for group in groups:
        if len(group) > size_max:
            members = {node: domains[node] for node in group}
            adjusted += form_groups(members, size_min=size_min, size_max=size_max)
        else:
            adjusted.append(tuple(group))
    worse = _faults(tuple(adjusted), domains, size_min) > _faults(anew, domains, size_min)
    return anew if worse else tuple(adjusted)


def shared_domains(groups: Groups, domains: Mapping[str, str]) -> tuple[str, ...]:
    """Return the domains of which some group has more than one node, sorted."""
    shared = set()
    for group in groups:
        counts = Counter(domains[node] for node in group)
        shared |= {domain for domain, count in counts.items() if count > 1}
    return tuple(sorted(shared))


def partners(groups: Groups, domains: Mapping[str, str], copies: int) -> dict[str, tuple[str, ...]]:
    """Return, for each node, the others of its group that keep a copy of what it has.

    The next ones in the group, so that each keeps as many copies as are kept of it. But a domain
    that has none yet comes first, though a node of it may keep more than its part then.

    Args:
        groups: Nodes in their order.
        domains: The domain of every node.
        copies: How many are wanted; in a smaller group there are as many as other nodes.
    """
    num_kept: Counter[str] = Counter()
    found: dict[str, tuple[str, ...]] = {}
    for group in groups:
        for at, node in enumerate(group):
            left = [*group[at + 1 :], *group[:at]]
            keepers: list[str] = []
            has_one = {domains[node]}
            while left and len(keepers) < copies:
                # The first of those that are as good.
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


def _faults(groups: Groups, domains: Mapping[str, str], size_min: int) -> tuple[int, int]:
    """Return how many groups are too small, and how many domains are shared."""
    small = sum(len(group) < size_min for group in groups)
    return small, len(shared_domains(groups, domains))


def _dissolve(groups: list[list[str]], size_min: int) -> tuple[list[list[str]], list[str]]:
    """Return the groups that are large enough, and the nodes of the others."""
    kept = [group for group in groups if len(group) >= size_min]
    return kept, [node for group in groups if len(group) < size_min for node in group]


def _join(
    groups: list[list[str]], node: str, domains: Mapping[str, str], size_min: int
) -> list[list[str]]:
    if not groups:
        return [[node]]
    domain = domains[node]
    sizes = [
        # Too small a group comes first, whatever else; then who shares no domain.
        (len(group) >= size_min, domain in {domains[other] for other in group}, len(group), index)
        for index, group in enumerate(groups)
    ]
    _, shares, _, index = min(sizes)
    if shares and (founded := _found(groups, node, domains, size_min)) is not None:
        return founded
    return [[*group, node] if index == at else group for at, group in enumerate(groups)]


def _found(
    groups: list[list[str]], node: str, domains: Mapping[str, str], size_min: int
) -> list[list[str]] | None:
    """Return the groups and one more around ``node``, of nodes that large groups can spare."""
    new = [node]
    left = [list(group) for group in groups]
    while len(new) < size_min:
        taken = {domains[member] for member in new}
        spare = [
            (-len(group), index, member)
            for index, group in enumerate(left)
            if len(group) > size_min
            for member in reversed(group)
            if domains[member] not in taken
        ]
        if not spare:
            return None
        _, index, member = min(spare, key=lambda each: each[:2])
        left[index].remove(member)
        new.append(member)
    return [*left, new]
