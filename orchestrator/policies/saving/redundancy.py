"""How the snapshots of an attempt are protected against lost nodes: copies, parity, or nothing.

Pure. Where data-parallel replicas on other nodes hold the same state, workers save each other's
shares from their own memory and nothing is sent; or, with three nodes or more, a parity of them,
which takes 1/(n-1) of the memory of a copy. Otherwise keepers protect each other over the network:
so the link is used only where replicas cannot do without, and if it is slow, snapshots are fewer.
What a node has for snapshots and how large they are decides, by the rules of
``workers.placement.plan``: copies while memory allows, since they are read and need not be
computed, else parity over groups of nodes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ucp_core.layout import ParallelLayout
from workers.placement import (
    PARITIES,
    Groups,
    Mechanism,
    Node,
    PlacementRules,
    Preference,
    form_groups,
    place,
    shared_domains,
    sized,
)
from workers.protocol import Inventory
from workers.state import replicas_of

#: A parity of one other node's data is a copy of it.
_PARITY_NODES_MIN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RedundancyFacts:
    """An attempt, and what its keepers said.

    Attributes:
        nodes: Of every member, by rank.
        budgets_bytes: What snapshots may take, by node; one that has not said it is thought to
            have as much as the least of the others.
        rank_bytes: The largest rank's part of a version; 0 if there was none yet.
        layout: Says which ranks hold the same state; None if nobody knows.
        racks: What a node fails together with, by node, where that is known.
        told: What the workers save for each other: a copy, a parity, or nothing (``NONE``); None
            if they are not told yet.
        is_open: Whether a copy that they were told to save may be given up, for keepers that
            protect each other, if there is no room for it.
    """

    nodes: tuple[str, ...]
    budgets_bytes: Mapping[str, int]
    rank_bytes: int
    layout: ParallelLayout | None = None
    racks: Mapping[str, str] = field(default_factory=dict)
    told: Mechanism | None = None
    is_open: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RedundancyPlan:
    """How snapshots are protected.

    Attributes:
        tolerance: How many nodes of each group may be lost; 0 protects nothing.
        groups: Nodes that protect each other.
        reason: Why so, for people.
        is_final: False if it has to be decided again once a snapshot shows its size: workers that
            were told to save each other's shares may then have no room for them.
        keepers: By node, the others whose keepers copy its snapshots over the network.
        guards: By rank, the ranks whose shares it saves beside its own; None where keepers
            protect each other's snapshots.
        rank_groups: By rank, the ranks of its group in order of place. They keep parities of each
            other's shares from their own replicas; None where they keep none.
        shared_racks: Racks whose loss may cost more than the tolerance.
    """

    mechanism: Mechanism = Mechanism.NONE
    tolerance: int = 0
    groups: Groups = ()
    reason: str = ""
    is_final: bool = True
    keepers: dict[str, tuple[str, ...]] = field(default_factory=dict)
    guards: tuple[tuple[int, ...], ...] | None = None
    rank_groups: tuple[tuple[int, ...], ...] | None = None
    shared_racks: tuple[str, ...] = ()

    @property
    def is_parity(self) -> bool:
        """Return whether groups keep parities."""
        return self.mechanism in PARITIES

    @property
    def is_by_workers(self) -> bool:
        """Return whether workers are told what to save for each other."""
        return self.guards is not None or self.rank_groups is not None

    def copies_of(self, node: str) -> tuple[str, ...]:
        """Return the nodes whose snapshots the keeper of ``node`` copies."""
        return tuple(other for other, keepers in self.keepers.items() if node in keepers)

    def group_of(self, node: str) -> tuple[str, ...]:
        """Return the group of a node, in the order of its places; () if it is in none."""
        return next((group for group in self.groups if node in group), ())


@dataclass(frozen=True, slots=True, kw_only=True)
class RedundancyRules:
    """What the user wants.

    Attributes:
        tolerance: Lost nodes of a group that are to be survived; fewer where there are too few.
    """

    tolerance: int = 0
    preference: Preference = Preference.AUTO


def plan_redundancy(facts: RedundancyFacts, rules: RedundancyRules) -> RedundancyPlan:
    """Return how to protect the snapshots of an attempt."""
    tolerance, preference = rules.tolerance, rules.preference
    if not tolerance or not facts.nodes:
        return RedundancyPlan(reason="no lost node is to be survived (snapshot.tolerance: 0)")
    found = _over_replicas(facts, tolerance, preference)
    if isinstance(found, RedundancyPlan):
        return found
    plan = _over_network(facts, tolerance, preference)
    return replace(plan, reason=f"{plan.reason}; {found}") if found else plan


def revise(plan: RedundancyPlan, facts: RedundancyFacts, rules: RedundancyRules) -> RedundancyPlan:
    """Return the plan of an attempt that trains by ``plan``, now that more is known.

    Its workers go on as they were told if there is room for that. Otherwise their keepers protect
    each other.
    """
    is_by_workers = plan.is_by_workers
    told = plan.mechanism if is_by_workers else Mechanism.NONE
    found = plan_redundancy(replace(facts, told=told, is_open=is_by_workers), rules)
    if is_by_workers and found.is_by_workers:
        return replace(plan, reason=found.reason, is_final=found.is_final)
    return found


def _over_network(facts: RedundancyFacts, tolerance: int, preference: Preference) -> RedundancyPlan:
    nodes = [
        Node(
            name=name,
            rack=facts.racks.get(name, ""),
            num_ranks=facts.nodes.count(name),
            headroom_bytes=_budget_bytes(facts, name),
        )
        for name in dict.fromkeys(facts.nodes)
    ]
    rules = PlacementRules(tolerance=tolerance, preference=preference)
    found = place(nodes, facts.rank_bytes, rules)
    smallest = min(map(len, found.groups))
    if preference is Preference.AUTO and not facts.rank_bytes and smallest > tolerance + 1:
        reason = "copies or parity: decided when the first snapshot shows its size"
        return RedundancyPlan(reason=reason, is_final=False)
    return RedundancyPlan(
        mechanism=found.mechanism,
        tolerance=found.tolerance,
        groups=found.groups if found.tolerance else (),
        reason=found.reason,
        keepers={} if found.mechanism in PARITIES else dict(found.keepers),
        shared_racks=found.shared_racks,
    )


def _over_replicas(
    facts: RedundancyFacts, tolerance: int, preference: Preference
) -> RedundancyPlan | str:
    """Return the plan that sends nothing, or why there is none; "" if there are no replicas."""
    layout = facts.layout
    if layout is None or layout.dp_replicate == 1 or layout.world_size != len(facts.nodes):
        return ""
    if facts.told is Mechanism.NONE:
        return "the replicas of this attempt were not told to save each other's shares"
    if facts.told is Mechanism.REPLICA_PARITY:
        return _replica_parity(facts, tolerance)
    copies = _redundant_copies(facts, tolerance)
    is_refused = isinstance(copies, str)
    # Between two nodes a parity would be a copy.
    wants_parity = preference is Preference.PARITY and len(set(facts.nodes)) >= _PARITY_NODES_MIN
    may_be_parity = wants_parity or (is_refused and preference is not Preference.COPY)
    if facts.told is Mechanism.REDUNDANT_COPY or not may_be_parity:
        return copies
    parity = _replica_parity(facts, tolerance)
    if not is_refused:
        return parity
    if isinstance(parity, RedundancyPlan):
        return replace(parity, reason=f"{parity.reason}; {copies}")
    return f"{copies}; {parity}"


def _redundant_copies(facts: RedundancyFacts, tolerance: int) -> RedundancyPlan | str:
    """Return the plan by which workers save each other's shares, or why they cannot."""
    layout = facts.layout
    assert layout is not None
    is_free = facts.told is None or facts.is_open
    keepers = _guarded_by(layout, facts.nodes, facts.racks, tolerance)
    if keepers is None:
        return (
            f"no {Mechanism.REDUNDANT_COPY} of replicas: those of some shard are on fewer than "
            f"{tolerance + 1} nodes"
        )
    guards = _inverted(keepers)
    num_shares = dict.fromkeys(facts.nodes, 0)
    for name, guarded in zip(facts.nodes, guards, strict=True):
        num_shares[name] += 1 + len(guarded)
    need_bytes = {name: number * facts.rank_bytes for name, number in num_shares.items()}
    if is_free and (refusal := _refusal(facts, need_bytes)):
        return f"{Mechanism.REDUNDANT_COPY} of replicas {refusal}"
    holders = tuple(
        tuple(facts.nodes[each] for each in (rank, *others)) for rank, others in enumerate(keepers)
    )
    size = _size(need_bytes)
    return RedundancyPlan(
        mechanism=Mechanism.REDUNDANT_COPY,
        tolerance=tolerance,
        groups=tuple(dict.fromkeys(tuple(sorted(nodes)) for nodes in holders)),
        reason=(
            f"snapshots: {Mechanism.REDUNDANT_COPY}, {layout.dp_replicate} replicas save a share "
            f"each and those of {tolerance} others, for the loss of {tolerance} nodes, {size}, "
            "0 B sent"
        ),
        is_final=bool(facts.rank_bytes) or not is_free,
        guards=guards,
        shared_racks=shared_domains(holders, _domains(facts.nodes, facts.racks)),
    )


def _replica_parity(facts: RedundancyFacts, tolerance: int) -> RedundancyPlan | str:
    """Return the plan by which workers keep parities from their own replicas, or why not."""
    what = Mechanism.REPLICA_PARITY
    if tolerance > 1:
        return f"{what} survives 1 node"
    groups, racks = _like_groups(facts), _domains(facts.nodes, facts.racks)
    if groups is None:
        return f"no {what}: nodes have replicas of other shards, or they are fewer than 3"
    rank_groups: dict[int, tuple[int, ...]] = {}
    need_bytes: dict[str, int] = {}
    for group in groups:
        by_place = [[rank for rank, at in enumerate(facts.nodes) if at == name] for name in group]
        for ranks_alike in map(tuple, zip(*by_place, strict=True)):
            rank_groups |= dict.fromkeys(ranks_alike, ranks_alike)
        block_bytes = -(-facts.rank_bytes // (len(group) - 1))
        for name, ranks in zip(group, by_place, strict=True):
            need_bytes[name] = len(ranks) * (facts.rank_bytes + block_bytes)
    if facts.told is None and (refusal := _refusal(facts, need_bytes)):
        return f"{what} {refusal}"
    smallest = min(map(len, groups))
    return RedundancyPlan(
        mechanism=what,
        tolerance=1,
        groups=groups,
        reason=(
            f"snapshots: {what}, for the loss of 1 of {smallest} nodes, {_size(need_bytes)}, "
            "records sent"
        ),
        is_final=bool(facts.rank_bytes),
        rank_groups=tuple(rank_groups[rank] for rank in range(len(facts.nodes))),
        shared_racks=shared_domains(groups, racks),
    )


def _like_groups(facts: RedundancyFacts) -> Groups | None:
    """Return groups of nodes whose first ranks hold the same state, and so on.

    None if that cannot be, or if a group would have fewer nodes than a parity is worth.
    """
    layout, nodes = facts.layout, facts.nodes
    assert layout is not None
    held: dict[str, list[int]] = {name: [] for name in nodes}
    for rank, name in enumerate(nodes):
        # The first of those that hold the same stands for the state.
        held[name].append(replicas_of(layout, rank)[0])
    alike: dict[tuple[int, ...], list[str]] = {}
    for name, states in held.items():
        alike.setdefault(tuple(states), []).append(name)
    domains = _domains(nodes, facts.racks)
    groups: list[tuple[str, ...]] = []
    for names in alike.values():
        if len(names) < _PARITY_NODES_MIN:
            return None
        groups += form_groups(
            {name: domains[name] for name in names},
            size_min=_PARITY_NODES_MIN,
            size_max=PlacementRules().group_max,
        )
    return tuple(groups)


def _guarded_by(
    layout: ParallelLayout, nodes: Sequence[str], racks: Mapping[str, str], tolerance: int
) -> list[tuple[int, ...]] | None:
    """Return, by rank, the ranks on other nodes that save its share too; None if too few can.

    Among holders of the same state: other racks first, then those that save no more than their
    part, then near ones.
    """
    domains = _domains(nodes, racks)
    num_saved = [0] * len(nodes)
    found: list[tuple[int, ...]] = []
    for rank in range(len(nodes)):
        replicas = replicas_of(layout, rank)
        place_of = replicas.index(rank)
        others = [*reversed(replicas[:place_of]), *reversed(replicas[place_of + 1 :])]
        chosen = [rank]
        for _ in range(tolerance):
            used = {nodes[each] for each in chosen}
            has_one = {domains[node] for node in used}
            left = [other for other in others if nodes[other] not in used]
            if not left:
                return None
            _, _, place = min(
                (domains[nodes[other]] in has_one, max(0, num_saved[other] + 1 - tolerance), place)
                for place, other in enumerate(left)
            )
            chosen.append(left[place])
            num_saved[left[place]] += 1
        found.append(tuple(chosen[1:]))
    return found


def _inverted(keepers: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Return, by rank, the ranks whose shares it saves; the inverse of ``keepers``."""
    guards: list[list[int]] = [[] for _ in keepers]
    for rank, others in enumerate(keepers):
        for other in others:
            guards[other].append(rank)
    return tuple(map(tuple, guards))


def _refusal(facts: RedundancyFacts, version_bytes: Mapping[str, int]) -> str:
    """Return which node lacks memory for versions of such sizes; "" if none does."""
    for name, size_bytes in version_bytes.items():
        need_bytes = PlacementRules().num_buffers * size_bytes
        free_bytes = _budget_bytes(facts, name)
        if need_bytes > free_bytes:
            return f"needs {sized(need_bytes)} on {name[:8]}, {sized(free_bytes)} are free"
    return ""


def _size(version_bytes: Mapping[str, int]) -> str:
    most = max(version_bytes.values())
    return f"{sized(most)} a node and version" if most else "of a size that is not known yet"


def _domains(nodes: Iterable[str], racks: Mapping[str, str]) -> dict[str, str]:
    return {name: racks.get(name, name) for name in nodes}


def _budget_bytes(facts: RedundancyFacts, node: str) -> int:
    known = facts.budgets_bytes
    return known.get(node, min(known.values(), default=sys.maxsize))


def state_bytes(inventories: Iterable[Inventory]) -> int:
    """Return the size of a version, all ranks together, by the newest that keepers hold."""
    held = [part.held for inventory in inventories for part in inventory.parts]
    newest = max(((each.attempt, each.step) for each in held), default=None)
    sizes = [
        (each.data_bytes + each.record_bytes) * each.world_size
        for each in held
        if (each.attempt, each.step) == newest
    ]
    # Together the ranks hold the state, however many they are.
    return max(sizes, default=0)
