"""Plan how to protect an attempt's snapshots, given the memory that keepers reported."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, repeat
from math import inf
from typing import TypeAlias

from orchestrator.core.actions import OrderKeepers
from orchestrator.core.consequences import KeepersOutdated
from orchestrator.core.events import MemoryMeasured, MemoryProtected
from orchestrator.core.handlers import fleet
from orchestrator.core.state import Node
from orchestrator.core.transition import Transition
from orchestrator.policies import RedundancyFacts, RedundancyPlan, plan_redundancy, revise
from orchestrator.traffic import FLOW_AXES, Link, Topology, load_of, step_flows, way_cost
from ucp_core.layout import ParallelLayout

#: Nodes, each with its members, in rank order.
Placed: TypeAlias = Sequence[tuple[int, tuple[int, ...]]]


def plan(transition: Transition, placed: Placed, layout: ParallelLayout | None) -> RedundancyPlan:
    """Return how to protect the snapshots of an attempt whose members are ``placed``."""
    return plan_redundancy(_facts(transition, placed, layout), transition.rules.snapshot)


def memory_measured(transition: Transition, event: MemoryMeasured) -> None:
    """Note the memory that keepers reported, and the size of a version."""
    run = transition.run
    run.state_bytes = event.state_bytes
    for name, budget_bytes in event.budgets:
        number = run.fleet.node_ids.get(name)
        node = None if number is None else run.fleet.nodes[number]
        if number is not None and node is not None and node.budget_bytes != budget_bytes:
            # No count of the fleet depends on this, so ``put_node`` is not needed.
            run.fleet.nodes = run.fleet.nodes.set(number, node._replace(budget_bytes=budget_bytes))


def memory_measured_training(transition: Transition, event: MemoryMeasured) -> None:
    """Revise a plan that was not final before memory was measured."""
    memory_measured(transition, event)
    attempt = transition.run.attempt
    if transition.run.state_bytes and not attempt.plan.is_final:
        facts = _facts(transition, attempt.placed, attempt.layout)
        attempt.plan = revise(attempt.plan, facts, transition.rules.snapshot)
        transition.follow(KeepersOutdated())


def memory_protected(transition: Transition, event: MemoryProtected) -> None:
    """End keepers that hold only older versions, even if storage does not have this one."""
    if event.attempt == transition.run.attempt.number:
        fleet.end_needless_keepers(transition)


def order_keepers(transition: Transition, _: KeepersOutdated) -> None:
    """Give the attempt's keepers the new plan and the bad sources."""
    run = transition.run
    transition.actions.append(
        OrderKeepers(
            attempt=run.attempt.number,
            lineage=run.lineage,
            nodes=tuple(run.fleet.nodes[number].name for number in run.attempt.nodes),
            plan=run.attempt.plan,
            bad=run.bad,
        )
    )


def _facts(
    transition: Transition, placed: Placed, layout: ParallelLayout | None
) -> RedundancyFacts:
    run = transition.run
    used = [run.fleet.nodes[number] for number, _ in placed]
    names = (repeat(node.name, len(on)) for node, (_, on) in zip(used, placed, strict=True))
    nodes = (*chain.from_iterable(names),)
    return RedundancyFacts(
        nodes=nodes,
        budgets_bytes={node.name: node.budget_bytes for node in used if node.budget_bytes},
        rank_bytes=-(-run.state_bytes // len(nodes)),
        layout=layout,
        racks={node.name: node.rack for node in used if node.rack},
        met=_met(transition, used, nodes, layout),
    )


def _met(
    transition: Transition,
    used: Sequence[Node],
    nodes: Sequence[str],
    layout: ParallelLayout | None,
) -> Callable[[str, str], float] | None:
    """Return the cost of a copy on each way between nodes; None if all ways are alike.

    Until the traffic of a step is measured, each axis counts as much as the copy.
    """
    run, known = transition.run, transition.rules.topology
    if layout is None or (known is None and not run.network.slow):
        return None
    topology = replace(
        known or Topology(racks={}, node_bytes_s=inf),
        racks={node.name: node.rack for node in used if node.rack},
        slow={_link(sender, receiver): rate for sender, receiver, rate in run.network.slow},
    )
    sent = dict(run.sent) or dict.fromkeys(FLOW_AXES, 1.0)
    copy_bytes = run.state_bytes / len(used) if run.sent else 0.0
    flows = step_flows(layout, nodes, sent, topology.rails)
    return way_cost(
        topology, load_of(topology, flows.values()).busy_s, num_bytes=max(1.0, copy_bytes)
    )


def _link(sender: str, receiver: str) -> Link:
    if sender and receiver:
        return Link("pair", f"{sender} to {receiver}", is_out=True)
    return Link("node", sender or receiver, is_out=bool(sender))
