"""The traffic of a run: over which links, for how long, and what a better plan would gain. Pure.

``topology`` has the links, ``flows`` what a step and the copies of snapshots send, ``maxmin`` the
rates that flows get, and ``plans`` compares orders of nodes, keepers of copies and equal-cost
paths. The paths of NCCL's own flows are not planned: its environment sets no source port, so only a
switch can do that (adaptive routing, or C4P's own allocation, arXiv 2406.04594).
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
