"""Parts that are nowhere, computed for a loader from what is left of a group; and whose fault."""

import random
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.memory_versions import local_tensors, make_state, write_version
from ucp_core.errors import CheckpointNotFoundError
from ucp_core.native import Checkpoint, load
from workers.keeper import MemorySources
from workers.keeper.arena_table import ArenaTable
from workers.keeper.descriptor_server import DescriptorServer
from workers.keeper.peers.parity_mirror import parity_name
from workers.keeper.peers.server import WireServer
from workers.memory import Arena, LocalPart, Part, descriptor_socket
from workers.parity import ParityRecord, buffer_bytes, read_record, write
from workers.protocol import LOCAL_MEMORY, PARITY, PEER_MEMORY, Member, PartRef, Peer

WORLD = 4
STATE = make_state(7)
SIZE_BYTES = sum(value.nbytes for value in STATE.values())
SECRET = b"of this keeper"
PAGE_BYTES, HEADER_BYTES = 4096, 60


@dataclass
class _Node:
    """A rank's part and the node's parities of the group of all."""

    name: str
    directory: Path
    table: ArenaTable
    door: DescriptorServer
    wire: WireServer

    def arena(self, name: str) -> Arena:
        arena = self.table.arena(name)
        assert arena is not None
        return arena

    @property
    def own(self) -> str:
        return f"w{self.name}.1"

    def place(self, name: str) -> PartRef:
        (held,) = self.arena(name).versions()
        host, port = self.wire.address
        peer = Peer(node=self.name, host=host, port=port, secret=SECRET)
        return PartRef(node=self.name, arena=name, held=held, peer=peer)

    def flip(self, name: str, byte: int) -> None:
        held = self.place(name).held
        size_bytes = held.data_bytes + held.record_bytes
        self.arena(name).body(held.buffer)[byte % size_bytes] ^= 16

    def close(self) -> None:
        self.door.close()
        self.wire.close()
        for name in self.table.arenas():
            self.table.drop(name)


PARITIES = parity_name(0, 1)


@pytest.fixture(params=[2])
def nodes(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[list[_Node]]:
    made = []
    for rank in range(WORLD):
        directory = tmp_path / str(rank)
        directory.mkdir()
        table = ArenaTable(budget_bytes=64 << 20)
        door = DescriptorServer(descriptor_socket(directory), table)
        wire = WireServer(table, host="127.0.0.1", secret=SECRET)
        made.append(_Node(str(rank), directory, table, door, wire))
        arena = table.reserve(made[-1].own, body_bytes=1 << 20)
        write_version(arena, STATE, step=3, rank=rank, world_size=WORLD)
    _protect(made, request.param)
    yield made
    for node in made:
        node.close()


def _protect(nodes: Sequence[_Node], num_parities: int) -> None:
    parts: dict[int, Part] = {
        rank: LocalPart(node.arena(node.own), node.place(node.own).held)
        for rank, node in enumerate(nodes)
    }
    members = tuple(
        Member(rank=rank, data_bytes=part.held.data_bytes, record_bytes=part.held.record_bytes)
        for rank, part in parts.items()
    )
    sizes = [member.size_bytes for member in members]
    for place, node in enumerate(nodes):
        record = ParityRecord(
            attempt=1,
            step=3,
            world_size=WORLD,
            tolerance=num_parities,
            place=place,
            members=members,
        )
        body_bytes = buffer_bytes(sizes, tolerance=num_parities)
        arena = node.table.reserve(PARITIES, body_bytes=body_bytes)
        arena.begin(0, attempt=1, step=3, rank=-1 - place, world_size=WORLD)
        data_bytes, record_bytes = write(record, parts, arena.body(0))
        arena.finish(0, data_bytes=data_bytes, record_bytes=record_bytes)


def _sources(left: Sequence[_Node]) -> MemorySources:
    places = [node.place(name) for node in left for name in (PARITIES, node.own)]
    return MemorySources(places, node=left[0].name, keeper_directory=left[0].directory)


def _read(checkpoint: Checkpoint) -> None:
    """Check that the whole version is what was written."""
    need = local_tensors({fqn: value * 0 for fqn, value in STATE.items()}, 0, 1)
    load(checkpoint, need)
    expected = local_tensors(STATE, 0, 1)
    assert [bytes(one.data) for one in need] == [bytes(one.data) for one in expected]


@pytest.mark.parametrize("lost", [{1}, {1, 2}, {2, 3}])
def test_what_is_nowhere_is_computed(nodes: list[_Node], lost: set[int]) -> None:
    """Every byte of it, and counted as what it is: not what was read to compute it."""
    with closing(_sources([node for rank, node in enumerate(nodes) if rank not in lost])) as found:
        found.load(_read)

    assert found.skipped == []
    assert set(found.taken_bytes) == {LOCAL_MEMORY, PEER_MEMORY, PARITY}
    assert found.taken_bytes.total() == SIZE_BYTES


def test_nothing_is_computed_that_is_held(nodes: list[_Node]) -> None:
    """It costs reads of a whole group."""
    with closing(_sources(nodes)) as found:
        found.load(_read)

    assert set(found.taken_bytes) == {LOCAL_MEMORY, PEER_MEMORY}


@pytest.mark.parametrize("byte", [0, 5000, -3], ids=["first", "data", "seal"])
@pytest.mark.parametrize("bad", [0, 2, 3])
def test_a_damaged_member_gives_way_to_the_parities(
    nodes: list[_Node], bad: int, byte: int
) -> None:
    """It is one more that is lost; what was computed with it must not be believed."""
    nodes[bad].flip(nodes[bad].own, byte)
    source = nodes[bad].place(nodes[bad].own)
    with closing(_sources([nodes[0], nodes[2], nodes[3]])) as found:
        found.load(_read)

    assert found.damaged == [source.source]
    assert found.unread == []


@pytest.mark.parametrize("bad", [0, 2, 3])
def test_a_damaged_parity_gives_way_to_the_other(nodes: list[_Node], bad: int) -> None:
    """It has no checksum of its own; who is innocent has to be left in peace."""
    nodes[bad].flip(PARITIES, 100)
    nodes[bad].flip(PARITIES, nodes[bad].place(PARITIES).held.data_bytes // 2 + 100)
    source = nodes[bad].place(PARITIES)
    with closing(_sources([nodes[0], nodes[2], nodes[3]])) as found:
        found.load(_read)

    expected = [source.source]
    # The parts lost with node 1 need P of the stripes 2 and 3.
    assert found.damaged == (expected if bad else [])
    assert found.unread == []
    assert PARITY in found.taken_bytes


def _needed(nodes: Sequence[_Node], lost: int) -> dict[int, int]:
    """Return how many bytes of each node's parities bring back what one lost; P comes first."""
    place = nodes[0].place(PARITIES)
    record = read_record(LocalPart(nodes[0].arena(PARITIES), place.held))
    pieces = record.stripes.blocks(lost, record.lengths[lost])
    return {piece.holders[0]: piece.stop - piece.start for piece in pieces}


@pytest.mark.parametrize(
    "num_flips", [12, pytest.param(100, marks=[pytest.mark.chaos, pytest.mark.timeout(120)])]
)
def test_every_flipped_bit_of_what_a_part_is_computed_from_is_noticed(
    nodes: list[_Node], num_flips: int
) -> None:
    """In a member or in a parity, its data, its record or its header; who has it is blamed."""
    rng, lost = random.Random(num_flips), 1
    left = [node for rank, node in enumerate(nodes) if rank != lost]
    needed = _needed(left, lost)
    kinds = [(name, at) for name in ("own", PARITIES) for at in ("data", "record", "header")]
    for number in range(num_flips):
        name, at = kinds[number % len(kinds)]
        bad = nodes[rng.choice(sorted(needed))]
        name = bad.own if name == "own" else name
        source, arena = bad.place(name), bad.arena(name)
        held, content = source.held, bytes(arena._memory)
        data_bytes = held.data_bytes if name == bad.own else needed[int(bad.name)]
        byte = {
            "data": rng.randrange(data_bytes),
            "record": held.data_bytes + rng.randrange(held.record_bytes),
            "header": rng.randrange(HEADER_BYTES) - PAGE_BYTES,
        }[at]
        found = _sources(left)
        arena._memory[arena.body_offset(held.buffer) + byte] ^= 1 << rng.randrange(8)
        with closing(found):
            found.load(_read)
        arena._memory[:] = content

        blamed = [*found.damaged, *found.unread]
        assert blamed == [source.source], (number, name, at, byte)
        if at == "data" or (name, at) == (PARITIES, "record"):
            assert found.unread == [], "it is proven"


def test_a_damaged_record_of_a_parity_is_found_before_it_is_used(nodes: list[_Node]) -> None:
    """It says how parts are cut: any other answer would be nonsense of the right size."""
    nodes[2].flip(PARITIES, -10)
    with closing(_sources([nodes[0], nodes[2], nodes[3]])) as found:
        found.load(_read)

    ((name, reason),) = found.skipped
    assert name == "step 3 (parity/0.1) in the memory of node 2"
    assert "record of a parity is damaged" in reason


def test_a_node_that_is_gone_meanwhile_is_one_more_that_is_lost(nodes: list[_Node]) -> None:
    """It may die between the controller's question and the load."""
    with closing(_sources([nodes[0], nodes[2], nodes[3]])) as found:
        nodes[3].wire.close()
        found.load(_read)

    assert set(found.taken_bytes) == {LOCAL_MEMORY, PEER_MEMORY, PARITY}
    assert {node for _, _, node, *_ in found.unread} == {"3"}
    assert len(found.skipped) == 1, "each try at it takes seconds"


def test_more_than_parities_bring_back_is_an_error_that_names_the_part(
    nodes: list[_Node],
) -> None:
    """Then the version comes from storage."""
    nodes[2].flip(nodes[2].own, 100)
    with (
        closing(_sources([nodes[0], nodes[2]])) as found,
        pytest.raises(
            CheckpointNotFoundError, match=r"part of rank 1, .* parts of a group of 4 are lost"
        ),
    ):
        found.load(_read)


@pytest.mark.parametrize("nodes", [1], indirect=True)
def test_a_single_parity_that_is_damaged_is_given_up(nodes: list[_Node]) -> None:
    """Which one it is cannot be told; what was computed must not be loaded."""
    nodes[2].flip(PARITIES, 100)
    with (
        closing(_sources([nodes[0], nodes[2], nodes[3]])) as found,
        pytest.raises(CheckpointNotFoundError, match=r"the part of rank 1, .* no parities"),
    ):
        found.load(_read)

    assert found.damaged == []
    assert len(found.unread) == len(found.skipped) == 3
    assert "it is unknown which" in found.skipped[0][1]
