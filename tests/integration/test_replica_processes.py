"""Replicas in real processes on two nodes, of which one is lost: nothing crosses the network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.policies.redundancy import RedundancyFacts, plan_redundancy
from tests.support.attempts import lines, settings, wait_for_steps
from tests.support.node_memory import NodeProcess, newest, read, whole_state
from tests.support.trainers import Run, Trainer
from ucp_core.checkpoint import (
    checkpoint_name,
    open_checkpoint,
)
from ucp_core.layout import ParallelLayout
from ucp_core.storage import LocalStore
from workers.keeper.retention import is_guard
from workers.protocol import Completed, Yielded
from workers.snapshot.placement import Preference
from workers.train.settings import CheckpointSettings, DataSettings, Settings, SnapshotSettings

NODES = ("node-a", "node-b")

MakeNodes = Callable[[Settings, int], list[NodeProcess]]


@pytest.fixture
def make_nodes(run: Run, tmp_path: Path) -> Iterator[MakeNodes]:
    """Two nodes that know nothing of each other; nobody orders their keepers to copy."""
    made: list[NodeProcess] = []

    def make(chosen: Settings, num_shards: int) -> list[NodeProcess]:
        made.extend(NodeProcess(node, tmp_path / node, run.directory, chosen) for node in NODES)
        run.nodes = [(node.node, node.directory) for node in made for _ in range(num_shards)]
        return made

    yield make
    for node in made:
        node.kill()


def _begin(run: Run, chosen: Settings, *, num_shards: int) -> list[Trainer]:
    """Start two replicas, one on each node, as the orchestrator would."""
    layout = ParallelLayout(dp_replicate=len(NODES), dp_shard=num_shards)
    nodes = tuple(node for node in NODES for _ in range(num_shards))
    facts = RedundancyFacts(nodes=nodes, budgets_bytes={}, rank_bytes=0, layout=layout)
    plan = plan_redundancy(facts, tolerance=1, preference=Preference.AUTO)
    assert plan.guards is not None
    return run.begin(chosen, num_workers=len(nodes), layout=layout, guards=plan.guards)


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
    nodes = make_nodes(chosen, 2)
    members = _begin(run, chosen, num_shards=2)
    wait_for_steps(run, 3)
    members[-1].yield_at_boundary(1, durable=True)
    (outcome,) = {one.left().outcome for one in members}
    assert isinstance(outcome, Yielded)
    name = checkpoint_name(outcome.step)
    stored = open_checkpoint(LocalStore(), f"{run.directory}/checkpoints/{name}")
    state = whole_state(stored)

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


def test_training_goes_on_from_one_node_when_the_other_is_lost_in_a_step(
    run: Run, text: DataSettings, make_nodes: MakeNodes
) -> None:
    """In the middle of a snapshot too: each share is whole on both nodes, or the one before is."""
    chosen = _rarely_stored(text)
    nodes = make_nodes(chosen, 1)
    staying, leaving = _begin(run, chosen, num_shards=1)
    wait_for_steps(run, 4)
    nodes[1].kill()
    leaving.process.kill()
    staying.fence(1)
    staying.left()

    (step, attempt), places = newest(nodes[:1])
    taken = [line["step"] for line in lines(run) if line["snapshot"] == "taken"]
    assert attempt == 1
    assert step >= taken[-2]
    left = run.train(
        replace(chosen, train=replace(chosen.train, steps=step + 2)),
        num_workers=1,
        resume=(step, attempt),
        memory=places,
    )
    (one,) = left
    assert one.outcome == Completed(attempt=2, step=step + 2)
    # Whether the last step was snapshot before depends on when the node went.
    kinds = {kind for kind, size in one.sources if size}
    assert kinds in ({"local memory"}, {"live state"})
    assert [line["step"] for line in lines(run) if line["attempt"] == 2] == [step + 1, step + 2]
