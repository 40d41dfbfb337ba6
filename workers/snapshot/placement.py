"""Who keeps which redundancy of whose snapshots, by which mechanism, and what that survives.

Pure. For every class of state the cheapest mechanism to recover from is taken that memory, link
and device copies allow: copies before parity, because a copy is read and a parity is computed
from a whole group. State that data-parallel ranks replicate is protected without any traffic:
every node computes its part from its own replica. State of which each rank has its own part has
to travel. A claim of tolerance is for nodes; it holds for racks where ``shared_racks`` is empty.

Source: the protections of REFT (arXiv 2310.12670), with two parities, unequal parts and any
number of nodes; partner copies of GEMINI (SOSP 2023); XOR sets of SCR.

REFT's third, optimizer recomputation, was measured and left out: replicas would save the state
after every K-th step only, and after the others their gradients, a third of AdamW's bytes. As
replicas send each other nothing, copying is all that this spares, and it spares less of it than a
snapshot after each third step. Of 300 MB on two replicas training waits 51 ms a step for snapshots
of every step; 22 ms with gradients and K = 8, in 1.9 times the memory; 26 and 17 ms for snapshots
of every second and third. It is better for the one or two steps more that these may lose, and only
if no replica can leave its own state (``workers.snapshot.farewell``). Those are trained again;
it has up to seven updates to make again, each 28 ms to load gradients and 106 ms to update, where
the state itself loads in 66 ms. A keeper that made them at once would need twice the processor
time of a snapshot. And no checksum says that what was made again is right: fused AdamW and SGD
give other bits where tensors are cut otherwise, Muon needs whole matrices, and what a script does
to weights between updates is in no gradient. ``tests.benchmarks.bench_recomputation``, 2026-11-23.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from workers.snapshot.groups import (
    Groups,
    adjust_groups,
    form_groups,
    parity_places,
    partners,
    shared_domains,
)

__all__ = [
    "PARITIES",
    "Cost",
    "Holding",
    "Mechanism",
    "Node",
    "Placement",
    "PlacementRules",
    "Preference",
    "Protection",
    "State",
    "StateClass",
    "changed_groups",
    "cost",
    "holdings",
    "level",
    "place",
    "sized",
    "survives",
]

#: Double parity has at most so many members and two parities (``workers.snapshot.parity``).
_DOUBLE_NODES_MAX = 17


class StateClass(StrEnum):
    """Who has the bytes of a state before anything is protected."""

    REPLICATED = "replicated"
    UNIQUE = "unique"


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
    """Which mechanisms may be taken. A parity over one node's data is a copy, and made as one."""

    AUTO = "auto"
    COPY = "copy"
    PARITY = "parity"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node and what it can spare.

    Attributes:
        name: Of the node.
        rack: What it fails together with; "" if nothing is known.
        num_ranks: Workers on it.
        headroom_bytes: Memory for snapshots, own data and redundancy, in all slots.
        link_bytes_per_s: Of its network, for this; 0.0 if it was not measured.
        d2h_bytes_per_s: From its devices; 0.0 if it was not measured.
    """

    name: str
    rack: str = ""
    num_ranks: int = 1
    headroom_bytes: int
    link_bytes_per_s: float = 0.0
    d2h_bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A class of state.

    Attributes:
        name: For people: "parameters", "optimizer".
        kind: Whether ``nodes`` hold equal copies of it, or each rank a part of its own.
        num_bytes: Replicated: of the whole. Unique: of the largest rank.
        nodes: That hold it; all if empty.
    """

    name: str
    kind: StateClass
    num_bytes: int
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRules:
    """What is asked for.

    Attributes:
        tolerance: How many nodes of a group may be lost, 1 or 2; 0 asks for nothing.
        preference: Of mechanisms.
        group_max: Nodes in a group. With two parities groups of 8 outlive pairs from 64 nodes
            on, at a third of their memory (simultaneous losses, research of this project).
        num_slots: Versions that are held at once.
        interval_s: Between versions: what travels must have arrived by then.
        parity_on_device: Whether parity over replicas is computed before it is copied.
    """

    tolerance: int = 1
    preference: Preference = Preference.AUTO
    group_max: int = 8
    num_slots: int = 3
    interval_s: float = 1.0
    parity_on_device: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Bytes of one version: sent over the network, kept in memory, copied from devices.

    Parity is rounded up to 64 bytes a block, which is not counted.
    """

    network_bytes: int = 0
    memory_bytes: int = 0
    d2h_bytes: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            network_bytes=self.network_bytes + other.network_bytes,
            memory_bytes=self.memory_bytes + other.memory_bytes,
            d2h_bytes=self.d2h_bytes + other.d2h_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """How one state is protected.

    Attributes:
        state: Which.
        mechanism: How.
        tolerance: Nodes of each group that may be lost.
        groups: Nodes that protect each other, in the order of ``Stripes``. Of a replicated
            state every group holds a whole copy.
        reason: Why this mechanism, in a line.
        costs: Of one version, by node.
        keepers: Of copies, by node: who keeps what it has.
    """

    state: State
    mechanism: Mechanism
    tolerance: int
    groups: Groups
    reason: str
    costs: Mapping[str, Cost]
    keepers: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The whole decision.

    Attributes:
        protections: One per state, in the order asked for.
        shared_racks: Racks of which a group with parities has more than one node, or that have
            two copies of the same: their loss may cost more than the tolerance.
    """

    protections: tuple[Protection, ...]
    shared_racks: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """Something that a node keeps for its group.

    Attributes:
        node: Who keeps it.
        parity: None for a copy; 0 for parity P and 1 for Q of a stripe.
        stripe: Of the parity, as in ``Stripes``; for a copy whose it is, by place in the group.
        of: The nodes whose bytes went into it, by member of the parity.
    """

    node: str
    parity: int | None
    stripe: int
    of: tuple[str, ...]


def place(
    nodes: Sequence[Node],
    states: Sequence[State],
    rules: PlacementRules,
    before: Placement | None = None,
) -> Placement:
    """Return how every state is to be protected.

    Memory is given to the states in their order. Tolerance is lowered where it cannot be had,
    and the reason says so.

    Args:
        nodes: All nodes of the run.
        states: The classes of state; small ones may come first, they get copies.
        rules: What is asked for.
        before: The placement until now; its groups change as little as can be.
    """
    known = {node.name: node for node in nodes}
    old = {each.state.name: each.groups for each in before.protections} if before else {}
    free = {node.name: node.headroom_bytes for node in nodes}
    protections: list[Protection] = []
    shared: set[str] = set()
    for state in states:
        members = [known[name] for name in state.nodes or sorted(known) if name in known]
        domains = {node.name: node.rack or node.name for node in members}
        sizes = {"size_min": rules.tolerance + 1, "size_max": rules.group_max}
        groups = form_groups(domains, **sizes)
        protection = _protect(state, groups, known, free, rules)
        if state.name in old:
            groups = adjust_groups(old[state.name], domains, **sizes)
            adjusted = _protect(state, groups, known, free, rules)
            # Staying together is worth some memory, but no tolerance.
            if adjusted.tolerance >= protection.tolerance:
                protection = adjusted
        shared |= set(_shared(protection, domains))
        for name, each in protection.costs.items():
            free[name] -= each.memory_bytes * rules.num_slots
        protections.append(protection)
    return Placement(protections=tuple(protections), shared_racks=tuple(sorted(shared)))


def survives(placement: Placement, lost_nodes: Collection[str]) -> bool:
    """Return whether the newest version can be read without ``lost_nodes``."""
    return level(placement, lost_nodes) >= 0


def level(placement: Placement, lost_nodes: Collection[str] = ()) -> int:
    """Return how many nodes, whichever, can be lost on top of ``lost_nodes``; -1 if lost by now."""
    lost = frozenset(lost_nodes)
    levels = []
    for each in placement.protections:
        of_groups = [_group_level(each, group, lost) for group in each.groups]
        if each.state.kind is StateClass.REPLICATED:
            # Every group has all of it: the last one must be lost.
            levels.append(sum(one + 1 for one in of_groups) - 1)
        else:
            levels.append(min(of_groups, default=-1))
    return min(levels, default=-1)


def cost(placement: Placement) -> dict[str, Cost]:
    """Return what one version costs each node."""
    costs: dict[str, Cost] = {}
    for each in placement.protections:
        for name, one in each.costs.items():
            costs[name] = costs.get(name, Cost()) + one
    return costs


def holdings(protection: Protection) -> tuple[Holding, ...]:
    """Return what each node keeps beside its own snapshots, or its share of a replicated state."""
    found = []
    for group in protection.groups:
        size = len(group)
        for at in range(size):
            if protection.mechanism in PARITIES:
                places = parity_places(at, num_nodes=size, num_parities=protection.tolerance)
                of = tuple(node for number, node in enumerate(group) if number not in places)
                found += [
                    Holding(node=group[place], parity=which, stripe=at, of=of)
                    for which, place in enumerate(places)
                ]
            else:
                found += [
                    Holding(node=keeper, parity=None, stripe=at, of=(group[at],))
                    for keeper in protection.keepers[group[at]]
                ]
    return tuple(found)


def changed_groups(before: Placement, after: Placement) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the groups, each with its state, whose redundancy must be made anew."""
    old = {
        (each.state.name, each.mechanism, each.tolerance, group)
        for each in before.protections
        for group in each.groups
    }
    return tuple(
        (each.state.name, group)
        for each in after.protections
        for group in each.groups
        if (each.state.name, each.mechanism, each.tolerance, group) not in old
    )


def _group_level(protection: Protection, group: tuple[str, ...], lost: frozenset[str]) -> int:
    if protection.mechanism in PARITIES:
        return max(-1, protection.tolerance - sum(node in lost for node in group))
    # Each part lies on its node and, as a copy, on others of the group.
    return min(
        sum(holder not in lost for holder in (node, *protection.keepers[node])) - 1
        for node in group
    )


def _shared(protection: Protection, domains: Mapping[str, str]) -> tuple[str, ...]:
    if protection.mechanism in PARITIES:
        return shared_domains(protection.groups, domains)
    holders = tuple((node, *keepers) for node, keepers in protection.keepers.items())
    return shared_domains(holders, domains)


def _protect(
    state: State,
    groups: Groups,
    nodes: Mapping[str, Node],
    free: Mapping[str, int],
    rules: PlacementRules,
) -> Protection:
    refused: list[str] = []
    domains = {name: node.rack or name for name, node in nodes.items()}
    smallest = min(map(len, groups), default=0)
    if smallest <= rules.tolerance:
        refused.append(f"tolerance {rules.tolerance} needs {rules.tolerance + 1} nodes")
    for tolerance in range(max(0, min(rules.tolerance, smallest - 1)), -1, -1):
        keepers = partners(groups, domains, tolerance)
        for mechanism in _candidates(state, groups, tolerance, rules.preference):
            costs = _costs(state, mechanism, tolerance, groups, keepers, nodes, rules)
            if why := _refusal(costs, nodes, free, rules):
                refused.append(f"{mechanism} for {tolerance} {why}")
                if tolerance:
                    continue
            worst = max((each.memory_bytes for each in costs.values()), default=0)
            sent = max((each.network_bytes for each in costs.values()), default=0)
            reason = f"{state.name}: {mechanism}, survives {tolerance} of {smallest} nodes"
            if state.num_bytes:
                reason += f", {sized(worst)} a node and version, {sized(sent)} sent"
            return Protection(
                state=state,
                mechanism=mechanism,
                tolerance=tolerance,
                groups=groups,
                reason="; ".join([reason, *refused]),
                costs=costs,
                keepers=keepers,
            )
    raise AssertionError("no redundancy is always a candidate")


def _candidates(
    state: State, groups: Groups, tolerance: int, preference: Preference
) -> list[Mechanism]:
    """Return the mechanisms for a tolerance, those first that recovery is fastest from."""
    if tolerance <= 0:
        return [Mechanism.NONE]
    sizes = [len(group) for group in groups]
    replicated = state.kind is StateClass.REPLICATED
    copies = [Mechanism.REDUNDANT_COPY if replicated else Mechanism.PARTNER_COPY]
    parities = []
    # With one data block in a stripe the parity is a copy.
    if min(sizes) >= tolerance + 2:
        if tolerance > 1:
            if max(sizes) <= _DOUBLE_NODES_MAX:
                parities.append(Mechanism.DOUBLE_PARITY)
        else:
            parities.append(Mechanism.REPLICA_PARITY if replicated else Mechanism.RING_PARITY)
    if preference is Preference.PARITY:
        return parities or copies
    return copies if preference is Preference.COPY else [*copies, *parities]


def _costs(
    state: State,
    mechanism: Mechanism,
    tolerance: int,
    groups: Groups,
    keepers: Mapping[str, tuple[str, ...]],
    nodes: Mapping[str, Node],
    rules: PlacementRules,
) -> dict[str, Cost]:
    costs: dict[str, Cost] = {}
    for group in groups:
        num_ranks = [nodes[name].num_ranks for name in group]
        for at, name in enumerate(group):
            kept = [place for place, other in enumerate(group) if name in keepers[other]]
            if state.kind is StateClass.REPLICATED:
                costs[name] = _cost_of_replica(
                    state, mechanism, tolerance, len(group), len(kept), rules
                )
            else:
                kept_ranks = sum(num_ranks[place] for place in kept)
                costs[name] = _cost_of_part(state, mechanism, tolerance, num_ranks, at, kept_ranks)
    return costs


def _cost_of_replica(
    state: State,
    mechanism: Mechanism,
    tolerance: int,
    size: int,
    num_kept: int,
    rules: PlacementRules,
) -> Cost:
    """Return a node's cost of a state that all ``size`` nodes of the group hold."""
    if mechanism in PARITIES:
        num_data = size - tolerance
        block = -(-state.num_bytes // (size * num_data))
        # On the host every block that goes into a parity is copied there first.
        copied = size if rules.parity_on_device else (tolerance + 1) * num_data
        return Cost(memory_bytes=size * block, d2h_bytes=copied * block)
    copies = (num_kept + 1) * -(-state.num_bytes // size)
    return Cost(memory_bytes=copies, d2h_bytes=copies)


def _cost_of_part(
    state: State,
    mechanism: Mechanism,
    tolerance: int,
    num_ranks: Sequence[int],
    at: int,
    kept_ranks: int,
) -> Cost:
    """Return the cost of the node at ``at`` of a group whose ranks have parts of their own."""
    own = state.num_bytes * num_ranks[at]
    sent = tolerance * own
    if mechanism in PARITIES:
        block = -(-state.num_bytes * max(num_ranks) // (len(num_ranks) - tolerance))
        return Cost(network_bytes=sent, memory_bytes=own + tolerance * block, d2h_bytes=own)
    memory = own + state.num_bytes * kept_ranks
    return Cost(network_bytes=sent, memory_bytes=memory, d2h_bytes=own)


def _refusal(
    costs: Mapping[str, Cost],
    nodes: Mapping[str, Node],
    free: Mapping[str, int],
    rules: PlacementRules,
) -> str:
    """Return why some node cannot bear its cost; "" if all can."""
    for name, each in sorted(costs.items()):
        node = nodes[name]
        memory = each.memory_bytes * rules.num_slots
        if memory > free[name]:
            return f"needs {sized(memory)} on {name[:8]}, {sized(max(0, free[name]))} are free"
        if node.link_bytes_per_s:
            send_s = each.network_bytes / node.link_bytes_per_s
            if send_s > rules.interval_s:
                return (
                    f"keeps the link of {name[:8]} busy {send_s:.2g} s of {rules.interval_s:.2g} s"
                )
        if node.d2h_bytes_per_s:
            copy_s = each.d2h_bytes / node.d2h_bytes_per_s
            if copy_s > rules.interval_s:
                return f"copies {copy_s:.2g} s of {rules.interval_s:.2g} s on {name[:8]}"
    return ""


def sized(num_bytes: int) -> str:
    """Return a number of bytes for people."""
    power = min(max(num_bytes.bit_length() - 1, 0) // 10, 4)
    return f"{num_bytes / (1 << 10 * power):.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
