"""Compare orders of nodes, keepers and equal-cost paths by the links that they fill.

Pure. Paths are chosen as in C4P (arXiv 2406.04594, 4.3): all uplinks of a rack get equal loads.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from math import inf

from orchestrator.traffic.flows import Flow
from orchestrator.traffic.maxmin import fill
from orchestrator.traffic.topology import Link, Topology, by_rack


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The load that flows put on the links."""

    took_s: float = 0.0  #: Time until all flows have arrived; infinity if some never do.
    #: How long each link is busy at full speed.
    busy_s: Mapping[Link, float] = field(default_factory=dict)

    @property
    def busiest(self) -> Link | None:
        """Return the link that is busy longest."""
        return max(self.busy_s, key=lambda link: self.busy_s[link], default=None)


def load_of(topology: Topology, phases: Iterable[Sequence[Flow]]) -> Load:
    """Return the load of phases of flows; phases run one after the other.

    A sum moves around its ring in lockstep, so a phase ends with its slowest flow. Overlap with
    other phases and with computation is ignored, so this is an upper bound.
    """
    took_s, busy_s = 0.0, defaultdict[Link, float](float)
    for flows in phases:
        parts = [part for flow in flows for part in _parts(topology, flow)]
        paths = [
            topology.path(each.source, each.target, each.rail, each.spine or 0) for each in parts
        ]
        capacities = {link: topology.capacity(link) for path in paths for link in path}
        for flow, path in zip(parts, paths, strict=True):
            for link in path:
                speed = capacities[link]
                busy_s[link] += flow.num_bytes / speed if speed else inf
        rates = fill(paths, capacities)
        times = (
            flow.num_bytes / rate if rate else inf for flow, rate in zip(parts, rates, strict=True)
        )
        took_s += max(times, default=0.0)
    return Load(took_s=took_s, busy_s=busy_s)


def _parts(topology: Topology, flow: Flow) -> list[Flow]:
    if flow.spine is not None or topology.rack(flow.source) == topology.rack(flow.target):
        return [flow]
    spines = topology.live_spines(flow.source, flow.target, flow.rail) or [0]
    return [flow._replace(num_bytes=flow.num_bytes / len(spines), spine=each) for each in spines]


def near_order(topology: Topology, nodes: Sequence[str]) -> list[str]:
    """Return the nodes by zone and rack, so that a ring leaves each zone and rack once."""
    return [node for found in by_rack(topology, nodes).values() for node in found]


def in_turn(topology: Topology, nodes: Sequence[str]) -> list[str]:
    """Return the nodes with one of each rack in turn, as an order that ignores racks may be."""
    turns = zip_longest(*by_rack(topology, nodes).values())
    return [node for turn in turns for node in turn if node is not None]


def choose_spines(topology: Topology, flows: Sequence[Flow]) -> list[Flow]:
    """Return the flows, each over the spine whose links have the least load so far.

    A flow without a live spine keeps the one that it has.
    """
    busy_s = defaultdict[Link, float](float)
    found: list[Flow] = []
    for flow in flows:
        ways = {
            spine: topology.path(flow.source, flow.target, flow.rail, spine)
            for spine in topology.live_spines(flow.source, flow.target, flow.rail)
        }
        if ways:
            best = min(ways, key=lambda each: max((busy_s[link] for link in ways[each]), default=0))
            flow = flow._replace(spine=best)  # noqa: PLW2901
            for link in ways[best]:
                if link.kind == "rack":
                    busy_s[link] += flow.num_bytes / topology.capacity(link)
        found.append(flow)
    return found


def way_cost(
    topology: Topology, busy_s: Mapping[Link, float], num_bytes: float
) -> Callable[[str, str], float]:
    """Return a function for the cost of a copy of ``num_bytes`` from one node to another.

    The cost is the load of training on the busiest link of the way, over the least busy spine, plus
    the time of the copy on the slowest link. Among equals the shorter way is cheaper.
    """

    def cost(source: str, target: str) -> float:
        ways = [
            topology.path(source, target, 0, spine)
            for spine in topology.live_spines(source, target)
        ]
        met_s = (
            max((busy_s.get(link, 0.0) for link in way), default=0.0)
            + max((num_bytes / topology.capacity(link) for link in way), default=0.0)
            for way in ways
        )
        return min(met_s, default=inf) + 1e-9 * (len(ways[0]) if ways else 0)

    return cost
