"""A real keeper actor and real trainer processes, killed: what was finished is still there."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.snapshots import eventually
from workers.protocol import Inventory, KeeperOrder, NodeReport
from workers.settings import CheckpointSettings, Settings, SnapshotSettings

pytestmark = pytest.mark.ray

_TRAINER = """
import sys
from pathlib import Path
from tests.support.snapshots import body_bytes, snapshot
from workers.keeper.trainer_watch import progress_path
from workers.memory import SnapshotMemory
from workers.telemetry.progress import ProgressRecord

directory, worker = Path(sys.argv[1]), sys.argv[2]
page = ProgressRecord.create(progress_path(directory, worker), worker=worker)
memory = SnapshotMemory(directory, worker)
arena = memory.ensure(body_bytes(1) + int(sys.argv[3]), attempt=9, for_cuda=False)
print("ready", flush=True)
for line in sys.stdin:
    attempt, step, pin = map(int, line.split())
    snapshot(arena, step, attempt=attempt, pin=bool(pin))
    print(int(memory.tell()), flush=True)
"""


class _Ear:
    """Stands where the controller is: takes the reports."""

    def __init__(self) -> None:
        self._last: NodeReport | None = None

    async def observe(self, report: NodeReport) -> None:
        self._last = report

    async def last(self) -> NodeReport | None:
        return self._last


class _Trainer:
    """A trainer process that takes a snapshot when it is told to."""

    def __init__(self, directory: Path, worker: str, *, more_bytes: int = 0) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _TRAINER, str(directory), worker, str(more_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._read() == "ready"

    def snapshot(self, step: int, *, attempt: int = 1, pin: bool = False) -> bool:
        """Take one; return whether a keeper has the memory."""
        assert self._process.stdin is not None
        print(attempt, step, int(pin), file=self._process.stdin, flush=True)
        return self._read() == "1"

    def kill(self) -> None:
        """SIGKILL it."""
        self._process.kill()
        self._process.communicate()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


class _Controllers:
    """Hold calls of a keeper until they are killed, as one after the other may do in a long run."""

    def hold(self, keeper: Any, num_calls: int) -> None:
        import ray

        self._held = [keeper.hold.remote() for _ in range(num_calls)]
        ray.get(keeper.hello.remote())


class _Keeper:
    """The keeper of one node as the controller has it."""

    def __init__(self, node: str, directory: Path, run_url: Path) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from workers.keeper import OPTIONS, Keeper

        self.directory = directory
        self.run_url = run_url
        self.ear: Any = ray.remote(_Ear).options(num_cpus=0).remote()
        settings = Settings(
            snapshot=SnapshotSettings(node_memory_mib=256),
            checkpoint=CheckpointSettings(keep=3),
        )
        self.actor: Any = (
            ray.remote(Keeper)
            .options(
                **OPTIONS, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
            )
            .remote(
                directory=str(directory),
                controller=self.ear,
                run_url=str(run_url),
                settings=settings,
            )
        )
        self.hello()

    def hello(self) -> dict[str, Any]:
        """Return what it says, of its next process if it was killed."""
        import ray

        end_s = time.monotonic() + 240.0
        while True:
            try:
                answer: dict[str, Any] = ray.get(self.actor.hello.remote(), timeout=240.0)
            except ray.exceptions.RayActorError:
                assert time.monotonic() < end_s, "the keeper does not come back"
                time.sleep(0.05)
            else:
                return answer

    def order(self, order: KeeperOrder) -> None:
        """Tell it of a new attempt."""
        import ray

        ray.get(self.actor.order.remote(order), timeout=90.0)

    def versions(self) -> list[tuple[str, int, int]]:
        """Return what it holds now."""
        import ray

        inventory: Inventory = ray.get(self.actor.held.remote(), timeout=90.0)
        return [(part.arena, part.held.attempt, part.held.step) for part in inventory.parts]

    def reported(self) -> NodeReport | None:
        """Return its last report."""
        import ray

        report: NodeReport | None = ray.get(self.ear.last.remote(), timeout=90.0)
        return report

    def stored_step(self) -> int:
        """Return the step that it last reported as stored."""
        report = self.reported()
        return report.stored_step if report is not None else 0

    def has_checkpoint(self, step: int) -> bool:
        """Return whether a checkpoint is committed."""
        return (self.run_url / f"checkpoints/step-{step:08d}/manifest.json").exists()


@pytest.fixture
def keeper(nodes: Any, tmp_path: Path) -> Iterator[_Keeper]:
    """A keeper on the first node."""
    import ray

    directory = Path(tempfile.mkdtemp(dir="/dev/shm"))
    keeper = _Keeper(nodes.nodes()[0], directory, tmp_path / "run")
    yield keeper
    ray.kill(keeper.actor)
    ray.kill(keeper.ear)
    shutil.rmtree(directory)


def test_what_a_killed_trainer_finished_is_held_stored_and_then_let_go_of(
    keeper: _Keeper,
) -> None:
    """It is what the next attempt loads, from where its successor goes on to write; one that
    needs more gets other memory, and the old one is kept until it is spent.
    """
    first = _Trainer(keeper.directory, "w0001")
    for step in (1, 2, 3):
        assert first.snapshot(step, pin=step == 3)
    first.kill()

    assert ("w0001.1", 1, 3) in keeper.versions()
    assert eventually(lambda: keeper.has_checkpoint(3))
    assert eventually(lambda: keeper.stored_step() == 3)
    keeper.order(KeeperOrder(attempt=2, lineage=((1, 0), (2, 3)), copies_of=()))
    second = _Trainer(keeper.directory, "w0002")
    second.snapshot(4, attempt=2)
    assert keeper.versions() == [("w0002.1", 1, step) for step in (2, 3)] + [("w0002.1", 2, 4)]
    second.kill()

    keeper.order(KeeperOrder(attempt=3, lineage=((1, 0), (2, 3), (3, 4)), copies_of=()))
    third = _Trainer(keeper.directory, "w0003", more_bytes=4096)
    third.snapshot(5, attempt=3)
    assert ("w0002.1", 2, 4) in keeper.versions()
    third.snapshot(6, attempt=3)
    assert eventually(lambda: keeper.versions() == [("w0003.1", 3, 5), ("w0003.1", 3, 6)])
    report = keeper.reported()
    assert report is not None
    assert report.inventory is not None
    assert report.problems == ()
    third.kill()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_keeper_is_handed_the_memory_again_and_stores_what_was_pinned(
    keeper: _Keeper, number: signal.Signals
) -> None:
    """Training goes on meanwhile; nothing that its ranks hold is lost, no pin forgotten.

    By Ray's handler of SIGTERM it would end as if it wished to, and never be started again.
    """
    before = keeper.hello()
    trainer = _Trainer(keeper.directory, "w0001")
    assert trainer.snapshot(1)
    os.kill(before["pid"], number)
    # Whether there is a keeper at this moment does not matter to the trainer.
    trainer.snapshot(2, pin=True)

    after = keeper.hello()
    assert after["pid"] != before["pid"]
    assert after["secret"] != before["secret"]
    assert trainer.snapshot(3)
    expected = [("w0001.1", 1, step) for step in (1, 2, 3)]
    assert eventually(lambda: keeper.versions() == expected)
    assert eventually(lambda: keeper.has_checkpoint(2))
    assert eventually(lambda: keeper.stored_step() == 2)
    trainer.kill()
    assert keeper.versions() == expected


def test_a_keeper_answers_however_many_controllers_have_died(keeper: _Keeper) -> None:
    """Ray goes on with the calls of a caller that is gone, and admits so many at once."""
    import ray

    controllers: Any = ray.remote(_Controllers).options(num_cpus=0).remote()
    ray.get(controllers.hold.remote(keeper.actor, 200), timeout=90.0)
    ray.kill(controllers)

    assert keeper.versions() == []


@pytest.mark.usefixtures("nodes")
def test_a_keeper_without_snapshots_is_what_it_was(tmp_path: Path) -> None:
    """They can be turned off, and no descriptor server is there."""
    import ray

    from workers.keeper import OPTIONS, Keeper

    ear: Any = ray.remote(_Ear).options(num_cpus=0).remote()
    settings = Settings(snapshot=SnapshotSettings(every_steps=0))
    actor: Any = (
        ray.remote(Keeper)
        .options(**OPTIONS)
        .remote(
            directory=str(tmp_path / "shared"),
            controller=ear,
            run_url=str(tmp_path / "run"),
            settings=settings,
        )
    )
    hello = ray.get(actor.hello.remote(), timeout=240.0)
    assert (hello["host"], hello["port"], hello["secret"]) == ("", 0, b"")
    assert ray.get(actor.held.remote(), timeout=90.0).parts == ()
    assert not ray.get(actor.flush.remote(1, 1), timeout=90.0)
    # The lease of its trainers is there, and nothing of a state.
    assert [path.name for path in (tmp_path / "shared").iterdir()] == ["lease"]
    ray.kill(actor)
    ray.kill(ear)
