"""Snapshots for days: neither trainers nor keepers may hold more and more of anything."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.support.node_memory import NodeProcess, newest
from tests.support.soak import Attempt, SoakTrainer, Usage, usage_of
from workers.memory import is_copy
from workers.protocol import GroupPlace, KeeperOrder, ParityGroup
from workers.settings import CheckpointSettings, Settings, SnapshotSettings

NODES = ("node-a", "node-b")
#: A recovery in so many is that of a lost process; the memory of a lost one is let go of later.
REPLACED_EVERY = 3
#: An allocator takes a megabyte or two at any time; a version that is not let go of after a
#: recovery would be 6 MiB more in the short test. Mappings are counted to the last one.
GROWTH_KIB_MAX = 4096
LONG = [pytest.mark.chaos, pytest.mark.timeout(900)]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[NodeProcess]]:
    chosen = Settings(
        checkpoint=CheckpointSettings(keep=2), snapshot=SnapshotSettings(node_memory_mib=64)
    )
    with ExitStack() as stack:
        found = []
        for name in NODES:
            node = NodeProcess(name, tmp_path / name, tmp_path / "run", chosen)
            stack.callback(node.kill)
            found.append(node)
        yield found


@pytest.fixture
def trainer(nodes: list[NodeProcess]) -> Iterator[SoakTrainer]:
    made = SoakTrainer([(node.node, node.directory) for node in nodes])
    yield made
    made.kill()


def recover(
    nodes: Sequence[NodeProcess],
    trainer: SoakTrainer,
    number: int,
    lineage: tuple[tuple[int, int], ...],
    num_snapshots: int,
    *,
    by_parity: bool,
) -> tuple[tuple[int, int], ...]:
    """Run the next attempt from what the nodes hold; return the lineage with it."""
    (step, _), found = newest(nodes)
    # Without copies: each rank takes one part from near and one over the wire.
    memory = tuple(part for part in found if not is_copy(part.arena))
    lineage = (*lineage, (number, step))
    for node in nodes:
        places = tuple(
            GroupPlace(peer=None if other is node else other.peer(), ranks=(rank,))
            for rank, other in enumerate(nodes)
        )
        others = tuple(place.peer for place in places if place.peer is not None)
        node.order(
            KeeperOrder(
                attempt=number,
                lineage=lineage,
                copies_of=() if by_parity else others,
                parity=ParityGroup(attempt=number, tolerance=1, places=places)
                if by_parity
                else None,
            )
        )
    worker = f"w{number // REPLACED_EVERY:04d}"
    workers = (f"{worker}-a", f"{worker}-b")
    last = trainer.run(
        Attempt(lineage=lineage, memory=memory, num_snapshots=num_snapshots, workers=workers)
    )
    assert last == step + num_snapshots
    for node, living in zip(nodes, workers, strict=True):
        node.tend([living])
    return lineage


def growth(samples: Sequence[Usage]) -> dict[str, int]:
    """Return by how much the least that was held has grown, from an early to a late stretch.

    A thing that comes and goes (a thread that is about to end) does not count: it is not always
    there.
    """
    stretch = len(samples) // 4
    early, late = samples[stretch : 2 * stretch], samples[-stretch:]
    return {
        name: min(asdict(one)[name] for one in late) - min(asdict(one)[name] for one in early)
        for name in asdict(samples[0])
    }


@pytest.mark.parametrize(
    ("num_recoveries", "num_snapshots", "by_parity"),
    [
        pytest.param(24, 4, False, id="short"),
        pytest.param(50, 10, False, id="copies", marks=LONG),
        pytest.param(50, 10, True, id="parities", marks=LONG),
    ],
)
def test_snapshots_and_recoveries_leave_nothing_behind(
    nodes: list[NodeProcess],
    trainer: SoakTrainer,
    num_recoveries: int,
    num_snapshots: int,
    *,
    by_parity: bool,
) -> None:
    """A mapping, a connection or a thread per recovery: a run that heals for weeks dies of it."""
    lineage: tuple[tuple[int, int], ...] = ()
    pids = {"trainer": trainer.pid, **{node.node: node.pid for node in nodes}}
    samples: dict[str, list[Usage]] = {name: [] for name in pids}
    for number in range(1, num_recoveries + 2):
        lineage = recover(nodes, trainer, number, lineage, num_snapshots, by_parity=by_parity)
        for name, pid in pids.items():
            samples[name].append(usage_of(pid))

    assert lineage[-1][1] == num_recoveries * num_snapshots
    for name, held in samples.items():
        grown = growth(held)
        grown_kib = grown.pop("memory_kib")
        assert max(grown.values()) <= 0, (name, grown, held)
        assert grown_kib < GROWTH_KIB_MAX, (name, [one.memory_kib for one in held])
