"""Compute how long a layout communicates on a topology, and how much orders and paths help."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from orchestrator.config import RunConfig
from orchestrator.errors import ConfigError
from orchestrator.policies import Job, RedundancyFacts, plan_redundancy, sent_bytes
from orchestrator.traffic import (
    Flow,
    Load,
    Topology,
    choose_spines,
    copy_flows,
    in_turn,
    load_of,
    near_order,
    step_flows,
    way_cost,
)
from ucp_core.layout import ParallelLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficRow:
    """A plan and its duration."""

    what: str  #: Sums and transfers of a step, or copies of a version.
    plan: str  #: Its description.
    took_s: float  #: Time in seconds, without the part that computation hides.
    busiest: str  #: The link that limits them; "" if nothing crosses the network.


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficPlan:
    """The traffic of a layout between nodes, by several plans."""

    layout: ParallelLayout
    rows: tuple[TrafficRow, ...]
    order: tuple[str, ...]  #: The best order of nodes for the ranks.
    keepers: dict[str, tuple[str, ...]]  #: By node, the nodes that keep copies of its snapshots.
    #: How many times as fast a step communicates as with one node of each rack in turn.
    gain: float
    #: How many times as fast copies arrive over all equal-cost paths as over one.
    copies_gain: float

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        return {**asdict(self), "layout": str(self.layout)}


def plan_traffic(
    config: RunConfig, job: Job, layout: ParallelLayout, node_size: int, state_bytes: int
) -> TrafficPlan | None:
    """Return the traffic of a layout over the links of ``topology``; None if it names no racks.

    There are ``node_size`` ranks on each node, and ``state_bytes`` is each rank's part of a
    version. Raise ``ConfigError`` if the topology has another number of nodes.
    """
    topology = config.topology.topology()
    if not topology.racks:
        return None
    names, num_nodes = list(topology.racks), layout.world_size // node_size
    if len(names) != num_nodes:
        raise ConfigError(
            f"topology.racks names {len(names)} nodes, and --gpus {num_nodes}: name as many"
        )
    sent = sent_bytes(layout, job)
    best = near_order(topology, names)
    orders = {"one node of each rack in turn": in_turn(topology, names), "rack by rack": best}
    loads: dict[str, Load] = {}
    for plan, order in orders.items():
        nodes = [node for node in order for _ in range(node_size)]
        loads[plan] = load_of(topology, step_flows(layout, nodes, sent, topology.rails).values())
    facts = RedundancyFacts(
        nodes=tuple(node for node in best for _ in range(node_size)),
        budgets_bytes={},
        rank_bytes=state_bytes,
        racks=topology.racks if config.cluster.rack_label else {},
        met=way_cost(topology, loads["rack by rack"].busy_s, num_bytes=node_size * state_bytes),
    )
    keepers = plan_redundancy(facts, config.snapshot).keepers
    flows = copy_flows(keepers, dict.fromkeys(names, node_size * state_bytes))
    copies = _copies(topology, flows)
    return TrafficPlan(
        layout=layout,
        rows=(*_rows("a step", loads), *_rows("copies", copies)),
        order=tuple(best),
        keepers=keepers,
        gain=_gain(loads),
        copies_gain=_gain(copies),
    )


def _copies(topology: Topology, flows: Sequence[Flow]) -> dict[str, Load]:
    """Return how long copies take with one stream each, and with one on each path."""
    if not flows:
        return {}
    one, num = [flow._replace(spine=0) for flow in flows], topology.spines
    parts = [flow._replace(num_bytes=flow.num_bytes / num) for flow in flows for _ in range(num)]
    return {
        "one stream each, all by one path": load_of(topology, [one]),
        "streams by all paths": load_of(topology, [choose_spines(topology, parts)]),
    }


def _rows(what: str, loads: dict[str, Load]) -> list[TrafficRow]:
    return [
        TrafficRow(what=what, plan=plan, took_s=load.took_s, busiest=str(load.busiest or ""))
        for plan, load in loads.items()
    ]


def _gain(loads: dict[str, Load]) -> float:
    """Return how many times as fast the last of the plans is as the first."""
    times = [load.took_s for load in loads.values()]
    return times[0] / times[-1] if times and times[-1] else 1.0
