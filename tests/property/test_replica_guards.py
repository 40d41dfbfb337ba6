"""Assignment of shares to guards: any nodes that may be lost leave every share somewhere."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.policies import (
    Mechanism,
    RedundancyFacts,
    plan_redundancy,
)
from ucp_core.layout import ParallelLayout
from workers.settings import SnapshotSettings
from workers.state import replicas_of

LAYOUTS = st.builds(ParallelLayout, dp_replicate=st.integers(2, 5), dp_shard=st.integers(1, 3))


@given(LAYOUTS, st.integers(1, 2), st.lists(st.integers(0, 4), min_size=15), st.integers(1, 4))
def test_every_share_outlives_as_many_nodes_as_may_be_lost(
    layout: ParallelLayout, tolerance: int, places: list[int], num_racks: int
) -> None:
    """Whatever nodes the replicas are on; where they are on too few, keepers copy instead."""
    nodes = tuple(f"n{place}" for place in places[: layout.world_size])
    racks = {node: f"r{int(node[1:]) % num_racks}" for node in nodes}
    facts = RedundancyFacts(nodes=nodes, budgets_bytes={}, rank_bytes=1, layout=layout, racks=racks)
    plan = plan_redundancy(facts, SnapshotSettings(tolerance=tolerance, mechanism="auto"))

    shards = {replicas_of(layout, rank) for rank in range(layout.world_size)}
    is_spread = all(len({nodes[rank] for rank in shard}) > tolerance for shard in shards)
    assert (plan.mechanism is Mechanism.REDUNDANT_COPY) == is_spread
    if plan.guards is None:
        assert not is_spread
        return
    holders = {rank: {nodes[rank]} for rank in range(layout.world_size)}
    for rank, guarded in enumerate(plan.guards):
        assert rank not in guarded
        assert set(guarded) <= set(replicas_of(layout, rank))
        for other in guarded:
            holders[other].add(nodes[rank])
    for lost in combinations(sorted(set(nodes)), tolerance):
        assert all(held - set(lost) for held in holders.values())
    assert all(len(held) == tolerance + 1 for held in holders.values())
    if not plan.shared_racks:
        for lost in combinations(sorted(set(racks.values())), tolerance):
            assert all({racks[node] for node in held} - set(lost) for held in holders.values())


@given(LAYOUTS, st.integers(1, 2))
def test_replicas_on_nodes_of_their_own_save_alike_much(
    layout: ParallelLayout, tolerance: int
) -> None:
    """The slowest one holds up the step of all."""
    nodes = tuple(f"n{rank}" for rank in range(layout.world_size))
    facts = RedundancyFacts(nodes=nodes, budgets_bytes={}, rank_bytes=1, layout=layout)
    plan = plan_redundancy(facts, SnapshotSettings(tolerance=tolerance, mechanism="auto"))

    if layout.dp_replicate > tolerance:
        assert plan.guards is not None
        assert {len(guarded) for guarded in plan.guards} == {tolerance}
