"""Real training processes whose attempt ends between two snapshots: what they still have counts."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import train_halted
from tests.support.attempts import WAIT_S_MAX, finish, lines, reset, result, settings
from tests.support.node_memory import NodeProcess, newest
from tests.support.snapshots import eventually
from tests.support.trainers import Run, Trainer
from ucp_core.layout import ParallelLayout
from workers.protocol import Completed, Fenced, PeerLost, Raised
from workers.settings import (
    CheckpointSettings,
    DataSettings,
    RunSettings,
    Settings,
    SnapshotSettings,
)

EVERY = 5


@pytest.fixture
def places(tmp_path: Path) -> Path:
    """Return the folder where the script looks whether it is to halt."""
    made = tmp_path / "places"
    made.mkdir()
    return made


@pytest.fixture
def chosen(places: Path) -> Settings:
    """Return settings under which memory has every fifth step and storage none."""
    return replace(
        settings(DataSettings(source=str(places)), steps=12, deterministic=True),
        checkpoint=CheckpointSettings(every_steps=10**6, keep=0),
        snapshot=SnapshotSettings(every_steps=EVERY, tolerance=0),
        run=RunSettings(directory="run", script=str(Path(train_halted.__file__))),
    )


@pytest.fixture
def node(run: Run, chosen: Settings, tmp_path: Path) -> Iterator[NodeProcess]:
    """Return the memory of a node."""
    made = NodeProcess("node-a", tmp_path / "node-a", run.directory, chosen)
    run.nodes = [(made.node, made.directory)]
    yield made
    made.kill()


def halted(run: Run, chosen: Settings, places: Path, **how: Any) -> list[Trainer]:
    """Begin an attempt that stands behind step 8, with a gradient half done."""
    (places / train_halted.BEHIND_STEP).touch()
    members = run.begin(chosen, num_workers=2, **how)
    # Rank 0 writes down a step before the script goes on, and the others may be later still.
    marks = [train_halted.mark_of(places, rank) for rank in range(2)]
    assert eventually(lambda: all(mark.exists() for mark in marks), within_s=WAIT_S_MAX)
    return members


def test_nothing_is_lost_when_an_attempt_ends_whose_ranks_all_live(
    run: Run, chosen: Settings, node: NodeProcess, places: Path
) -> None:
    """The newest snapshot is three steps old, and the fence lets no rank reach the next one."""
    finish(run, chosen, num_workers=2)
    undisturbed = result(run)["weights_digest"]
    reset(run)
    members = halted(run, chosen, places)
    for member in members:
        member.fence(2)
    (places / train_halted.BEHIND_STEP).unlink()
    outcomes = [member.left().outcome for member in members]
    assert outcomes == [Fenced(attempt=2, step=train_halted.STEP)] * 2

    version, memory = newest([node])
    assert version == (train_halted.STEP, 2)
    left = run.train(chosen, num_workers=3, resume=version, memory=memory)

    assert [one.outcome for one in left] == [Completed(attempt=3, step=12)] * 3
    assert {kind for one in left for kind, _ in one.sources} == {"live state"}
    assert result(run)["weights_digest"] == undisturbed
    assert [(line["step"], line["attempt"]) for line in lines(run)] == [
        (step, 2 if step <= train_halted.STEP else 3) for step in range(1, 13)
    ]


def test_what_a_killed_rank_had_alone_is_not_made_up_for(
    run: Run, chosen: Settings, node: NodeProcess, places: Path
) -> None:
    """The survivor leaves its half of step 8, and must not do so at the cost of step 5."""
    members = halted(run, chosen, places)
    members[1].process.kill()
    members[1].process.join()
    (places / train_halted.BEHIND_STEP).unlink()
    outcome = members[0].left().outcome

    assert isinstance(outcome, PeerLost), outcome
    assert {place.held.step for place in node.places()} == {EVERY, train_halted.STEP}
    version, memory = newest([node])
    assert version == (EVERY, 1)
    (left,) = run.train(chosen, num_workers=1, resume=version, memory=memory)
    assert left.outcome == Completed(attempt=2, step=12)
    assert dict(left.sources).keys() == {"local memory"}


def test_what_a_killed_replica_had_the_other_one_leaves_for_it(
    run: Run, chosen: Settings, node: NodeProcess, places: Path
) -> None:
    """Each saves half of the state and takes the other half along, also on its way out."""
    layout = ParallelLayout(dp_replicate=2)
    members = halted(run, chosen, places, layout=layout, guards=((1,), (0,)))
    members[1].process.kill()
    members[1].process.join()
    (places / train_halted.BEHIND_STEP).unlink()
    members[0].left()

    version, memory = newest([node])
    assert version == (train_halted.STEP, 1)
    (left,) = run.train(chosen, num_workers=1, resume=version, memory=memory)
    assert left.outcome == Completed(attempt=2, step=12)
    assert dict(left.sources).keys() == {"live state"}


def test_a_state_within_an_update_is_left_by_no_rank(
    run: Run, chosen: Settings, node: NodeProcess, places: Path
) -> None:
    """Its weights are of step 8 and its numbers of step 7; all ranks have it alike."""
    (places / train_halted.UPDATE).touch()
    left = run.train(chosen, num_workers=2)

    assert all(isinstance(one.outcome, Raised) for one in left), left
    assert {place.held.step for place in node.places()} == {EVERY}


def test_weights_that_the_script_has_changed_since_are_left_by_no_rank(
    run: Run, chosen: Settings, node: NodeProcess, places: Path
) -> None:
    """They are of no step, and another rank may leave its own as they were before."""
    (places / train_halted.CHANGED).touch()
    members = halted(run, chosen, places)
    for member in members:
        member.fence(1)
    (places / train_halted.BEHIND_STEP).unlink()

    outcomes = [member.left().outcome for member in members]
    assert outcomes == [Fenced(attempt=1, step=train_halted.STEP)] * 2
    assert {place.held.step for place in node.places()} == {EVERY}
