"""A node's memory put together: written by its workers, copied by a peer, stored, and let go of."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.snapshots import body_bytes, eventually, snapshot
from workers.errors import ArenaError
from workers.keeper import progress_path
from workers.keeper.node_memory import NodeMemory
from workers.keeper.peers.client import WireClient
from workers.keeper.trainer_watch import NodeWatch
from workers.memory import Arena, descriptor_socket, notify, reserve
from workers.protocol import GroupPlace, Inventory, KeeperOrder, ParityGroup, Peer
from workers.settings import CheckpointSettings, Settings, SnapshotSettings


@pytest.fixture
def opened() -> Iterator[list[NodeMemory]]:
    opened: list[NodeMemory] = []
    yield opened
    for memory in opened:
        memory.close()


@pytest.fixture
def open_memory(tmp_path: Path, opened: list[NodeMemory]) -> Callable[..., NodeMemory]:

    def open_one(node: str, *, node_memory_mib: int = 64, send_mib_per_s: int = 0) -> NodeMemory:
        memory = NodeMemory(
            node=node,
            host="127.0.0.1",
            directory=tmp_path / node,
            run_url=str(tmp_path / "run"),
            settings=Settings(
                snapshot=SnapshotSettings(
                    node_memory_mib=node_memory_mib, send_mib_per_s=send_mib_per_s
                ),
                checkpoint=CheckpointSettings(keep=2),
            ),
        )
        opened.append(memory)
        return memory

    return open_one


def _peer(memory: NodeMemory, node: str) -> Peer:
    host, port = memory.address
    return Peer(node=node, host=host, port=port, secret=memory.secret)


def _trainer(directory: Path, worker: str, *, world: int, generation: int = 1) -> Arena:
    return reserve(
        descriptor_socket(directory),
        f"{worker}.{generation}",
        body_bytes=body_bytes(world),
        attempt=9,
    )


def _held(inventory: Inventory) -> set[tuple[str, int, int]]:
    return {(part.arena, part.held.attempt, part.held.step) for part in inventory.parts}


def test_memory_of_a_worker_that_died_long_ago_is_handed_on(
    open_memory: Callable[..., NodeMemory], tmp_path: Path
) -> None:
    """Its replacement may need minutes to start; meanwhile no keeper reports on the dead."""
    memory, directory = open_memory("a" * 16), tmp_path / ("a" * 16)
    script = (
        "import sys; from workers.telemetry.progress import ProgressRecord as P;"
        " P.create(*sys.argv[1:2], "
    )
    page = str(progress_path(directory, "w0001"))
    command = [sys.executable, "-c", script + "worker='w0001')", page]
    subprocess.run(command, check=True)
    lost = _trainer(directory, "w0001", world=2)
    snapshot(lost, 3, rank=0, world=2)
    watch = NodeWatch(node="a", directory=directory, forget_s=0.0)
    assert [row.os_state for row in watch.report().workers] == ["X"]
    assert watch.report().workers == ()

    heir = _trainer(directory, "w0002", world=2)
    assert _held(memory.inventory()) == {("w0002.1", 1, 3)}
    lost.close()
    heir.close()


def test_a_group_keeps_parities_until_the_next_order(
    open_memory: Callable[..., NodeMemory], tmp_path: Path
) -> None:
    """The controller has to see them to count on them, and an order without ends them."""
    names = ["a" * 16, "b" * 16, "c" * 16]
    memories = [open_memory(name) for name in names]
    for memory in memories:
        places = tuple(
            GroupPlace(peer=None if other is memory else _peer(other, where), ranks=(rank,))
            for rank, (other, where) in enumerate(zip(memories, names, strict=True))
        )
        group = ParityGroup(attempt=1, tolerance=1, places=places)
        order = KeeperOrder(attempt=1, lineage=((1, 0),), copies_of=(), parity=group)
        assert memory.fence(order)
        memory.obey(order)
        memory.obey(order)
    trainers = [_trainer(tmp_path / name, f"w{name[0]}", world=3) for name in names]
    for rank, (trainer, name) in enumerate(zip(trainers, names, strict=True)):
        snapshot(trainer, 3, rank=rank, world=3)
        notify(descriptor_socket(tmp_path / name), f"w{name[0]}.1")
    assert eventually(lambda: all(memory.inventory().parities for memory in memories))

    for place, memory in enumerate(memories):
        inventory = memory.inventory()
        assert inventory.budget_bytes == 64 << 20
        (kept,) = inventory.parities
        covered = kept.covered
        assert covered is not None
        assert (kept.held.step, covered.place, covered.tolerance) == (3, place, 1)
        assert [each.rank for each in covered.members if each] == [0, 1, 2]
        assert [each.held.rank for each in inventory.parts] == [place]
    assert eventually(lambda: all(trainer.is_followed() for trainer in trainers))
    for memory in memories:
        memory.obey(KeeperOrder(attempt=1, lineage=((1, 0),), copies_of=()))
    assert eventually(lambda: not any(trainer.is_followed() for trainer in trainers))
    assert all(memory.inventory().parities for memory in memories)
    for trainer in trainers:
        trainer.close()


def test_a_group_that_no_thread_was_left_for_is_followed_by_the_same_order_again(
    open_memory: Callable[..., NodeMemory], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine may have no more threads for a moment; the order comes again and says the same."""
    names = ["a" * 16, "b" * 16]
    mine, other = map(open_memory, names)
    trainer = _trainer(tmp_path / names[1], "w0001", world=2)
    places = (
        GroupPlace(peer=None, ranks=(0,)),
        GroupPlace(peer=_peer(other, names[1]), ranks=(1,)),
    )
    group = ParityGroup(attempt=1, tolerance=1, places=places)
    order = KeeperOrder(attempt=1, lineage=((1, 0),), copies_of=(), parity=group)
    assert mine.fence(order)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", _fails)
        with pytest.raises(RuntimeError, match="new thread"):
            mine.obey(order)
    mine.obey(order)

    assert eventually(trainer.is_followed)
    trainer.close()


def _fails(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_memory_of_a_dead_worker_is_kept_until_its_successor_is_ahead(
    open_memory: Callable[..., NodeMemory], tmp_path: Path
) -> None:
    """It holds what the next attempt is loaded from, and nothing once that has two versions."""
    memory = open_memory("a")
    old = _trainer(tmp_path / "a", "w0001", world=1)
    for step in (4, 5):
        snapshot(old, step)
    old.close()
    order = KeeperOrder(attempt=2, lineage=((1, 0), (2, 5)), copies_of=())
    assert memory.fence(order)
    new = _trainer(tmp_path / "a", "w0002", world=1)
    for step in (6, 7):
        memory.tend({"w0002"})
        assert ("w0001.1", 1, 5) in _held(memory.inventory())
        snapshot(new, step, attempt=2, lineage=order.lineage)

    memory.tend({"w0002"})
    assert _held(memory.inventory()) == {("w0002.1", 2, 6), ("w0002.1", 2, 7)}
    new.close()


def test_an_order_that_was_overtaken_changes_nothing(
    open_memory: Callable[..., NodeMemory],
) -> None:
    """Two messages of a controller that was restarted can pass each other."""
    memory = open_memory("a")
    newer = KeeperOrder(attempt=3, lineage=((1, 0), (2, 0), (3, 0)), copies_of=())
    older = KeeperOrder(
        attempt=2,
        lineage=((1, 0), (2, 0)),
        copies_of=(Peer(node="b" * 16, host="127.0.0.1", port=1, secret=b""),),
    )
    assert memory.fence(newer)
    assert not memory.fence(older)
    memory.obey(older)

    assert memory.problems() == ()


def test_a_worker_without_memory_is_a_problem_as_long_as_it_is_there(
    open_memory: Callable[..., NodeMemory], tmp_path: Path
) -> None:
    """Training goes on without; people want to know which worker and what to do."""
    memory = open_memory("a", node_memory_mib=1)
    with pytest.raises(ArenaError):
        _trainer(tmp_path / "a", "w0001", world=1)
    memory.tend({"w0001"})
    (line,) = memory.problems()
    assert "w0001.1 need" in line
    assert "of the node's 1048576 are taken" in line

    memory.tend(set())
    assert memory.problems() == ()


def test_a_keeper_sends_no_faster_than_it_may(
    open_memory: Callable[..., NodeMemory], tmp_path: Path
) -> None:
    """The wire can be slow; what the user says has to reach it."""
    memory = open_memory("a", send_mib_per_s=2)
    arena = _trainer(tmp_path / "a", "w0001", world=1)
    snapshot(arena, 3, rank=0, world=1)
    (held,) = arena.versions()
    client = WireClient(memory.address, secret=memory.secret)
    begun_s = time.monotonic()
    for _ in range(2):
        client.read("w0001.1", held, 0, [memoryview(bytearray(2 << 20))])
    took_s = time.monotonic() - begun_s
    assert took_s > 0.9, "4 MiB, less the second that was saved up"
    client.close()
    arena.close()
