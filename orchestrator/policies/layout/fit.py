"""Compute how many workers a layout with given degrees uses on each node."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeAlias

from orchestrator.policies.layout.candidates import LayoutRules
from ucp_core.layout import ParallelLayout

#: ``(workers, nodes)``, ascending by workers: on so many nodes, so many workers could train each.
Rooms: TypeAlias = tuple[tuple[int, int], ...]


def rooms_of(workers: Iterable[int]) -> Rooms:
    """Return the rooms of nodes, given the number of workers on each node."""
    return tuple(sorted((room, num) for room, num in Counter(workers).items() if room))


def one_node(num: int) -> Rooms:
    """Return the rooms if all workers were on one node."""
    return rooms_of([num])


def num_workers(rooms: Rooms) -> int:
    """Return the number of workers in all rooms."""
    return sum(room * num for room, num in rooms)


def fit(
    degrees: ParallelLayout, rooms: Rooms, num_max: int, rules: LayoutRules
) -> ParallelLayout | None:
    """Return the largest layout with ``degrees`` of at most ``num_max`` workers; None if none fits.

    Each tensor-parallel group is within a node. Every degree of sharding is legal, because the
    numbers of micro-batches may be uneven, but every pipeline must be filled. Experts are cut in
    the configured number of ways or, unless that is fixed, in the most ways that divide it and the
    shards. A layout that was refused does not fit.
    """
    num_groups = sum(room // degrees.tp * num for room, num in rooms)
    dp_shard = min(num_groups, num_max // degrees.tp) // (degrees.world_size // degrees.tp)
    if degrees.pp > 1 and rules.num_micro_batches:
        # The largest number of data-parallel ranks of which each still has ``pp`` micro-batches.
        most = (rules.num_micro_batches - 1) // (degrees.pp - 1)
        dp_shard = min(dp_shard, most // degrees.dp_replicate)
    if "ep" in rules.fixed:
        dp_shard -= dp_shard % rules.ep
    ways = [ep for ep in range(rules.ep, 0, -1) if rules.ep % ep == 0 and rules.may("ep", ep)]
    # Fewer shards leave workers idle, so they are a last resort.
    for shards in sorted({dp_shard - dp_shard % ep for ep in ways}, reverse=True):
        for ep in (ep for ep in ways if shards and shards % ep == 0):
            layout = replace(degrees, dp_shard=shards, ep=ep)
            if not rules.refusal(layout):
                return layout
    return None


def spread(rooms: Sequence[int], layout: ParallelLayout, num_nodes: int = 1) -> list[int]:
    """Return how many workers train on each node, given the room on each, the best node first.

    Use few nodes, so that workers are near each other, but at least ``num_nodes`` if possible:
    snapshots on a single node would be lost with it.
    """
    room = [each // layout.tp for each in rooms]
    left = layout.world_size // layout.tp
    assert left <= sum(room), f"{layout} lacks workers of {sum(rooms)}"
    apart = [0] * len(room)
    for at in [at for at, each in enumerate(room) if each][: min(num_nodes, left)]:
        apart[at], left = 1, left - 1
    for at, each in enumerate(room):
        more = min(each - apart[at], left)
        apart[at], left = apart[at] + more, left - more
    return [each * layout.tp for each in apart]
