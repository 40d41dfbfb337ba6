"""Where parts are taken from: near before far, whole before damaged, and nothing twice."""

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.memory_versions import State, local_tensors, make_state, write_version
from ucp_core.errors import CheckpointNotFoundError, UncoveredRegionError
from ucp_core.native import Checkpoint, load
from workers.keeper import MemorySources
from workers.keeper.arena_table import ArenaTable
from workers.keeper.descriptor_server import DescriptorServer
from workers.keeper.peers.server import WireServer
from workers.memory import descriptor_socket
from workers.protocol import LOCAL_MEMORY, PEER_MEMORY, PartRef, Peer, Source

SECRET = b"of this keeper"
WORLD = 2
STATE = make_state(7)


class Keeper:
    """One node's memory that holds the parts of some ranks."""

    def __init__(self, node: str, directory: Path, ranks: tuple[int, ...]) -> None:
        directory.mkdir()
        self.node, self.directory = node, directory
        self.table = ArenaTable(budget_bytes=64 << 20)
        self.door = DescriptorServer(descriptor_socket(directory), self.table)
        self.wire = WireServer(self.table, host="127.0.0.1", secret=SECRET)
        self.is_open = {"door", "wire"}
        self.parts: dict[int, PartRef] = {}
        for rank in ranks:
            name = f"w{rank:04d}.1"
            arena = self.table.reserve(name, body_bytes=1 << 20)
            held = write_version(arena, STATE, step=3, rank=rank, world_size=WORLD)
            host, port = self.wire.address
            peer = Peer(node=node, host=host, port=port, secret=SECRET)
            self.parts[rank] = PartRef(node=node, arena=name, held=held, peer=peer)

    def flip(self, rank: int, byte: int) -> None:
        """Flip a bit of what is held of a rank; counted from the end if negative."""
        part = self.parts[rank]
        arena = self.table.arena(part.arena)
        assert arena is not None
        size_bytes = part.held.data_bytes + part.held.record_bytes
        arena.body(part.held.buffer)[byte % size_bytes] ^= 16

    def source(self, rank: int) -> Source:
        """Return what is held of a rank as a source."""
        return self.parts[rank].source

    def overwrite(self, rank: int) -> None:
        """Begin another version where the part of a rank is."""
        part = self.parts[rank]
        arena = self.table.arena(part.arena)
        assert arena is not None
        arena.begin(part.held.buffer, attempt=1, step=4, rank=rank, world_size=WORLD)

    def close(self, *, door: bool = True, wire: bool = True) -> None:
        """Close what is asked for and still open."""
        for name in ["door"] * door + ["wire"] * wire:
            if name in self.is_open:
                self.is_open.remove(name)
                getattr(self, name).close()


MakeKeeper = Callable[[str, tuple[int, ...]], Keeper]


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[MakeKeeper]:
    made: list[Keeper] = []

    def make(node: str, ranks: tuple[int, ...]) -> Keeper:
        made.append(Keeper(node, tmp_path / node, ranks))
        return made[-1]

    yield make
    for one in made:
        one.close()


def read(checkpoint: Checkpoint) -> State:
    """Check that the whole version is what was written."""
    zeros = {fqn: value * 0 for fqn, value in STATE.items()}
    need = local_tensors(zeros, 0, 1)
    load(checkpoint, need)
    expected = local_tensors(STATE, 0, 1)
    assert [bytes(one.data) for one in need] == [bytes(one.data) for one in expected]
    return STATE


def sources(near: Keeper, *far: Keeper) -> MemorySources:
    # The far ones first: it is not the order that decides.
    parts = [part for one in (*far, near) for part in one.parts.values()]
    return MemorySources(parts, node=near.node, keeper_directory=near.directory)


def test_what_is_near_is_taken_from_near(keeper: MakeKeeper) -> None:
    """The network is for what is not there."""
    with closing(sources(keeper("a", (0, 1)), keeper("b", (0, 1)))) as found:
        found.load(read)

    size_bytes = sum(value.nbytes for value in STATE.values())
    assert found.taken_bytes == {LOCAL_MEMORY: size_bytes}
    assert found.skipped == []


def test_what_is_not_near_is_taken_from_peers(keeper: MakeKeeper) -> None:
    """Bytes are counted by where they came from: an incident's report shows them."""
    with closing(sources(keeper("a", (0,)), keeper("b", (1,)))) as found:
        found.load(read)

    size_bytes = sum(value.nbytes for value in STATE.values())
    assert min(found.taken_bytes.values()) > 0
    assert found.taken_bytes.total() == size_bytes


@pytest.mark.parametrize("byte", [0, 5000, -3, -300], ids=["first", "data", "seal", "record"])
def test_damaged_bytes_are_taken_from_the_next_holder(keeper: MakeKeeper, byte: int) -> None:
    """In data or record; what was loaded before that was found is loaded again."""
    near, far = keeper("a", (0, 1)), keeper("b", (0, 1))
    near.flip(1, byte)
    with closing(sources(near, far)) as found:
        found.load(read)

    ((name, reason),) = found.skipped
    assert name == "step 3 of rank 1 in the memory of node a"
    assert "damaged" in reason or "crc32" in reason
    assert found.damaged == [near.source(1)]
    assert found.unread == []
    assert set(found.taken_bytes) == {LOCAL_MEMORY, PEER_MEMORY}


def test_a_part_that_is_written_over_is_taken_from_the_next_holder(keeper: MakeKeeper) -> None:
    """A keeper's list is as old as its way here."""
    near, far, third = keeper("a", (0,)), keeper("b", (1,)), keeper("c", (0, 1))
    near.overwrite(0)
    far.overwrite(1)
    with closing(sources(near, far, third)) as found:
        found.load(read)

    assert len(found.skipped) == 2
    assert all("overwritten" in reason for _, reason in found.skipped)
    assert found.damaged == []


def test_a_node_that_does_not_answer_is_not_asked_again(keeper: MakeKeeper) -> None:
    """Each try takes seconds, and all ranks wait for the slowest."""
    near, far, third = keeper("a", ()), keeper("b", (0, 1)), keeper("c", (0, 1))
    far.close()
    with closing(sources(near, third, far)) as found:
        found._left.sort(key=lambda part: part.node)
        found.load(read)

    ((name, _),) = found.skipped
    assert name.endswith("node b")
    assert found.damaged == []
    assert set(found.unread) == {far.source(0), far.source(1)}


def test_a_node_that_is_lost_while_it_is_read_gives_way_to_the_next(keeper: MakeKeeper) -> None:
    """A second fault during the recovery from the first; what was loaded so far is loaded again."""
    near, far, third = keeper("a", (0,)), keeper("b", (1,)), keeper("c", (1,))

    def lose_then_read(checkpoint: Checkpoint) -> State:
        far.close()
        return read(checkpoint)

    with closing(sources(near, far, third)) as found:
        found.load(lose_then_read)

    ((name, _),) = found.skipped
    assert name == "step 3 of rank 1 in the memory of node b"
    assert (found.damaged, found.unread) == ([], [far.source(1)])


def test_a_door_without_a_keeper_is_one_source_less(keeper: MakeKeeper) -> None:
    """The keeper may have died since it was asked."""
    near, far = keeper("a", (0, 1)), keeper("b", (0, 1))
    near.close(wire=False)
    with closing(sources(near, far)) as found:
        found.load(read)

    assert set(found.taken_bytes) == {PEER_MEMORY}
    assert len(found.skipped) == 1, "each try at a stopped keeper takes seconds"


def test_when_no_holder_is_left_that_is_said(keeper: MakeKeeper) -> None:
    """Then the version comes from storage."""
    near = keeper("a", (0, 1))
    near.flip(0, 100)
    with (
        closing(sources(near)) as found,
        pytest.raises(CheckpointNotFoundError, match="memory has the part of rank 0"),
    ):
        found.load(read)

    assert len(found.skipped) == 1
    assert found.damaged == [near.source(0)]


def test_an_error_without_a_bad_source_ends_the_load(keeper: MakeKeeper) -> None:
    """Another holder of the same bytes would fail alike, for ever."""

    def fill(_: Checkpoint) -> None:
        raise UncoveredRegionError("no holder has the needed part")

    near = keeper("a", (0, 1))
    with closing(sources(near)) as found, pytest.raises(UncoveredRegionError):
        found.load(fill)

    assert found.damaged == []
    assert set(found.unread) == {near.source(0), near.source(1)}
