"""What a placement of redundancy survives, from who keeps what alone."""

from __future__ import annotations

from collections.abc import Collection

from workers.placement import PARITIES, parity_places
from workers.placement.plan import Placement


def is_readable(placement: Placement, lost: Collection[str]) -> bool:
    """Return whether every part can be had without the nodes ``lost``."""
    for group in placement.groups:
        size = len(group)
        for at, node in enumerate(group):
            if placement.mechanism not in PARITIES:
                if {node, *placement.keepers[node]} <= set(lost):
                    return False
                continue
            places = parity_places(at, num_nodes=size, num_parities=placement.tolerance)
            num_lost = sum(group[place] in lost for place in range(size) if place not in places)
            if num_lost > sum(group[place] not in lost for place in places):
                return False
    return True
