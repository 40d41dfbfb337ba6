"""Replicas in real processes on several nodes, of which one is lost: no data is sent."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from orchestrator.policies import (
    RedundancyFacts,
    RedundancyPlan,
    plan_redundancy,
)
from tests.support.attempts import settings, wait_for_steps
from tests.support.node_memory import NodeProcess, newest, read, whole_state
from tests.support.snapshots import eventually
from tests.support.trainers import Run
from ucp_core.layout import ParallelLayout
from ucp_core.native import checkpoint_name, open_checkpoint
from ucp_core.storage import LocalStore
from workers.memory import is_copy, is_guard
from workers.protocol import (
    GroupPlace,
    KeeperOrder,
    ParityGroup,
    PartRef,
    Yielded,
)
from workers.settings import CheckpointSettings, DataSettings, Settings, SnapshotSettings

NODES = ("node-a", "node-b", "node-c")

#: Makes so many nodes, with so many shards each.
MakeNodes = Callable[[Settings, int, int], list[NodeProcess]]


@pytest.fixture
def make_nodes(run: Run, tmp_path: Path) -> Iterator[MakeNodes]:
    """Nodes that know nothing of each other; no controller orders their keepers to copy."""
    made: list[NodeProcess] = []

    def make(chosen: Settings, num_nodes: int, num_shards: int) -> list[NodeProcess]:
        names = NODES[:num_nodes]
        made.extend(NodeProcess(node, tmp_path / node, run.directory, chosen) for node in names)
        run.nodes = [(node.node, node.directory) for node in made for _ in range(num_shards)]
        return made

    yield make
    for node in made:
        node.kill()


def _plan(layout: ParallelLayout, mechanism: Literal["auto", "copy", "parity"]) -> RedundancyPlan:
    """Return what the orchestrator would have replicas do, one on each node."""
    nodes = tuple(node for node in NODES[: layout.dp_replicate] for _ in range(layout.dp_shard))
    facts = RedundancyFacts(nodes=nodes, budgets_bytes={}, rank_bytes=0, layout=layout)
    return plan_redundancy(facts, SnapshotSettings(tolerance=1, mechanism=mechanism))


def _protect(nodes: Sequence[NodeProcess]) -> None:
    """Have the nodes' keepers complete the parities that their ranks make."""
    peers = {node.node: node.peer() for node in nodes}
    for node in nodes:
        places = tuple(
            GroupPlace(peer=None if other is node else peers[other.node], ranks=(rank,))
            for rank, other in enumerate(nodes)
        )
        group = ParityGroup(attempt=1, tolerance=1, places=places, over_replicas=True)
        node.order(KeeperOrder(attempt=1, lineage=((1, 0),), copies_of=(), parity=group))


def _stored(run: Run, step: int) -> dict[Any, bytes]:
    path = f"{run.directory}/checkpoints/{checkpoint_name(step)}"
    return whole_state(open_checkpoint(LocalStore(), path))


def _rarely_stored(data: DataSettings) -> Settings:
    return replace(
        settings(data, steps=10_000),
        checkpoint=CheckpointSettings(every_steps=10**6, keep=0),
        snapshot=SnapshotSettings(tolerance=1),
    )


def test_what_a_lost_node_had_is_in_the_other_ones_memory_to_the_bit(
    run: Run, text: DataSettings, make_nodes: MakeNodes
) -> None:
    """Each rank saves a quarter of the state and its counterpart's, and no keeper copies."""
    chosen = _rarely_stored(text)
    nodes = make_nodes(chosen, 2, 2)
    layout = ParallelLayout(dp_replicate=2, dp_shard=2)
    guards = _plan(layout, "auto").guards
    assert guards is not None
    members = run.begin(chosen, num_workers=4, layout=layout, guards=guards)
    wait_for_steps(run, 3)
    members[-1].yield_at_boundary(1, durable=True)
    (outcome,) = {one.left().outcome for one in members}
    assert isinstance(outcome, Yielded)
    state = _stored(run, outcome.step)

    nodes[1].kill()
    for member in members[2:]:
        member.process.kill()
    version, places = newest(nodes[:1])
    assert version == (outcome.step, 1)
    assert {place.held.rank: is_guard(place.arena) for place in places} == {
        0: False, 1: False, 2: True, 3: True,
    }  # fmt: skip
    sizes = [place.held.data_bytes for place in places]
    assert sum(sizes) == sum(map(len, state.values()))
    assert max(sizes) < 1.1 * min(sizes)
    assert read(places, nodes[0]) == state


def test_what_a_lost_node_had_is_computed_from_the_replicas_of_two(
    run: Run, text: DataSettings, make_nodes: MakeNodes
) -> None:
    """Each rank saves a third of the state and half as much of parity, and no keeper copies."""
    chosen = _rarely_stored(text)
    nodes = make_nodes(chosen, 3, 1)
    layout = ParallelLayout(dp_replicate=3)
    plan = _plan(layout, "parity")
    assert plan.rank_groups is not None
    _protect(nodes)
    members = run.begin(chosen, num_workers=3, layout=layout, parity=plan.rank_groups)
    wait_for_steps(run, 3)
    members[0].yield_at_boundary(1, durable=True)
    (outcome,) = {one.left().outcome for one in members}
    assert isinstance(outcome, Yielded)
    state = _stored(run, outcome.step)

    def left() -> list[PartRef]:
        places = [x for node in nodes[:2] for x in (*node.places(), *node.places(parities=True))]
        return [place for place in places if place.held.step == outcome.step]

    assert eventually(lambda: len(left()) == 4)
    nodes[2].kill()
    members[2].process.kill()
    places = tuple(left())
    assert not any(is_copy(place.arena) for place in places if place.held.rank >= 0)
    sizes = {place.held.rank: place.held.data_bytes for place in places}
    assert sizes.keys() == {0, 1, -1, -2}
    # The rest of a parity's data is room for records.
    assert sum(map(len, state.values())) / 3 * 1.1 > max(sizes[0], sizes[1])
    assert read(places, nodes[0]) == state
