"""A run's traffic: over which links, for how long, and what a better plan would gain. Pure.

``topology`` has the links, ``flows`` the bytes of a step and of copied snapshots, ``maxmin`` the
rates of flows. ``plans`` compares orders of nodes, keepers of copies and equal-cost paths. The
paths of NCCL's own flows cannot be planned: its environment sets no source port, so only a switch
can choose them (adaptive routing, or C4P's allocation, arXiv 2406.04594).
"""

from orchestrator.traffic.flows import (
    FLOW_AXES,
    Flow,
    Sent,
    copy_flows,
    measured,
    step_flows,
)
from orchestrator.traffic.maxmin import fill
from orchestrator.traffic.plans import (
    Load,
    choose_spines,
    in_turn,
    load_of,
    near_order,
    way_cost,
)
from orchestrator.traffic.topology import Link, Topology
