"""How the snapshots of an attempt are protected against lost nodes: copies, parity, or nothing.

Pure. What a node has for snapshots and how large they are decides, by the rules of
``workers.snapshot.placement``: copies while memory allows, since they are read and need not be
computed, else parity over groups of nodes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from orchestrator.policies.versions import ring
from workers.protocol import Inventory
from workers.snapshot.groups import Groups
from workers.snapshot.placement import (
    PARITIES,
    Mechanism,
    Node,
    PlacementRules,
    Preference,
    State,
    StateClass,
    place,
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
    """

    nodes: tuple[str, ...]
    budgets_bytes: Mapping[str, int]
    rank_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RedundancyPlan:
    """How snapshots are protected.

    Attributes:
        mechanism: How.
        tolerance: How many nodes of each group may be lost; 0 protects nothing.
        groups: Nodes that protect each other.
        reason: Why so, for people.
        is_final: False if it has to be decided again once a snapshot shows its size.
    """

    mechanism: Mechanism = Mechanism.NONE
    tolerance: int = 0
    groups: Groups = ()
    reason: str = ""
    is_final: bool = True

    @property
    def is_parity(self) -> bool:
        """Return whether groups keep parities."""
        return self.mechanism in PARITIES

    def copies_of(self, node: str) -> tuple[str, ...]:
        """Return the nodes whose snapshots ``node`` keeps copies of."""
        if self.is_parity:
            return ()
        return ring(self.group_of(node), self.tolerance).get(node, ())

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
    known = facts.budgets_bytes
    least = min(known.values(), default=sys.maxsize)
    nodes = [
        Node(
            name=name,
            num_ranks=facts.nodes.count(name),
            headroom_bytes=known.get(name, least),
        )
        for name in dict.fromkeys(facts.nodes)
    ]
    state = State(name="snapshots", kind=StateClass.UNIQUE, num_bytes=facts.rank_bytes)
    rules = PlacementRules(tolerance=tolerance, preference=preference)
    (found,) = place(nodes, [state], rules).protections
    smallest = min(map(len, found.groups))
    if preference is Preference.AUTO and not facts.rank_bytes and smallest > tolerance + 1:
        reason = "copies or parity: decided when the first snapshot shows its size"
        return RedundancyPlan(reason=reason, is_final=False)
    return RedundancyPlan(
        mechanism=found.mechanism,
        tolerance=found.tolerance,
        groups=found.groups if found.tolerance else (),
        reason=found.reason,
    )


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
