"""Zones, racks, nodes and rails, and the links on the way from one node to another. Pure.

A node has a network card for each rail. The switches of a rack have, for each rail, as many uplinks
as there are spines; all of them lead to all other racks at equal cost. Zones are joined by one link
each. A link has two directions, which do not share its capacity.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple


class Link(NamedTuple):
    """One direction of a link."""

    #: ``node``, ``rack`` or ``zone``; ``pair`` is the way between two nodes, if no more is known
    #: about what is slow.
    kind: str
    name: str  #: The node, rack or zone, or both nodes.
    is_out: bool  #: Whether it leads out of that place.
    rail: int = 0  #: The rail, for a node or rack.
    spine: int = 0  #: The spine, for a rack.

    def __str__(self) -> str:
        place = {"node": f", rail {self.rail}", "rack": f", rail {self.rail}, spine {self.spine}"}
        way = "out of" if self.is_out else "into"
        return f"{way} {self.kind} {self.name}{place.get(self.kind, '')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Where nodes are, and how many bytes a second each link carries one way."""

    racks: Mapping[str, str]  #: Rack by node. A node that is not listed is alone in a rack.
    node_bytes_s: float  #: Capacity of a node's card on each rail.
    #: Zone by rack. Racks that are not listed are in one zone.
    zones: Mapping[str, str] = field(default_factory=dict)
    rails: int = 1  #: Cards of a node. Rank i of a node uses rail i.
    uplink_bytes_s: float = inf  #: Capacity from a rack to each spine, for each rail.
    spines: int = 1  #: Equal-cost paths between two racks.
    zone_bytes_s: float = inf  #: Capacity between a zone and all others.
    #: Links with another capacity; 0 for a link that is gone.
    slow: Mapping[Link, float] = field(default_factory=dict)

    def rack(self, node: str) -> str:
        """Return the rack of a node; the node itself if unknown."""
        return self.racks.get(node, node)

    def zone(self, node: str) -> str:
        """Return the zone of a node; "" if unknown."""
        return self.zones.get(self.rack(node), "")

    def path(self, source: str, target: str, rail: int = 0, spine: int = 0) -> tuple[Link, ...]:
        """Return the links from one node to another in order, on a rail and over a spine."""
        if source == target:
            return ()
        ends = Link("node", source, True, rail), Link("node", target, False, rail)
        pair = Link("pair", f"{source} to {target}", True)
        slow = [pair] if pair in self.slow else []
        racks = self.rack(source), self.rack(target)
        if racks[0] == racks[1]:
            return (ends[0], *slow, ends[1])
        way = [
            *slow,
            Link("rack", racks[0], True, rail, spine),
            Link("rack", racks[1], False, rail, spine),
        ]
        zones = self.zone(source), self.zone(target)
        if zones[0] != zones[1]:
            way[-1:-1] = [Link("zone", zones[0], True), Link("zone", zones[1], False)]
        return (ends[0], *way, ends[1])

    def capacity(self, link: Link) -> float:
        """Return the capacity of a link in bytes a second."""
        usual = {
            "node": self.node_bytes_s,
            "rack": self.uplink_bytes_s,
            "zone": self.zone_bytes_s,
            "pair": inf,
        }
        return self.slow.get(link, usual[link.kind])

    def live_spines(self, source: str, target: str, rail: int = 0) -> list[int]:
        """Return the spines over which data can arrive."""
        return [
            spine
            for spine in range(self.spines)
            if all(self.capacity(link) > 0 for link in self.path(source, target, rail, spine))
        ]


def by_rack(topology: Topology, nodes: Sequence[str]) -> dict[str, list[str]]:
    """Return nodes by rack, the racks of a zone together, otherwise in the given order."""
    zones = {zone: at for at, zone in enumerate(dict.fromkeys(map(topology.zone, nodes)))}
    found: dict[str, list[str]] = {}
    for node in sorted(nodes, key=lambda each: zones[topology.zone(each)]):
        found.setdefault(topology.rack(node), []).append(node)
    return found
