"""How an attempt's snapshots are protected against lost nodes: by copies, by parity, or not.

Pure. If data-parallel replicas on other nodes hold the same state, workers save each other's shares
from their own memory, and nothing is sent. With three nodes or more they may save a parity instead,
which takes 1/(n-1) of the memory of a copy. Otherwise keepers protect each other over the network.
On a slow network that takes fewer snapshots.

The plan uses the mechanism with the fastest recovery that memory and the number of nodes allow:
copies before parity, because a copy is only read, while a parity needs a computation from a whole
group. The tolerance counts nodes; it also holds for racks if ``shared_racks`` is empty. The speed
of the network does not matter: for a given tolerance, copies and parities send the same bytes.

REFT's third protection, optimizer recomputation, is not used: gradients are a third of AdamW's
bytes, but logging them gains less than a snapshot every third step (measured on 4 workers), and
recomputed state is not always bit-identical.

Source: the protections of REFT (arXiv 2310.12670), with two parities, unequal parts and any number
of nodes; partner copies of GEMINI (SOSP 2023); XOR sets of SCR.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from orchestrator.policies.saving.groups import (
    Groups,
    form_groups,
    holders,
    partners,
    shared_domains,
)
from ucp_core.layout import ParallelLayout
from workers.protocol import Inventory
from workers.settings import AUTO, SnapshotSettings
from workers.state import replicas_of

#: A parity over one other node's data would be a copy of it.
_PARITY_NODES_MIN = 3
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RedundancyFacts:
    """An attempt, and what its keepers reported."""

    nodes: tuple[str, ...]  #: The node of every member, by rank.
    #: Bytes that snapshots may use, by node. For a node that has not reported it, the smallest of
    #: the others counts.
    budgets_bytes: Mapping[str, int]
    rank_bytes: int  #: Bytes of the largest rank's part of a version; 0 before the first.
    #: Shows which ranks hold the same state; None if unknown.
    layout: ParallelLayout | None = None
    #: Rack or zone that a node fails together with, by node, if known.
    racks: Mapping[str, str] = field(default_factory=dict)
    #: Returns the cost of a copy from one node to another, given training's traffic; None if
    #: unknown. Among keepers that protect equally well, the cheapest is chosen.
    met: Callable[[str, str], float] | None = None
    #: The workers' order to save for each other: a copy, a parity, or nothing (``NONE``); None if
    #: they have no order yet.
    told: Mechanism | None = None
    #: Whether keepers that protect each other may replace a copy that workers were ordered to save,
    #: if there is no room for it.
    is_open: bool = False
    #: Largest number of nodes in a group. From 64 nodes on, groups of 8 with two parities survive
    #: longer than pairs, at a third of their memory.
    group_max: int = 8
    num_buffers: int = 3  #: How many versions keepers hold at the same time.


@dataclass(frozen=True, slots=True, kw_only=True)
class RedundancyPlan:
    """How snapshots are protected."""

    mechanism: Mechanism = Mechanism.NONE
    tolerance: int = 0  #: How many nodes of each group may be lost; 0 for no protection.
    groups: Groups = ()  #: Nodes that protect each other.
    reason: str = ""  #: The reason, for people.
    #: False if the plan must be revised once a snapshot shows its size: workers that were ordered
    #: to save each other's shares may have no room for them.
    is_final: bool = True
    #: By node, the other nodes whose keepers copy its snapshots over the network.
    keepers: dict[str, tuple[str, ...]] = field(default_factory=dict)
    #: By rank, the ranks whose shares it saves besides its own; None if keepers protect each
    #: other's snapshots.
    guards: tuple[tuple[int, ...], ...] | None = None
    #: By rank, the ranks of its group in order. They keep parities of each other's shares from
    #: their own replicas; None if they keep none.
    rank_groups: tuple[tuple[int, ...], ...] | None = None
    shared_racks: tuple[str, ...] = ()  #: Racks whose loss may cost more than the tolerance.

    @property
    def is_parity(self) -> bool:
        """Return whether groups keep parities."""
        return self.mechanism in PARITIES

    @property
    def is_by_workers(self) -> bool:
        """Return whether workers, not keepers, protect each other's shares."""
        return self.guards is not None or self.rank_groups is not None

    def copies_of(self, node: str) -> tuple[str, ...]:
        """Return the nodes whose snapshots the keeper of ``node`` copies."""
        return tuple(other for other, keepers in self.keepers.items() if node in keepers)

    def group_of(self, node: str) -> tuple[str, ...]:
        """Return the group of a node, in its order; () if it is in none."""
        return next((group for group in self.groups if node in group), ())


def plan_redundancy(facts: RedundancyFacts, wish: SnapshotSettings) -> RedundancyPlan:
    """Return how to protect the snapshots of an attempt."""
    if not wish.tolerance or not facts.nodes:
        return RedundancyPlan(reason="no protection is configured (snapshot.tolerance: 0)")
    found = _over_replicas(facts, wish)
    if isinstance(found, RedundancyPlan):
        return found
    plan = _over_network(facts, wish)
    return replace(plan, reason=f"{plan.reason}; {found}") if found else plan


def revise(plan: RedundancyPlan, facts: RedundancyFacts, wish: SnapshotSettings) -> RedundancyPlan:
    """Return the plan of an attempt that trains by ``plan``, now that more is known.

    Its workers continue as ordered if there is room. Otherwise their keepers protect each other.
    """
    is_by_workers = plan.is_by_workers
    told = plan.mechanism if is_by_workers else Mechanism.NONE
    found = plan_redundancy(replace(facts, told=told, is_open=is_by_workers), wish)
    if is_by_workers and found.is_by_workers:
        return replace(plan, reason=found.reason, is_final=found.is_final)
    return found


def _over_network(facts: RedundancyFacts, wish: SnapshotSettings) -> RedundancyPlan:
    """Return the plan by which keepers send each other what their ranks wrote."""
    domains = _domains(facts)
    groups = form_groups(domains, size_min=wish.tolerance + 1, size_max=facts.group_max)
    smallest = min(map(len, groups))
    if wish.mechanism == AUTO and not facts.rank_bytes and smallest > wish.tolerance + 1:
        reason = "copies or parity: decided when the first snapshot shows its size"
        return RedundancyPlan(reason=reason, is_final=False)
    refused: list[str] = []
    if smallest <= wish.tolerance:
        refused.append(f"tolerance {wish.tolerance} needs {wish.tolerance + 1} nodes")
    for tolerance in range(min(wish.tolerance, smallest - 1), -1, -1):
        keepers = partners(groups, domains, tolerance, facts.met)
        for mechanism in _candidates(groups, tolerance, wish.mechanism):
            need_bytes = version_bytes(facts, mechanism, tolerance, groups, keepers)
            if why := _refusal(facts, need_bytes):
                refused.append(f"{mechanism} for {tolerance} {why}")
                if tolerance:
                    continue
            reason = f"snapshots: {mechanism}, for the loss of {tolerance} of {smallest} nodes"
            if facts.rank_bytes:
                # Each copy is sent whole; with parities each byte is sent once per parity.
                sent = tolerance * facts.rank_bytes * max(Counter(facts.nodes).values())
                reason += f", {_size(need_bytes)}, {sized(sent)} sent"
            is_parity = mechanism in PARITIES
            held_by = tuple((node, *others) for node, others in keepers.items())
            return RedundancyPlan(
                mechanism=mechanism,
                tolerance=tolerance,
                groups=groups if tolerance else (),
                reason="; ".join([reason, *refused]),
                keepers={} if is_parity else keepers,
                shared_racks=shared_domains(groups if is_parity else held_by, domains),
            )
    raise AssertionError("no redundancy is always a candidate")


def _candidates(groups: Groups, tolerance: int, wished: str) -> list[Mechanism]:
    """Return the mechanisms for a tolerance, fastest recovery first."""
    if not tolerance:
        return [Mechanism.NONE]
    sizes = [len(group) for group in groups]
    copies, parities = [Mechanism.PARTNER_COPY], list[Mechanism]()
    # With one data block in a stripe, the parity would be a copy.
    if min(sizes) >= tolerance + 2:
        if tolerance == 1:
            parities.append(Mechanism.RING_PARITY)
        elif max(sizes) <= _DOUBLE_NODES_MAX:
            parities.append(Mechanism.DOUBLE_PARITY)
    if wished == "parity":
        return parities or copies
    return copies if wished == "copy" else [*copies, *parities]


def version_bytes(
    facts: RedundancyFacts,
    mechanism: Mechanism,
    tolerance: int,
    groups: Groups,
    keepers: Mapping[str, Sequence[str]],
) -> dict[str, int]:
    """Return how many bytes of a version each node keeps, its own parts included.

    Parity blocks are rounded up to 64 bytes, which is not counted.
    """
    num_ranks = Counter(facts.nodes)
    found: dict[str, int] = {}
    for group in groups:
        most_bytes = facts.rank_bytes * max(num_ranks[name] for name in group)
        block_bytes = -(-most_bytes // max(1, len(group) - tolerance))
        for name in group:
            kept_bytes = tolerance * block_bytes
            if mechanism not in PARITIES:
                copied = (num_ranks[other] for other in group if name in keepers[other])
                kept_bytes = facts.rank_bytes * sum(copied)
            found[name] = facts.rank_bytes * num_ranks[name] + kept_bytes
    return found


def _over_replicas(facts: RedundancyFacts, wish: SnapshotSettings) -> RedundancyPlan | str:
    """Return the plan that sends nothing, or why there is none; "" without replicas."""
    layout = facts.layout
    if layout is None or layout.dp_replicate == 1 or layout.world_size != len(facts.nodes):
        return ""
    if facts.told is Mechanism.NONE:
        return "the replicas of this attempt were not told to save each other's shares"
    if facts.told is Mechanism.REPLICA_PARITY:
        return _replica_parity(facts, wish, layout)
    copies = _redundant_copies(facts, wish, layout)
    is_refused = isinstance(copies, str)
    # Between two nodes a parity would be a copy.
    is_large = len(set(facts.nodes)) >= _PARITY_NODES_MIN
    wants_parity = wish.mechanism == "parity" and is_large
    may_be_parity = wants_parity or (is_refused and wish.mechanism != "copy")
    if facts.told is Mechanism.REDUNDANT_COPY or not may_be_parity:
        return copies
    parity = _replica_parity(facts, wish, layout)
    if not is_refused:
        return parity
    if isinstance(parity, RedundancyPlan):
        return replace(parity, reason=f"{parity.reason}; {copies}")
    return f"{copies}; {parity}"


def _redundant_copies(
    facts: RedundancyFacts, wish: SnapshotSettings, layout: ParallelLayout
) -> RedundancyPlan | str:
    """Return the plan by which workers save each other's shares, or why they cannot."""
    is_free = facts.told is None or facts.is_open
    tolerance, domains = wish.tolerance, _domains(facts)
    guards: list[list[int]] = [[] for _ in facts.nodes]
    num_shares, num_kept = Counter(facts.nodes), Counter[int]()
    held_by: list[tuple[str, ...]] = []
    for rank, node in enumerate(facts.nodes):
        replicas = replicas_of(layout, rank)
        place = replicas.index(rank)
        others = holders(
            rank,
            [*reversed(replicas[:place]), *reversed(replicas[place + 1 :])],
            node_of=facts.nodes.__getitem__,
            domains=domains,
            num_kept=num_kept,
            copies=tolerance,
        )
        if len(others) < tolerance:
            return (
                f"no {Mechanism.REDUNDANT_COPY} of replicas: those of some shard are on fewer than "
                f"{tolerance + 1} nodes"
            )
        for other in others:
            guards[other].append(rank)
            num_shares[facts.nodes[other]] += 1
        held_by.append((node, *(facts.nodes[other] for other in others)))
    need_bytes = {name: number * facts.rank_bytes for name, number in num_shares.items()}
    if is_free and (refusal := _refusal(facts, need_bytes)):
        return f"{Mechanism.REDUNDANT_COPY} of replicas {refusal}"
    return RedundancyPlan(
        mechanism=Mechanism.REDUNDANT_COPY,
        tolerance=tolerance,
        groups=tuple(dict.fromkeys(tuple(sorted(nodes)) for nodes in held_by)),
        reason=(
            f"snapshots: {Mechanism.REDUNDANT_COPY}, {layout.dp_replicate} replicas save a share "
            f"each and those of {tolerance} others, for the loss of {tolerance} nodes, "
            f"{_size(need_bytes)}, 0 B sent"
        ),
        is_final=bool(facts.rank_bytes) or not is_free,
        guards=tuple(map(tuple, guards)),
        shared_racks=shared_domains(tuple(held_by), domains),
    )


def _replica_parity(
    facts: RedundancyFacts, wish: SnapshotSettings, layout: ParallelLayout
) -> RedundancyPlan | str:
    """Return the plan by which workers keep parities from their own replicas, or why not."""
    what = Mechanism.REPLICA_PARITY
    if wish.tolerance > 1:
        return f"{what} survives 1 node"
    groups = _like_groups(facts, layout)
    if groups is None:
        return f"no {what}: nodes have replicas of other shards, or they are fewer than 3"
    rank_groups: dict[int, tuple[int, ...]] = {}
    for group in groups:
        by_place = [[rank for rank, at in enumerate(facts.nodes) if at == name] for name in group]
        for ranks_alike in map(tuple, zip(*by_place, strict=True)):
            rank_groups |= dict.fromkeys(ranks_alike, ranks_alike)
    num_ranks = Counter(facts.nodes)
    need_bytes = {
        name: num_ranks[name] * (facts.rank_bytes + -(-facts.rank_bytes // (len(group) - 1)))
        for group in groups
        for name in group
    }
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
        shared_racks=shared_domains(groups, _domains(facts)),
    )


def _like_groups(facts: RedundancyFacts, layout: ParallelLayout) -> Groups | None:
    """Return groups of nodes whose first ranks hold the same state, whose second do, and so on.

    Return None if that is impossible, or if a group would be too small for a parity to pay.
    """
    held: dict[str, list[int]] = {name: [] for name in facts.nodes}
    for rank, name in enumerate(facts.nodes):
        # The first rank that holds a state stands for that state.
        held[name].append(replicas_of(layout, rank)[0])
    alike: dict[tuple[int, ...], list[str]] = {}
    for name, states in held.items():
        alike.setdefault(tuple(states), []).append(name)
    domains = _domains(facts)
    groups: list[tuple[str, ...]] = []
    for names in alike.values():
        if len(names) < _PARITY_NODES_MIN:
            return None
        groups += form_groups(
            {name: domains[name] for name in names},
            size_min=_PARITY_NODES_MIN,
            size_max=facts.group_max,
        )
    return tuple(groups)


def _refusal(facts: RedundancyFacts, need_bytes: Mapping[str, int]) -> str:
    """Return, for people, which node lacks memory for versions of these sizes; "" if none."""
    known = facts.budgets_bytes
    least_bytes = min(known.values(), default=sys.maxsize)
    for name, size_bytes in need_bytes.items():
        all_bytes, free_bytes = facts.num_buffers * size_bytes, known.get(name, least_bytes)
        if all_bytes > free_bytes:
            return f"needs {sized(all_bytes)} on {name[:8]}, {sized(free_bytes)} are free"
    return ""


def _size(need_bytes: Mapping[str, int]) -> str:
    most = max(need_bytes.values())
    return f"{sized(most)} a node and version" if most else "of unknown size"


def sized(num_bytes: int) -> str:
    """Return a number of bytes for people."""
    power = min(max(num_bytes.bit_length() - 1, 0) // 10, 4)
    return f"{num_bytes / (1 << 10 * power):.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def _domains(facts: RedundancyFacts) -> dict[str, str]:
    return {name: facts.racks.get(name, name) for name in dict.fromkeys(facts.nodes)}


def state_bytes(inventories: Iterable[Inventory]) -> int:
    """Return the size of a version over all ranks, from the newest one that keepers hold."""
    held = [part.held for inventory in inventories for part in inventory.parts]
    newest = max(((each.attempt, each.step) for each in held), default=None)
    sizes = [
        (each.data_bytes + each.record_bytes) * each.world_size
        for each in held
        if (each.attempt, each.step) == newest
    ]
    # Together the ranks hold the whole state, whatever their number.
    return max(sizes, default=0)
