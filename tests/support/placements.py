"""Computes the losses that a plan of redundancy over the network survives, from the plan alone."""

from collections.abc import Collection

from orchestrator.policies import RedundancyPlan
from workers.protocol import parity_places


def is_readable(plan: RedundancyPlan, nodes: Collection[str], lost: Collection[str]) -> bool:
    """Return whether every part on ``nodes`` can be had without the nodes ``lost``."""
    for group in plan.groups or tuple((node,) for node in nodes):
        size = len(group)
        for at, node in enumerate(group):
            if not plan.is_parity:
                if {node, *plan.keepers.get(node, ())} <= set(lost):
                    return False
                continue
            places = parity_places(at, num_nodes=size, tolerance=plan.tolerance)
            num_lost = sum(group[place] in lost for place in range(size) if place not in places)
            if num_lost > sum(group[place] not in lost for place in places):
                return False
    return True
