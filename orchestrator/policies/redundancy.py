"""How the snapshots of an attempt are protected against lost nodes: copies, parity, or nothing.

Pure. Where data-parallel replicas on other nodes hold the same state, workers save each other's
shares from their own memory and nothing is sent. Otherwise keepers protect each other over the
network: what a node has for snapshots and how large they are decides, by the rules of
``workers.snapshot.placement``: copies while memory allows, since they are read and need not be
computed, else parity over groups of nodes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ucp_core.layout import ParallelLayout
from workers.parallel.shares import replicas_of
from workers.protocol import Inventory
from workers.snapshot.groups import Groups, shared_domains
from workers.snapshot.placement import (
    PARITIES,
    Mechanism,
    Node,
    PlacementRules,
    Preference,
    State,
    StateClass,
    place,
    sized,
)

__all__ = ["RedundancyFacts", "RedundancyPlan", "plan_redundancy", "rank_bytes"]


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
        is_guarded: Whether the workers save each other's shares; None if they are not told yet.
    """

    nodes: tuple[str, ...]
    budgets_bytes: Mapping[str, int]
    rank_bytes: int
    layout: ParallelLayout | None = None
    racks: Mapping[str, str] = field(default_factory=dict)
    is_guarded: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RedundancyPlan:
    """How snapshots are protected.

    Attributes:
        mechanism: How.
        tolerance: How many nodes of each group may be lost; 0 protects nothing.
        groups: Nodes that protect each other.
        reason: Why so, for people.
        is_final: False if it has to be decided again once a snapshot shows its size: workers that
            were told to save each other's shares may then have no room for them.
        keepers: By node, the others whose keepers copy its snapshots over the network.
        guards: By rank, the ranks whose shares it saves beside its own; None where keepers
            protect each other's snapshots.
        shared_racks: Racks whose loss may cost more than the tolerance.
    """

    mechanism: Mechanism = Mechanism.NONE
    tolerance: int = 0
    groups: Groups = ()
    reason: str = ""
    is_final: bool = True
    keepers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    guards: tuple[tuple[int, ...], ...] | None = None
    shared_racks: tuple[str, ...] = ()

    @property
    def is_parity(self) -> bool:
        """Return whether groups keep parities."""
        return self.mechanism in PARITIES

    def copies_of(self, node: str) -> tuple[str, ...]:
        """Return the nodes whose snapshots the keeper of ``node`` copies."""
        return tuple(other for other, keepers in self.keepers.items() if node in keepers)

    def group_of(self, node: str) -> tuple[str, ...]:
        """Return the group of a node, in the order of its places; () if it is in none."""
        return next((group for group in self.groups if node in group), ())


def plan_redundancy(
    facts: RedundancyFacts, *, tolerance: int, preference: Preference
) -> RedundancyPlan:
    """Return how to protect the snapshots of an attempt.

    Args:
        facts: What is known.
        tolerance: Lost nodes of a group that are to be survived; fewer where there are too few.
        preference: What the user wants.
    """
    if not tolerance or not facts.nodes:
        return RedundancyPlan(reason="no lost node is to be survived (snapshot.tolerance: 0)")
    found = _over_replicas(facts, tolerance, preference)
    if isinstance(found, RedundancyPlan):
        return found
    plan = _over_network(facts, tolerance, preference)
    return replace(plan, reason=f"{plan.reason}; {found}") if found else plan


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
    state = State(name="snapshots", kind=StateClass.UNIQUE, num_bytes=facts.rank_bytes)
    rules = PlacementRules(tolerance=tolerance, preference=preference)
    placement = place(nodes, [state], rules)
    (found,) = placement.protections
    smallest = min(map(len, found.groups))
    if preference is Preference.AUTO and not facts.rank_bytes and smallest > tolerance + 1:
        reason = "copies or parity: decided when the first snapshot shows its size"
        return RedundancyPlan(reason=reason, is_final=False)
    return RedundancyPlan(
        mechanism=found.mechanism,
        tolerance=found.tolerance,
        groups=found.groups if found.tolerance else (),
        reason=found.reason,
        keepers={} if found.mechanism in PARITIES else found.keepers,
        shared_racks=placement.shared_racks,
    )


def _over_replicas(
    facts: RedundancyFacts, tolerance: int, preference: Preference
) -> RedundancyPlan | str:
    """Return the plan that sends nothing, or why there is none; "" if there are no replicas."""
    layout = facts.layout
    if layout is None or layout.dp_replicate == 1 or layout.world_size != len(facts.nodes):
        return ""
    if facts.is_guarded is False:
        return "the replicas of this attempt were not told to save each other's shares"
    is_free = facts.is_guarded is None
    if is_free and preference is Preference.PARITY:
        return f"no {Mechanism.REDUNDANT_COPY} of replicas: parity is asked for"
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
    if is_free and (refusal := _refusal(facts, num_shares)):
        return f"{Mechanism.REDUNDANT_COPY} of replicas {refusal}"
    holders = tuple(
        tuple(facts.nodes[each] for each in (rank, *others)) for rank, others in enumerate(keepers)
    )
    most = max(num_shares.values()) * facts.rank_bytes
    size = f"{sized(most)} a node and version" if most else "of a size that is not known yet"
    return RedundancyPlan(
        mechanism=Mechanism.REDUNDANT_COPY,
        tolerance=tolerance,
        groups=tuple(dict.fromkeys(tuple(sorted(nodes)) for nodes in holders)),
        reason=(
            f"snapshots: {Mechanism.REDUNDANT_COPY}, {layout.dp_replicate} replicas save a share "
            f"each and those of {tolerance} others, survives {tolerance} nodes, {size}, 0 B sent"
        ),
        is_final=bool(facts.rank_bytes) or not is_free,
        guards=guards,
        shared_racks=shared_domains(holders, _domains(facts.nodes, facts.racks)),
    )


def _guarded_by(
    layout: ParallelLayout, nodes: Sequence[str], racks: Mapping[str, str], tolerance: int
) -> list[tuple[int, ...]] | None:
    """Return, by rank, the ranks on other nodes that save its share too; None if too few can.

    Of those that hold the same state: other racks first, then who saves no more than its part,
    then who is near.
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
    """Return, by rank, the ranks whose shares it saves, from who saves the share of each."""
    guards: list[list[int]] = [[] for _ in keepers]
    for rank, others in enumerate(keepers):
        for other in others:
            guards[other].append(rank)
    return tuple(map(tuple, guards))


def _refusal(facts: RedundancyFacts, num_shares: Mapping[str, int]) -> str:
    """Return which node has no memory for so many shares; "" if all have."""
    for name, number in num_shares.items():
        need_bytes = number * PlacementRules().num_slots * facts.rank_bytes
        free_bytes = _budget_bytes(facts, name)
        if need_bytes > free_bytes:
            return f"needs {sized(need_bytes)} on {name[:8]}, {sized(free_bytes)} are free"
    return ""


def _domains(nodes: Iterable[str], racks: Mapping[str, str]) -> dict[str, str]:
    return {name: racks.get(name, name) for name in nodes}


def _budget_bytes(facts: RedundancyFacts, node: str) -> int:
    known = facts.budgets_bytes
    return known.get(node, min(known.values(), default=sys.maxsize))


def rank_bytes(inventories: Iterable[Inventory], world_size: int) -> int:
    """Return how large the parts of an attempt's ranks will be, by the newest that are held.

    Args:
        inventories: What keepers hold.
        world_size: Number of ranks of the attempt.
    """
    held = [part.held for inventory in inventories for part in inventory.parts]
    newest = max(((each.attempt, each.step) for each in held), default=None)
    sizes = [
        (each.data_bytes + each.record_bytes) * each.world_size
        for each in held
        if (each.attempt, each.step) == newest
    ]
    # Together the ranks hold the state, however many they are.
    return -(-max(sizes, default=0) // world_size)
