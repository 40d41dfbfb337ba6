"""Replicas that keep a parity of each other's shares, made from their own memory."""

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from tests.support.node_memory import whole_state
from tests.support.snapshot_rank import Node, Rank, captured, state
from tests.support.snapshots import eventually
from ucp_core.errors import CheckpointNotFoundError
from ucp_core.layout import ParallelLayout
from workers.errors import ParityError
from workers.keeper import MemorySources
from workers.keeper.peers import replication as following
from workers.keeper.peers.parity_mirror import ParityMirror
from workers.keeper.peers.server import WireServer
from workers.memory import Arena, LocalPart, Part, SnapshotMemory, is_parity, replica_parity_name
from workers.parity import lost_parts, read_record
from workers.protocol import (
    PARITY,
    GroupPlace,
    Held,
    ParityGroup,
    PartRef,
    Peer,
    Source,
)
from workers.snapshot import for_others
from workers.snapshot.buffer_layout import Captured
from workers.state import ReplicaShare, StateEntry
from workers.state.replica_shares import cut

SECRET = b"s"


def _shares(num_replicas: int, rank: int, seed: int, *, turned: bool) -> list[list[StateEntry]]:
    """Return the shares of a state that is equal on all replicas, as ``rank`` cuts them."""
    torch.manual_seed(seed)
    entries = state(num_rows=41)
    if turned:
        # As a weight that was transposed: torch has to look at it, memory cannot be read along.
        entries = [replace(each, tensor=each.tensor.t().contiguous().t()) for each in entries]
    parts = [(entry.box, entry.tensor.element_size()) for entry in entries]
    sharing = ReplicaShare.of(range(num_replicas), rank)
    return [
        [entries[number].rows(box) for number, box in share]
        for share in cut(parts, sharing.num_shares)
    ]


@dataclass
class _Replica:
    """One replica, its node's keeper, and how that is reached."""

    rank: int
    group: tuple[int, ...]
    node: Node
    turned: bool = False
    mirror: ParityMirror | None = None

    def __post_init__(self) -> None:
        self.wire = WireServer(self.node.table, host="127.0.0.1", secret=SECRET)
        self.worker = f"w{self.rank:04d}"
        self.memory = SnapshotMemory(self.node.directory, self.worker)

    @property
    def peer(self) -> Peer:
        host, port = self.wire.address
        return Peer(node=f"node{self.rank}", host=host, port=port, secret=SECRET)

    def begin(self) -> None:
        layout = ParallelLayout(dp_replicate=len(self.group))
        self.writer = Rank(self.memory, rank=self.rank, layout=layout, parity=self.group).writer
        self.writer.prepare(self._state(0))
        assert eventually(lambda: self.writer.is_ready)

    def take(self, step: int, kept_step: int = -1) -> None:
        assert self.writer.capture(self._state(step), kept_step=kept_step)
        self.writer.complete(pin=False)
        assert self.writer.wait(step)

    def arena(self, *, parity: bool) -> Arena:
        (found,) = (x for name, x in self.node.table.arenas().items() if is_parity(name) == parity)
        return found

    def part(self, step: int, *, parity: bool) -> Part:
        arena = self.arena(parity=parity)
        (held,) = (held for held in arena.versions() if held.step == step)
        return LocalPart(arena, held)

    def close(self) -> None:
        assert self.writer.close()
        self.wire.close()
        self.node.close()

    def _state(self, step: int) -> Captured:
        shares = _shares(len(self.group), self.rank, step, turned=self.turned)
        made = captured(step, shares[self.rank])
        others = [(rank, shares[rank]) for rank in self.group if rank != self.rank]
        return replace(made, guarded=others)


def _replicas(
    number: int,
    directory: Path,
    stack: ExitStack,
    *,
    turned: bool = False,
    budgets: Sequence[int] = (),
) -> list[_Replica]:
    made = []
    # In an order of their own: that of a group need not be that of ranks.
    group = (*range(1, number), 0)
    for rank in range(number):
        (directory / str(rank)).mkdir()
        budget_bytes = budgets[rank] if budgets else 64 << 20
        node = Node(directory / str(rank), budget_bytes=budget_bytes)
        one = _Replica(rank, group, node, turned)
        one.begin()
        stack.enter_context(closing(one))
        made.append(one)
    return made


def _problems(one: _Replica) -> list[str]:
    return [] if one.mirror is None else list(one.mirror.problems.values())


def _protect(replicas: Sequence[_Replica], stack: ExitStack) -> None:
    for own in replicas:
        places = tuple(
            GroupPlace(peer=None if rank == own.rank else replicas[rank].peer, ranks=(rank,))
            for rank in own.group
        )
        group = ParityGroup(attempt=1, tolerance=1, places=places, over_replicas=True)
        own.mirror = ParityMirror(own.node.table, group)
        stack.callback(own.mirror.stop)
    arenas = [one.arena(parity=False) for one in replicas]
    assert eventually(lambda: all(map(Arena.is_followed, arenas)))


def _is_protected(replicas: Sequence[_Replica]) -> bool:
    arenas = [one.arena(parity=False) for one in replicas]
    return all(map(Arena.is_copied, arenas))


def _is_complete(parity: Part) -> bool:
    try:
        read_record(parity)
    except ParityError:
        return False
    return True


def _whole(part: Part) -> bytes:
    held = part.held
    data = bytearray(held.data_bytes + held.record_bytes)
    part.fill(0, [memoryview(data)])
    return bytes(data)


def _content(held: Held) -> Held:
    return replace(held, buffer=0, sequence=0)


def _left(replicas: Sequence[_Replica], step: int) -> list[PartRef]:
    """Return what some hold of a step, as a worker on the node of the first reaches it."""
    return [
        PartRef(node=one.peer.node, arena=name, held=held, peer=one.peer)
        for one in replicas
        for name, versions in one.node.table.versions().items()
        for held in versions
        if held.step == step
    ]


def _loaded(places: Sequence[PartRef], near: _Replica) -> tuple[list[Source], set[str]]:
    """Load a version and compare it; return what was found damaged, and kinds of sources."""
    sources = MemorySources(places, node=near.peer.node, keeper_directory=near.node.directory)
    with closing(sources):
        found = sources.load(whole_state)
    torch.manual_seed(places[0].held.step)
    expected = {
        (entry.fqn, entry.slot): entry.tensor.contiguous().view(torch.uint8).numpy().tobytes()
        for entry in state(num_rows=41)
    }
    assert found == {key: data for key, data in expected.items() if data}
    return sources.damaged, set(sources.taken_bytes)


def _taken(directory: Path, stack: ExitStack, *, steps: int = 1) -> list[_Replica]:
    """Return three replicas that have saved so many steps, all of them protected."""
    replicas = _replicas(3, directory, stack)
    _protect(replicas, stack)
    for step in range(1, steps + 1):
        for one in replicas:
            one.take(step)
        assert eventually(lambda: _is_protected(replicas))
    return replicas


@pytest.mark.parametrize("number", [3, 4, 6])
def test_what_any_replica_saved_comes_back_to_the_bit_from_the_others(
    number: int, tmp_path: Path
) -> None:
    """Data that no keeper sent, and a record that no replica but the lost one could write.

    With four replicas the tensors are not contiguous, as on a device.
    """
    with ExitStack() as stack:
        replicas = _replicas(number, tmp_path, stack, turned=number == 4)
        _protect(replicas, stack)
        for step in (1, 2):
            for one in replicas:
                one.take(step)
            assert eventually(lambda: _is_protected(replicas))
        for lost in replicas:
            left = [one for one in replicas if one is not lost]
            (part,) = lost_parts(
                [one.part(2, parity=True) for one in left],
                [one.part(2, parity=False) for one in left],
            )
            expected = lost.part(2, parity=False)
            assert _content(part.held) == _content(expected.held)
            assert _whole(part) == _whole(expected)
            size_bytes = expected.held.data_bytes + expected.held.record_bytes
            for low in (0, 7, expected.held.data_bytes - 1, expected.held.data_bytes + 3):
                window = bytearray(size_bytes - low - 5)
                part.fill(low, [memoryview(window)[:2], memoryview(window)[2:]])
                assert window == _whole(expected)[low : size_bytes - 5]
        assert not any(map(_problems, replicas))


def test_a_damaged_share_gives_way_to_the_parities_of_the_others(tmp_path: Path) -> None:
    """Its bytes are nowhere else, and no node was lost."""
    with ExitStack() as stack:
        replicas = _taken(tmp_path, stack)
        arena = replicas[1].arena(parity=False)
        (held,) = arena.versions()
        arena.body(held.buffer)[held.data_bytes // 2] ^= 16

        damaged, kinds = _loaded(_left(replicas, 1), replicas[0])
        assert damaged == [PartRef(node="node1", arena="w0001.1", held=held).source]
        assert PARITY in kinds


@pytest.mark.parametrize("where", ["parity", "record", "copy"])
def test_a_damaged_parity_is_never_loaded(tmp_path: Path, where: str) -> None:
    """Its bytes, its record, or a copy of the lost one's record, of which there is another."""
    with ExitStack() as stack:
        replicas = _taken(tmp_path, stack, steps=2)
        arena = replicas[0].arena(parity=True)
        # The newest, and not the one before it, which must stay whole.
        assert eventually(lambda: arena.versions()[-1].step == 2)
        held = arena.versions()[-1]
        record = read_record(LocalPart(arena, held))
        lost = replicas[0].group[0]
        places = {"parity": 100, "record": held.data_bytes + 9, "copy": record.record_start(0) + 20}
        arena.body(held.buffer)[places[where]] ^= 16
        left = [one for one in replicas if one.rank != lost]

        if where == "copy":
            assert _loaded(_left(left, 2), left[0])[0] == []
        else:
            with pytest.raises(CheckpointNotFoundError, match="cannot be computed"):
                _loaded(_left(left, 2), left[0])
        assert PARITY in _loaded(_left(left, 1), left[0])[1]


def test_a_parity_counts_once_the_records_of_all_are_behind_it(tmp_path: Path) -> None:
    """Without them what it brings back could not be told from anything else."""
    with ExitStack() as stack:
        replicas = _replicas(3, tmp_path, stack)
        for one in replicas:
            one.take(1)
        part = replicas[0].part(1, parity=True)
        with pytest.raises(ParityError, match="waits for the records"):
            read_record(part)

        _protect(replicas, stack)
        assert eventually(lambda: _is_protected(replicas))
        record = read_record(part)
        assert [each.rank for each in record.members if each] == [1, 2, 0]


def test_memory_that_is_refused_for_a_parity_costs_no_snapshot_and_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The own one is worth as much as before; the parity follows once there is room."""
    monkeypatch.setattr(for_others, "_REFUSED_S", 0.0)
    monkeypatch.setattr(following, "_PROBLEM_S", 0.0)
    monkeypatch.setattr(following, "_PAUSE_S_MAX", 0.05)
    with ExitStack() as stack:
        replicas = _replicas(3, tmp_path, stack, budgets=(64 << 20, 64 << 20, 300 << 10))
        _protect(replicas, stack)
        for one in replicas:
            one.take(1)
        poor = replicas[2]
        assert not poor.writer.wait_copied(1, until_s=0.0)
        assert eventually(lambda: any("no parity of step 1" in line for line in _problems(poor)))
        assert eventually(lambda: not replicas[0].arena(parity=False).copy_behind())

        poor.node.table.budget_bytes = 64 << 20
        for step in (2, 3):
            for one in replicas:
                one.take(step)
        arena = poor.arena(parity=True)
        (held,) = arena.versions()
        assert eventually(lambda: _is_complete(LocalPart(arena, held)))


def test_a_parity_stays_while_its_writer_lives_and_until_it_is_not_needed(tmp_path: Path) -> None:
    """A later attempt begins with what this one has left; no peer lists it either."""
    with ExitStack() as stack:
        replicas = _taken(tmp_path, stack)
        table = replicas[0].node.table
        table.fence(2, ((1, 0), (2, 1)))
        assert table.reap(living=["w0000"], stored_step=9) == []
        assert table.reap(living=[], stored_step=0) == []
        names = [f"{replica_parity_name('w0000')}.1", "w0000.1"]
        assert sorted(table.reap(living=[], stored_step=9)) == names


def test_a_restarted_keeper_is_handed_the_parity_too(tmp_path: Path) -> None:
    """It has to put the records to it, also to one that was made while it was away."""
    with ExitStack() as stack:
        replicas = _replicas(3, tmp_path, stack)
        replicas[0].take(1)
        replicas[0].node.restart()
        replicas[0].take(2)
        held = replicas[0].node.table.versions()
        steps = {name: [one.step for one in each] for name, each in held.items()}
        assert steps == {f"{replica_parity_name('w0000')}.1": [1, 2], "w0000.1": [1, 2]}


@pytest.mark.parametrize("what", ["reshape", "empty", "bitwise_xor"])
def test_a_device_without_memory_for_a_parity_costs_no_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """For tensors side by side, for the parity, or to work; training and own snapshots go on."""

    def refuse(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError

    with ExitStack() as stack:
        replicas = _replicas(3, tmp_path, stack, turned=True)
        monkeypatch.setattr(torch.Tensor if what == "reshape" else torch, what, refuse)
        replicas[0].take(1)
        assert replicas[0].arena(parity=True).versions() == []
        monkeypatch.undo()
        replicas[0].take(2)
        assert [each.step for each in replicas[0].arena(parity=True).versions()] == [2]
        assert [each.step for each in replicas[0].arena(parity=False).versions()] == [1, 2]
