"""Operations of processes on checkpoints, and facts that must hold wherever they die."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from tests.support.checkpoints import State, assert_loaded, save, small_state, whole_need
from tests.support.failing_store import World
from ucp_core.conversion import convert
from ucp_core.errors import CheckpointNotFoundError
from ucp_core.inspection import verify
from ucp_core.native import (
    checkpoint_name,
    collect_garbage,
    find_committed,
    load,
    open_checkpoint,
    try_commit,
)
from ucp_core.storage import join

_OLD, _NEW, _OTHER = small_state(1), small_state(2), small_state(3)


class Script(ABC):
    """An operation of a process, and the facts that must hold whatever became of it."""

    num_changes_min: int  #: Fewer would mean that not every change was counted.
    lineage: Sequence[tuple[int, int]] = ((1, 0),)  #: Lineage of the run.

    def prepare(self, world: World) -> None:
        """Make the version before."""
        save(world.store, _OLD, step=5, root=world.root)

    @abstractmethod
    def act(self, world: World) -> None:
        """Do what may be cut short, from wherever it was left."""

    @abstractmethod
    def check(self, world: World, *, done: bool) -> None:
        """Look at the storage as a new process does."""

    def found(self, world: World, by_version: Mapping[tuple[int, int], State]) -> tuple[int, int]:
        """Return (step, attempt) of the checkpoint to resume from, of which each bit is right."""
        found = find_committed(world.store, world.root, lineage=self.lineage)
        assert found is not None
        assert verify(found.checkpoint) == []
        need = whole_need(by_version[found.step, found.attempt])
        load(found.checkpoint, need)
        assert_loaded(by_version[found.step, found.attempt], need)
        return found.step, found.attempt


class Save(Script):
    """Two ranks save the next step."""

    num_changes_min = 7

    def act(self, world: World) -> None:
        save(world.store, _NEW, step=6, root=world.root)

    def check(self, world: World, *, done: bool) -> None:
        step, _ = self.found(world, {(5, 1): _OLD, (6, 1): _NEW})
        assert step == 6 or not done


class SaveAgain(Script):
    """A new attempt saves a step that a fenced one has committed: other data, the same step."""

    num_changes_min = 7
    lineage = ((1, 0), (2, 5))

    def prepare(self, world: World) -> None:
        super().prepare(world)
        save(world.store, _OTHER, step=6, root=world.root)

    def act(self, world: World) -> None:
        save(world.store, _NEW, step=6, attempt=2, root=world.root)

    def check(self, world: World, *, done: bool) -> None:
        version = self.found(world, {(5, 1): _OLD, (6, 2): _NEW})
        assert version == (6, 2) or not done
        # Whichever manifest is there tells of its own data, and of all of it.
        made = open_checkpoint(world.store, join(world.root, checkpoint_name(6)))
        state = {1: _OTHER, 2: _NEW}[made.attempt]
        need = whole_need(state)
        load(made, need)
        assert_loaded(state, need)


class Commit(Script):
    """Any process commits what the ranks left behind."""

    num_changes_min = 1

    def prepare(self, world: World) -> None:
        super().prepare(world)
        save(world.store, _NEW, step=6, root=world.root)
        world.store.delete(join(world.root, checkpoint_name(6), "manifest.json"))

    def act(self, world: World) -> None:
        directory = join(world.root, checkpoint_name(6))
        assert try_commit(world.store, directory, step=6, attempt=1, world_size=2)

    def check(self, world: World, *, done: bool) -> None:
        step, _ = self.found(world, {(5, 1): _OLD, (6, 1): _NEW})
        assert step == 6 or not done


class Collect(Script):
    """Three of five versions go."""

    num_changes_min = 10
    steps = (2, 3, 4, 5, 6)

    def prepare(self, world: World) -> None:
        for step in self.steps:
            save(world.store, small_state(step), step=step, root=world.root)

    def act(self, world: World) -> None:
        collect_garbage(world.store, world.root, keep=2, lineage=self.lineage, grace_s=0.0)

    def check(self, world: World, *, done: bool) -> None:
        names = world.store.list(world.root)
        assert names[-2:] == ("step-00000005", "step-00000006")
        assert len(names) == 2 or not done
        for step in self.steps:
            try:
                checkpoint = open_checkpoint(world.store, join(world.root, checkpoint_name(step)))
            except CheckpointNotFoundError:
                assert step < 5
                continue
            # A checkpoint that can still be opened is whole.
            assert verify(checkpoint) == []
            need = whole_need(small_state(step))
            load(checkpoint, need)
            assert_loaded(small_state(step), need)


class Convert(Script):
    """A checkpoint becomes a universal one beside it."""

    num_changes_min = 10

    def act(self, world: World) -> None:
        source = open_checkpoint(world.store, join(world.root, checkpoint_name(5)))
        if not world.store.exists(join(world.root, "universal/manifest.json")):
            convert(
                source,
                world.store,
                join(world.root, "universal"),
                memory_bytes=16 << 20,
                processes=1,
            )

    def check(self, world: World, *, done: bool) -> None:
        self.found(world, {(5, 1): _OLD})
        try:
            made = open_checkpoint(world.store, join(world.root, "universal"))
        except CheckpointNotFoundError:
            assert not done
            return
        assert verify(made) == []
        assert made.extra == {"cursor": {"step": 5}}
        need = whole_need(_OLD)
        load(made, need)
        assert_loaded(_OLD, need)


SCRIPTS = (Save(), SaveAgain(), Commit(), Collect(), Convert())
