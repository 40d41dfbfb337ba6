"""Flows over the network: the sums and transfers of a step, and copies of snapshots. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, permutations
from typing import Final, NamedTuple

from ucp_core.layout import AXES, ParallelLayout
from workers.protocol import GroupState

#: Axes along which ranks send. With expert parallelism, experts have their own shards.
FLOW_AXES: Final = (*AXES, "efsdp", "ep")
#: Axes that form one group with another axis: they cut the same tensors further, or the samples of
#: the same weights.
_TOGETHER: Final = {"dp_shard": {"cp"}, "efsdp": {"cp", "tp"}}
#: Significant digits of measured values; smaller changes are not reported.
_DIGITS: Final = 2


class Sent(NamedTuple):
    """The state of a rank's groups after a step."""

    step: int
    groups: Sequence[GroupState]


class Flow(NamedTuple):
    """Bytes from one node to another."""

    source: str
    target: str
    num_bytes: float
    rail: int = 0
    spine: int | None = None  #: None if spread evenly over all spines.


def step_flows(
    layout: ParallelLayout, nodes: Sequence[str], sent: Mapping[str, float], rails: int = 1
) -> dict[str, list[Flow]]:
    """Return what each axis sends between nodes in a step.

    All-reduces use rings in the order of ranks, as in gloo and NCCL. Stages send activations
    forward and gradients back. Ranks with experts send tokens to each other. Traffic through
    several ranks of a node uses all of their rails.

    Args:
        nodes: The node of each rank.
        sent: Bytes that each rank sends in a step, by axis of ``FLOW_AXES``; for ``pp`` both ways
            together.
    """
    local, seen = list[int](), Counter[str]()
    for node in nodes:
        local.append(seen[node] % rails)
        seen[node] += 1
    found: dict[str, list[Flow]] = {}
    for axis in FLOW_AXES:
        if not sent.get(axis) or (axis in ("efsdp", "ep") and layout.ep == 1):
            continue
        flows = found.setdefault(axis, [])
        for first in range(layout.world_size):
            group = layout.ranks_along(first, {axis, *_TOGETHER.get(axis, ())})
            if group[0] != first:
                continue
            pairs, num_targets = _pairs(axis, group)
            each = sent[axis] / num_targets
            for one, other in pairs:
                if nodes[one] != nodes[other]:
                    used = {local[rank] for rank in group if nodes[rank] == nodes[one]}
                    flows += [
                        Flow(nodes[one], nodes[other], each / len(used), rail)
                        for rail in sorted(used)
                    ]
    return found


def _pairs(axis: str, group: Sequence[int]) -> tuple[list[tuple[int, int]], int]:
    """Return the pairs (sender, receiver) in a group, and to how many others each rank sends."""
    if axis == "pp":
        return [*pairwise(group), *pairwise(reversed(group))], 2
    if axis == "ep":
        return list(permutations(group, 2)), len(group) - 1
    return list(zip(group, (*group[1:], group[0]), strict=True)), 1


def measured(ranks: Iterable[tuple[Sent, Sent]]) -> dict[str, float]:
    """Return how many bytes a rank sent in a step, by axis, in the form for ``step_flows``.

    ``ranks`` has the records of each rank at two times. Ranks that completed no step in between, or
    left, are ignored.
    """
    sums, num_ranks = defaultdict[str, float](float), 0
    for before, after in ranks:
        if after.step <= before.step or not after.groups:
            continue
        num_ranks += 1
        known = {group.group: group.sent_bytes for group in before.groups}
        for group in after.groups:
            axis = next((axis for axis in FLOW_AXES if group.group.startswith(axis)), "")
            sent = group.sent_bytes - known.get(group.group, 0)
            sums[axis] += sent / (after.step - before.step)
    means = {axis: sums[axis] / num_ranks for axis in FLOW_AXES if sums[axis]}
    return {axis: float(f"{mean:.{_DIGITS - 1}e}") for axis, mean in means.items()}


def copy_flows(
    keepers: Mapping[str, Sequence[str]], num_bytes: Mapping[str, float], spine: int | None = None
) -> list[Flow]:
    """Return the copies of a version: from each node to those that keep its snapshots.

    ``num_bytes`` is the size of each node's part of the version.
    """
    return [
        Flow(node, keeper, num_bytes[node], spine=spine)
        for node, names in keepers.items()
        for keeper in names
    ]
