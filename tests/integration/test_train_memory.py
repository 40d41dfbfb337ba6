"""Real training processes whose states go into the memory of a keeper in another process."""

import functools
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.policies.bad_sources import on_node
from tests.support import copying_lane, train_late_state, train_paced
from tests.support.attempts import (
    WAIT_S_MAX,
    finish,
    lines,
    reset,
    result,
    settings,
    wait_for_steps,
)
from tests.support.attempts import newest as newest_stored
from tests.support.node_memory import NodeProcess, newest, read, whole_state
from tests.support.snapshots import eventually
from tests.support.trainers import Run
from ucp_core.layout import ParallelLayout
from ucp_core.native import checkpoint_name, open_checkpoint
from ucp_core.storage import LocalStore
from workers.memory import descriptor_socket, open_arena
from workers.protocol import (
    Completed,
    KeeperOrder,
    Pace,
    PartRef,
    Unloadable,
    Yielded,
)
from workers.settings import (
    BestSettings,
    CheckpointSettings,
    DataSettings,
    ModelSettings,
    RunSettings,
    Settings,
    SnapshotSettings,
)

NODES = ("node-a", "node-b")

MakeNodes = Callable[..., list[NodeProcess]]


@pytest.fixture
def make_nodes(run: Run, tmp_path: Path) -> Iterator[MakeNodes]:
    made: list[NodeProcess] = []

    def make(chosen: Settings, *, num_nodes: int = 1, copies: bool = False) -> list[NodeProcess]:
        made.extend(
            NodeProcess(node, tmp_path / node, run.directory, chosen) for node in NODES[:num_nodes]
        )
        run.nodes = [(node.node, node.directory) for node in made]
        if copies:
            tell_peers(run, made)
        return made

    yield make
    for node in made:
        node.kill()


def tell_peers(run: Run, nodes: list[NodeProcess]) -> None:
    """Have every node copy what all others write, in the attempt that comes next."""
    for node in nodes:
        others = tuple(other.peer() for other in nodes if other is not node)
        attempt = len(run.lineage) + 1
        lineage = (*run.lineage, (attempt, 0))
        node.order(KeeperOrder(attempt=attempt, lineage=lineage, copies_of=others))


def rarely_stored(
    data: DataSettings, *, steps: int = 6, tolerance: int = 0, **train: Any
) -> Settings:
    """Return settings under which only memory has the steps between."""
    return replace(
        settings(data, steps=steps, **train),
        checkpoint=CheckpointSettings(every_steps=10**6, keep=0),
        snapshot=SnapshotSettings(tolerance=tolerance),
    )


def stored_steps(run: Run) -> list[int]:
    manifests = run.directory.glob("checkpoints/*/manifest.json")
    return sorted(int(path.parent.name[5:]) for path in manifests)


def leave(run: Run, chosen: Settings, *, after: int, durable: bool, **how: Any) -> int:
    """Train the next attempt for some steps, have it leave, and return the step it left at."""
    before = len(lines(run)) if (run.directory / "metrics/rank0.jsonl").exists() else 0
    members = run.begin(chosen, **how)
    wait_for_steps(run, before + after)
    members[-1].yield_at_boundary(len(run.lineage), durable=durable)
    outcomes = [member.left().outcome for member in members]
    assert all(isinstance(outcome, Yielded) for outcome in outcomes), outcomes
    (step,) = {outcome.step for outcome in outcomes if isinstance(outcome, Yielded)}
    return step


def test_steps_go_to_memory_and_the_keeper_stores_those_that_are_due(
    run: Run, text: DataSettings, make_nodes: MakeNodes
) -> None:
    """The trainers themselves write the last step only; of the others they do not even know."""
    chosen = replace(settings(text, steps=40), checkpoint=CheckpointSettings(every_steps=10))
    nodes = make_nodes(chosen)
    finish(run, chosen, num_workers=2)

    (step, attempt), _ = newest(nodes)
    assert (step, attempt) == newest_stored(run) == (40, 1)
    told = [line["snapshot"] for line in lines(run)]
    assert told.count("taken") > 20
    assert set(told) <= {"none", "taken", "skipped"}
    stored = {int(path.name[5:]) for path in (run.directory / "checkpoints").iterdir()}
    assert len(stored - {40}) >= 1, "the keeper stored nothing"


@pytest.mark.chaos
def test_a_best_step_that_storage_lacks_is_stored_before_training_continues(
    run: Run, text: DataSettings, make_nodes: MakeNodes
) -> None:
    """The attempt ended while it waited for storage, and the next one has it from memory."""
    chosen = rarely_stored(text, steps=12, validation_every=1)
    best = BestSettings(value="validation_loss")
    chosen = replace(chosen, checkpoint=replace(chosen.checkpoint, best=best))
    nodes = make_nodes(chosen)
    left = leave(run, chosen, after=3, durable=False, num_workers=2)
    (step, attempt), memory = newest(nodes)
    assert step == left == stored_steps(run)[-1], "it was not best"
    shutil.rmtree(run.directory / "checkpoints" / checkpoint_name(left))

    finish(run, chosen, num_workers=2, resume=(step, attempt), memory=memory)

    assert left in stored_steps(run)
    assert result(run)["best"]["step"] in stored_steps(run)


def test_all_ranks_keep_the_pace_of_the_first(
    run: Run, text: DataSettings, make_nodes: MakeNodes
) -> None:
    """They would wait for each other forever if one of them stored what others do not."""
    chosen = rarely_stored(text, steps=10_000)
    make_nodes(chosen)
    members = run.begin(chosen, num_workers=2)
    wait_for_steps(run, 3)
    members[0].keep_pace(1, Pace(snapshot_steps=4, checkpoint_steps=6))
    assert eventually(lambda: len(stored_steps(run)) >= 6, within_s=WAIT_S_MAX)
    stored = stored_steps(run)
    members[0].yield_at_boundary(1, durable=False)
    outcomes = [member.left().outcome for member in members]

    assert all(isinstance(outcome, Yielded) for outcome in outcomes), outcomes
    *before, _ = [line["step"] for line in lines(run) if line["snapshot"] == "taken"]
    # A version due for storage while storage is busy is stored late, on a step of neither interval.
    late = [step for step in before if step > stored[0] and step % 4]
    for steps in (stored, late):
        assert all(one // 6 < next_one // 6 for one, next_one in pairwise(steps)), steps


def test_what_memory_holds_is_bit_for_bit_what_storage_holds(
    run: Run, text: DataSettings, make_nodes: MakeNodes
) -> None:
    """A step that is left durably is in both; they must be the same version."""
    chosen = rarely_stored(text, steps=10_000)
    (node,) = make_nodes(chosen)
    step = leave(run, chosen, after=3, durable=True, num_workers=4)

    version, places = newest([node])
    assert version == newest_stored(run) == (step, 1)
    stored = open_checkpoint(LocalStore(), f"{run.directory}/checkpoints/step-{step:08d}")
    assert read(places, node) == whole_state(stored)


def test_growing_and_shrinking_through_memory_changes_no_bit(
    run: Run, text: DataSettings, make_nodes: MakeNodes
) -> None:
    """The state goes through keepers, from own node and from others, and never through storage."""
    chosen = rarely_stored(text, deterministic=True, steps=12)
    finish(run, chosen, num_workers=2)
    undisturbed = result(run)["weights_digest"]
    reset(run)
    nodes = make_nodes(chosen, num_nodes=2)
    resume = (0, 0)
    memory: tuple[PartRef, ...] = ()
    for num_workers in (4, 3):
        step = leave(
            run, chosen, after=3, durable=False, num_workers=num_workers, resume=resume,
            memory=memory,
        )  # fmt: skip
        resume, memory = newest(nodes)
        assert resume == (step, len(run.lineage))
        assert not (run.directory / "checkpoints").exists()
    members = run.begin(chosen, num_workers=5, resume=resume, memory=memory)
    left = [member.left() for member in members]

    assert all(isinstance(one.outcome, Completed) for one in left), left
    kinds = {kind for one in left for kind, size in one.sources if size}
    assert kinds == {"local memory", "peer memory"}
    assert result(run)["weights_digest"] == undisturbed
    assert [line["step"] for line in lines(run)] == list(range(1, 13))


@pytest.mark.parametrize("layout", [ParallelLayout(dp_shard=2), ParallelLayout(pp=2)], ids=str)
def test_a_state_that_leaves_beside_the_next_step_is_that_of_its_own(
    layout: ParallelLayout, run: Run, text: DataSettings, make_nodes: MakeNodes
) -> None:
    """The state of a stage leaves in shares, with its passes; workers are killed meanwhile."""
    place: dict[str, Any] = {"num_workers": 2, "layout": layout}
    chosen = rarely_stored(text, deterministic=True, steps=16, global_batch=32)
    chosen = replace(chosen, model=ModelSettings(preset="small", tied=False))
    finish(run, chosen, **place)
    undisturbed = result(run)["weights_digest"]
    reset(run)
    (node,) = make_nodes(chosen)
    for trainer in run.trainers:
        trainer.close()
    run.trainers.clear()
    run.begin_with = functools.partial(copying_lane.install, run.directory)
    resume = (0, 0)
    memory: tuple[PartRef, ...] = ()
    for num_steps in (4, 10):
        members = run.begin(chosen, **place, resume=resume, memory=memory)
        wait_for_steps(run, num_steps)
        for member in members:
            member.process.kill()
            member.process.join()
        run.trainers.clear()
        resume, memory = newest([node])
    left = run.train(chosen, **place, resume=resume, memory=memory)

    assert all(isinstance(one.outcome, Completed) for one in left), left
    assert result(run)["weights_digest"] == undisturbed
    shares = copying_lane.releases(run.directory)
    assert len(shares) == 6
    # Before there was a step to count passes of, all of it left at once.
    assert all((max(of_rank) > 1) == (layout.pp > 1) for of_rank in shares), shares


def test_a_flipped_bit_is_found_and_the_copy_on_another_node_is_loaded(
    run: Run, text: DataSettings, make_nodes: MakeNodes
) -> None:
    """The header of the buffer is whole, and says that the version is."""
    chosen = rarely_stored(text, steps=10_000)
    nodes = make_nodes(chosen, num_nodes=2, copies=True)
    step = leave(run, chosen, after=3, durable=False, num_workers=2)
    resume = (step, 1)

    def places() -> list[PartRef]:
        held = [place for node in nodes for place in node.places()]
        return [place for place in held if (place.held.step, place.held.attempt) == resume]

    deadline_s = time.monotonic() + WAIT_S_MAX
    while len(places()) < 4:
        assert time.monotonic() < deadline_s, "the other node does not copy"
    for number, node in enumerate(nodes):
        (own,) = [place for place in node.places() if place in places() and "/" not in place.arena]
        arena = open_arena(descriptor_socket(node.directory), own.arena)
        at = own.held.data_bytes - 5 if number else own.held.data_bytes + 20
        arena.body(own.held.buffer)[at] ^= 4
        arena.close()
    left = run.train(
        replace(chosen, train=replace(chosen.train, steps=step + 2)),
        num_workers=2,
        resume=resume,
        memory=tuple(places()),
    )

    assert [one.outcome for one in left] == [Completed(attempt=2, step=step + 2)] * 2
    assert all(dict(one.sources)["peer memory"] for one in left)
    assert all("damaged" in line for one in left for line in one.skipped)
    assert all(one.skipped for one in left)


def test_a_damaged_version_without_a_copy_is_loaded_by_no_rank(
    run: Run, text: DataSettings, make_nodes: MakeNodes
) -> None:
    """Only one rank's part is damaged; all have to leave, and the older version is still whole."""
    chosen = rarely_stored(text, steps=10_000)
    (node,) = make_nodes(chosen)
    step = leave(run, chosen, after=3, durable=False, num_workers=2)
    (resume, memory) = newest([node])
    assert resume == (step, 1)
    place = next(place for place in memory if place.held.rank == 1)
    arena = open_arena(descriptor_socket(node.directory), place.arena)
    body = np.frombuffer(arena.body(place.held.buffer), np.uint8)
    body[: place.held.data_bytes] ^= 1
    bad = place.source
    left = run.train(chosen, num_workers=2, resume=resume, memory=memory)

    outcomes = [one.outcome for one in left]
    assert [type(outcome) for outcome in outcomes] == [Unloadable] * 2
    found = {
        source for one in outcomes if isinstance(one, Unloadable) for source in one.found.damaged
    }
    assert found == {bad}
    order = KeeperOrder(attempt=3, lineage=run.lineage, copies_of=(), bad=on_node(found, node.node))
    node.order(order)
    (older, memory) = newest([node])
    assert 0 < older[0] < step
    left = run.train(
        replace(chosen, train=replace(chosen.train, steps=step)),
        num_workers=2,
        resume=older,
        memory=memory,
    )
    assert [one.outcome for one in left] == [Completed(attempt=3, step=step)] * 2
    assert next(line["step"] for line in lines(run) if line["attempt"] == 3) == older[0] + 1


def test_a_version_of_another_model_in_memory_is_no_bad_one(
    run: Run, text: DataSettings, make_nodes: MakeNodes
) -> None:
    """It counted as unreadable, and a model with fewer layers took what it knew of it."""
    chosen = rarely_stored(text, steps=10_000)
    nodes = make_nodes(chosen)
    step = leave(run, chosen, after=3, durable=False, num_workers=2)
    (resume, memory) = newest(nodes)
    others = {
        "which the model lacks": ModelSettings(preset="tiny", num_layers=1),
        ", 64] in it, needed is": ModelSettings(preset="tiny", dim=128),
    }
    for what, model in others.items():
        left = run.train(replace(chosen, model=model), num_workers=2, resume=resume, memory=memory)
        for one in left:
            assert isinstance(one.outcome, Unloadable)
            found = one.outcome.found
            assert any(what in line for line in found.misfits), found
            assert (found.damaged, found.unread) == ((), ())
    chosen = replace(chosen, train=replace(chosen.train, steps=step + 1))
    finish(run, chosen, num_workers=2, resume=resume, memory=memory)


def test_without_memory_the_trainers_store_as_they_did(
    run: Run, text: DataSettings, make_nodes: MakeNodes
) -> None:
    """One node has no memory left for one worker: then no worker's snapshot is useful."""
    chosen = settings(text, steps=6)
    small = replace(chosen, snapshot=SnapshotSettings(node_memory_mib=1))
    make_nodes(small)
    finish(run, small, num_workers=2)

    assert {line["snapshot"] for line in lines(run)} == {"none"}
    stored = sorted(int(path.name[5:]) for path in (run.directory / "checkpoints").iterdir())
    assert stored == [1, 2, 3, 4, 5, 6]


def test_a_state_that_changed_its_form_is_left_with_through_storage(
    run: Run, tmp_path: Path, make_nodes: MakeNodes
) -> None:
    """Its memory was laid out for another: no rank can take the snapshot that it would leave by."""
    may_go_on = tmp_path / "may-go-on"
    chosen = replace(
        rarely_stored(DataSettings(source=str(may_go_on)), steps=100),
        run=RunSettings(directory="run", script=str(Path(train_late_state.__file__))),
    )
    (node,) = make_nodes(chosen)
    members = run.begin(chosen, num_workers=2)
    wait_for_steps(run, train_late_state.LATE_STEP - 1)
    for member in members:
        member.yield_at_boundary(1, durable=False)
    may_go_on.touch()
    outcomes = [member.left().outcome for member in members]

    assert outcomes == [Yielded(attempt=1, step=train_late_state.LATE_STEP)] * 2
    assert newest_stored(run) == (train_late_state.LATE_STEP, 1)
    (step, _), _ = newest([node])
    assert step < train_late_state.LATE_STEP


def test_no_node_takes_more_than_a_step_along_though_the_attempt_has_just_begun(
    run: Run, text: DataSettings, make_nodes: MakeNodes
) -> None:
    """Memory and who copies it are got in the background; until then nothing would be held.

    Ranks wait for that for a step at most: here one so long that it is enough on any machine, and
    that leaves the processor to those who are waited for.
    """
    chosen = replace(
        rarely_stored(text, steps=10_000, tolerance=1),
        # Two workers need twice as long as four.
        run=RunSettings(directory="run", script=train_paced.__file__, arguments=("2.0",)),
    )
    nodes = make_nodes(chosen, num_nodes=2, copies=True)
    members = run.begin(chosen, num_workers=2)
    wait_for_steps(run, 2)
    for member in members:
        member.process.kill()
        member.process.join()
    run.trainers.clear()

    first, second, *_ = lines(run)
    assert first["snapshot"] == "taken"
    assert (first["waited_s"], second["waited_s"] > 0) == (0, True)
    for lost, left in (nodes, nodes[::-1]):
        (step, _), _ = newest([left])
        assert step >= first["step"], f"{lost.node} takes the whole attempt along"
