"""Plans the redundancy of snapshots: its keepers, its mechanism, and what it survives. Pure.

For state of which each rank has its own part, so that it has to travel. State that replicas hold
too is protected without network: ``orchestrator.policies.saving.redundancy``.

The rule: of the mechanisms that memory and the number of nodes allow, take the one that recovers
fastest: copies before parity, since a copy is read while a parity is computed from a whole group.
The tolerance counts nodes; it also holds for racks if ``shared_racks`` is empty. The speed of the
link plays no part: copies and parities of a tolerance send the same bytes, and on a slow link the
cadence takes fewer snapshots.

REFT's third protection, optimizer recomputation, is left out: gradients are a third of AdamW's
bytes, but sparing them gains less than a snapshot after each third step
(``tests.benchmarks.bench_recomputation``), and recomputed state is not always bit-identical.

Source: the protections of REFT (arXiv 2310.12670), with two parities, unequal parts and any number
of nodes; partner copies of GEMINI (SOSP 2023); XOR sets of SCR.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from workers.placement.groups import (
    Groups,
    form_groups,
    partners,
    shared_domains,
)

#: Limit of double parity: 15 members and two parities (``workers.parity.code``).
_DOUBLE_NODES_MAX = 17


class Mechanism(StrEnum):
    """How a state is protected against lost nodes."""

    NONE = "no redundancy"
    REDUNDANT_COPY = "redundant copy"
    REPLICA_PARITY = "parity over replicas"
    DOUBLE_PARITY = "double parity"
    PARTNER_COPY = "partner copy"
    RING_PARITY = "ring parity"


PARITIES = frozenset({Mechanism.REPLICA_PARITY, Mechanism.DOUBLE_PARITY, Mechanism.RING_PARITY})


class Preference(StrEnum):
    """Which mechanisms are allowed. A parity over one node's data is a copy, and made as one."""

    AUTO = "auto"
    COPY = "copy"
    PARITY = "parity"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node and its memory.

    Attributes:
        rack: Rack that it fails together with; "" if unknown.
        num_ranks: Workers on it.
        headroom_bytes: Memory for snapshots and redundancy, in all buffers.
    """

    name: str
    rack: str = ""
    num_ranks: int = 1
    headroom_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRules:
    """The user's wishes.

    Attributes:
        tolerance: How many nodes of a group may be lost, 1 or 2; 0 asks for nothing.
        preference: Allowed mechanisms.
        group_max: Nodes in a group. With two parities groups of 8 outlive pairs from 64 nodes on,
            at a third of their memory.
        num_buffers: Versions held at once.
    """

    tolerance: int = 1
    preference: Preference = Preference.AUTO
    group_max: int = 8
    num_buffers: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Bytes of one version: sent over the network, and kept in memory.

    Parity is rounded up to 64 bytes a block, which is not counted.
    """

    network_bytes: int
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The whole decision.

    Attributes:
        mechanism: How snapshots are protected.
        tolerance: Nodes of each group that may be lost.
        groups: Nodes that protect each other, in the order of ``Stripes``.
        reason: Why this mechanism, in a line.
        costs: Costs of one version, by node.
        keepers: For copies, by node: who keeps its data.
        shared_racks: Racks with several nodes of a parity group, or two copies of the same data:
            losing such a rack may cost more than the tolerance.
    """

    mechanism: Mechanism
    tolerance: int
    groups: Groups
    reason: str
    costs: Mapping[str, Cost]
    keepers: Mapping[str, tuple[str, ...]]
    shared_racks: tuple[str, ...]


def place(nodes: Sequence[Node], rank_bytes: int, rules: PlacementRules) -> Placement:
    """Return how snapshots are to be protected.

    The tolerance is lowered if it cannot be met; the reason says so. ``rank_bytes`` is the size of
    the largest rank's part of a version, 0 if not known yet.
    """
    known = {node.name: node for node in sorted(nodes, key=lambda node: node.name)}
    sizes = {"size_min": rules.tolerance + 1, "size_max": rules.group_max}
    return _protect(rank_bytes, form_groups(_domains(known), **sizes), known, rules)


def _domains(nodes: Mapping[str, Node]) -> dict[str, str]:
    return {name: node.rack or name for name, node in nodes.items()}


def _protect(
    rank_bytes: int, groups: Groups, nodes: Mapping[str, Node], rules: PlacementRules
) -> Placement:
    refused: list[str] = []
    domains = _domains(nodes)
    smallest = min(map(len, groups), default=0)
    if smallest <= rules.tolerance:
        refused.append(f"tolerance {rules.tolerance} needs {rules.tolerance + 1} nodes")
    for tolerance in range(max(0, min(rules.tolerance, smallest - 1)), -1, -1):
        keepers = partners(groups, domains, tolerance)
        for mechanism in _candidates(groups, tolerance, rules.preference):
            costs = _costs(rank_bytes, mechanism, tolerance, groups, keepers, nodes)
            if why := _refusal(costs, nodes, rules):
                refused.append(f"{mechanism} for {tolerance} {why}")
                if tolerance:
                    continue
            worst = max((each.memory_bytes for each in costs.values()), default=0)
            sent = max((each.network_bytes for each in costs.values()), default=0)
            reason = f"snapshots: {mechanism}, for the loss of {tolerance} of {smallest} nodes"
            if rank_bytes:
                reason += f", {sized(worst)} a node and version, {sized(sent)} sent"
            holders = tuple((node, *others) for node, others in keepers.items())
            return Placement(
                mechanism=mechanism,
                tolerance=tolerance,
                groups=groups,
                reason="; ".join([reason, *refused]),
                costs=costs,
                keepers=keepers,
                shared_racks=shared_domains(groups if mechanism in PARITIES else holders, domains),
            )
    raise AssertionError("no redundancy is always a candidate")


def _candidates(groups: Groups, tolerance: int, preference: Preference) -> list[Mechanism]:
    """Return the mechanisms for a tolerance, fastest recovery first."""
    if tolerance <= 0:
        return [Mechanism.NONE]
    sizes = [len(group) for group in groups]
    copies, parities = [Mechanism.PARTNER_COPY], list[Mechanism]()
    # With one data block in a stripe the parity is a copy.
    if min(sizes) >= tolerance + 2:
        if tolerance == 1:
            parities.append(Mechanism.RING_PARITY)
        elif max(sizes) <= _DOUBLE_NODES_MAX:
            parities.append(Mechanism.DOUBLE_PARITY)
    if preference is Preference.PARITY:
        return parities or copies
    return copies if preference is Preference.COPY else [*copies, *parities]


def _costs(
    rank_bytes: int,
    mechanism: Mechanism,
    tolerance: int,
    groups: Groups,
    keepers: Mapping[str, tuple[str, ...]],
    nodes: Mapping[str, Node],
) -> dict[str, Cost]:
    costs: dict[str, Cost] = {}
    for group in groups:
        num_ranks = {name: nodes[name].num_ranks for name in group}
        block_bytes = -(-rank_bytes * max(num_ranks.values()) // max(1, len(group) - tolerance))
        for name in group:
            own_bytes = rank_bytes * num_ranks[name]
            if mechanism in PARITIES:
                kept_bytes = tolerance * block_bytes
            else:
                kept_bytes = rank_bytes * sum(num_ranks[x] for x in group if name in keepers[x])
            # Each copy goes out whole; with parities each byte goes into as many as there are.
            costs[name] = Cost(
                network_bytes=tolerance * own_bytes, memory_bytes=own_bytes + kept_bytes
            )
    return costs


def _refusal(costs: Mapping[str, Cost], nodes: Mapping[str, Node], rules: PlacementRules) -> str:
    """Return why some node cannot bear its cost; "" if all can."""
    for name, each in costs.items():
        need_bytes, free_bytes = each.memory_bytes * rules.num_buffers, nodes[name].headroom_bytes
        if need_bytes > free_bytes:
            return f"needs {sized(need_bytes)} on {name[:8]}, {sized(free_bytes)} are free"
    return ""


def sized(num_bytes: int) -> str:
    """Return a number of bytes for people."""
    power = min(max(num_bytes.bit_length() - 1, 0) // 10, 4)
    return f"{num_bytes / (1 << 10 * power):.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
