"""Two ranks that train on two nodes, and die or stop at a chosen moment of their snapshots."""

import signal
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import torch

from tests.support.doomed import DoomedNode, DoomedTrainer, newest, places_of
from tests.support.made import tensor_of
from tests.support.snapshots import eventually
from tests.support.soak import COLUMNS, ROWS, STORED_EVERY, Attempt, weights
from ucp_core.native import Checkpoint, load
from workers.keeper import MemorySources
from workers.memory import is_copy
from workers.protocol import KeeperOrder, PartRef
from workers.settings import CheckpointSettings, Settings, SnapshotSettings

#: Steps of the undisturbed first attempt, and of the second. One of the latter's steps is to be
#: stored.
CALM_STEPS = STORED_EVERY - 2
DOOMED_STEPS = 2


class DoomedRun:
    """The nodes, and the trainers of one attempt after the other. ``close`` ends them."""

    def __init__(self, directory: Path) -> None:
        settings = Settings(
            checkpoint=CheckpointSettings(keep=2),
            snapshot=SnapshotSettings(node_memory_mib=64),
        )
        self.nodes = [
            DoomedNode(name * 16, directory / name, directory / "run", settings) for name in "ab"
        ]
        self._places = [(node.node, node.directory) for node in self.nodes]
        self.lineage: tuple[tuple[int, int], ...] = ()
        self.trainers: list[DoomedTrainer] = []
        self.begin(num_snapshots=CALM_STEPS)
        assert self.trainer.last_step() == CALM_STEPS

    @property
    def trainer(self) -> DoomedTrainer:
        """Return the newest process."""
        return self.trainers[-1]

    def close(self) -> None:
        """End all processes."""
        for trainer in self.trainers:
            trainer.kill()
        for node in self.nodes:
            node.kill()

    def begin(self, *, num_snapshots: int, is_new: bool = True) -> None:
        """Begin the next attempt from what is held; in a new process, or in the one before."""
        found = newest(self.nodes, self.lineage)
        step = found.step if found is not None else 0
        places = places_of(found, self.nodes) if found is not None else []
        attempt = len(self.lineage) + 1
        self.lineage = (*self.lineage, (attempt, step))
        for node in self.nodes:
            others = tuple(other.peer() for other in self.nodes if other is not node)
            node.order(
                KeeperOrder(
                    attempt=attempt,
                    lineage=self.lineage,
                    copies_of=others,
                )
            )
        if is_new:
            self.trainers.append(DoomedTrainer(self._places))
        worker = f"w{len(self.trainers):04d}"
        self.trainer.begin(
            Attempt(
                lineage=self.lineage,
                memory=tuple(place for place in places if not is_copy(place.arena)),
                num_snapshots=num_snapshots,
                workers=(f"{worker}-a", f"{worker}-b"),
            )
        )

    def doom(self, after: int, number: signal.Signals) -> bool:
        """Go on in the same process until the signal ends or stops it; return whether it did."""
        self.trainer.doom(after, number)
        self.begin(num_snapshots=DOOMED_STEPS, is_new=False)
        if number == signal.SIGKILL:
            try:
                self.trainer.last_step()
            except EOFError:
                return True
            return False
        assert eventually(lambda: self.trainer.is_stopped or self.trainer.has_answered)
        return self.trainer.is_stopped

    def furthest(self) -> int:
        """Return the newest step that any rank has finished."""
        return max(part.held.step for node in self.nodes for part in node.inventory().parts)

    def newest(self, nodes: Sequence[DoomedNode]) -> tuple[int, int]:
        """Return step and attempt of the newest whole version on nodes; it is right to the bit."""
        found = newest(nodes, self.lineage)
        assert found is not None, "no version is whole"
        _check(found.step, places_of(found, self.nodes), nodes[0])
        return found.step, found.attempt


def _check(step: int, places: Sequence[PartRef], near: DoomedNode) -> None:
    whole = torch.zeros(ROWS, COLUMNS)
    need = tensor_of("w", (ROWS, COLUMNS), whole.numpy().data.cast("B"))

    def fill(checkpoint: Checkpoint) -> None:
        load(checkpoint, [need])

    sources = MemorySources(places, node=near.node, keeper_directory=near.directory)
    with closing(sources):
        sources.load(fill)
    assert not sources.skipped, sources.skipped
    assert torch.equal(whole, weights(step)), "not the state that was written"
