"""One bit flips anywhere in a source, a hundred times: it is noticed, and nothing bad is loaded."""

import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from orchestrator.policies import bad_sources, versions
from tests.support.made import save_part
from tests.support.memory_versions import State, local_tensors, make_state, write_version
from ucp_core.errors import CheckpointCorruptError, UcpError
from ucp_core.native import Checkpoint, find_committed, load
from ucp_core.storage import LocalStore
from workers.keeper import MemorySources
from workers.keeper.arena_table import ArenaTable
from workers.keeper.descriptor_server import DescriptorServer
from workers.keeper.peers.server import WireServer
from workers.memory import descriptor_socket
from workers.protocol import Inventory, PartRef, Peer, Source

NUM_FLIPS = 100
WORLD = 2
SECRET = b"of this keeper"
#: The state after each step; steps 1 and 2 are held, of both ranks, by both nodes.
STATES = {step: make_state(step) for step in (1, 2)}
LINEAGE = ((1, 0),)
HEADER_BYTES = 60


class _Node:
    """A node whose keeper holds every version of every rank."""

    def __init__(self, name: str, directory: Path) -> None:
        directory.mkdir()
        self.name, self.directory = name, directory
        self.table = ArenaTable(budget_bytes=64 << 20)
        self._door = DescriptorServer(descriptor_socket(directory), self.table)
        self._wire = WireServer(self.table, host="127.0.0.1", secret=SECRET)
        for rank in range(WORLD):
            arena = self.table.reserve(f"w{rank:04d}.1", body_bytes=1 << 17)
            for step, state in STATES.items():
                write_version(arena, state, step=step, rank=rank, world_size=WORLD)

    @property
    def peer(self) -> Peer:
        host, port = self._wire.address
        return Peer(node=self.name, host=host, port=port, secret=SECRET)

    def inventory(self) -> Inventory:
        parts = tuple(
            PartRef(node=self.name, arena=name, held=held)
            for name, found in self.table.versions().items()
            for held in found
        )
        return Inventory(node=self.name, parts=parts)

    def flip(self, part: PartRef, at: str, rng: random.Random) -> None:
        """Flip one bit of the header, the data or the record of what a buffer holds."""
        arena = self.table.arena(part.arena)
        assert arena is not None
        held, bit = part.held, 1 << rng.randrange(8)
        if at == "header":
            start = arena.body_offset(held.buffer) - 4096 + rng.randrange(HEADER_BYTES)
            arena._memory[start] ^= bit
        elif at == "record":
            arena.body(held.buffer)[held.data_bytes + rng.randrange(held.record_bytes)] ^= bit
        else:
            arena.body(held.buffer)[rng.randrange(held.data_bytes)] ^= bit

    def close(self) -> None:
        self._door.close()
        self._wire.close()
        for name in self.table.arenas():
            self.table.drop(name)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[_Node]]:
    made = [_Node(name, tmp_path / name) for name in ("near", "peer")]
    yield made
    for node in made:
        node.close()


def _load(checkpoint: Checkpoint) -> State:
    """Return the whole state as it was loaded."""
    need = local_tensors({fqn: value * 0 for fqn, value in STATES[1].items()}, 0, 1)
    load(checkpoint, need)
    return {
        tensor.fqn: np.frombuffer(tensor.data, np.float32).reshape(tensor.shape) for tensor in need
    }


def _recover(nodes: list[_Node], told: list[Inventory]) -> tuple[int, State, list[Source]]:
    """Return what a run would resume from: the newest version that loads, of what was told."""
    bad: list[Source] = []
    while True:
        version = versions.newest(bad_sources.good(told, bad), (0, 0), LINEAGE, total_steps=9)
        assert version is not None, "nothing is left"
        peers = {node.name: node.peer for node in nodes}
        parts = [replace(part, peer=peers[part.node]) for part in version.parts]
        sources = MemorySources(parts, node=nodes[0].name, keeper_directory=nodes[0].directory)
        with closing(sources):
            try:
                loaded = sources.load(_load)
            except UcpError:
                assert {*sources.damaged, *sources.unread} - {*bad}, "it would not come to an end"
                loaded = None
        bad += [*sources.damaged, *sources.unread]
        if loaded is not None:
            return version.step, loaded, bad


@pytest.mark.parametrize("num_holders", [1, 2])
def test_every_flipped_bit_is_noticed_and_another_source_is_loaded(
    nodes: list[_Node], num_holders: int
) -> None:
    """In data, record or header, on this node or a peer; of one holder of a part, or of all."""
    rng = random.Random(num_holders)
    told = [node.inventory() for node in nodes]
    for number in range(NUM_FLIPS):
        before = [
            (arena, bytes(arena._memory))
            for node in nodes
            for arena in node.table.arenas().values()
        ]
        rank = rng.randrange(WORLD)
        flipped: set[Source] = set()
        # A loader takes what is near first; it never comes to the peer's while that is whole.
        for node, inventory in list(zip(nodes, told, strict=True))[:num_holders]:
            part = next(p for p in inventory.parts if (p.held.rank, p.held.step) == (rank, 2))
            node.flip(part, ("data", "record", "header")[number % 3], rng)
            flipped.add(part.source)
        step, loaded, bad = _recover(nodes, told)

        assert set(bad) == flipped, number
        assert step == (2 if num_holders < len(nodes) else 1)
        for fqn, value in STATES[step].items():
            assert loaded[fqn].tobytes() == value.tobytes(), (number, fqn)
        for arena, content in before:
            arena._memory[:] = content


def test_every_flipped_bit_in_storage_is_noticed_and_the_older_version_is_loaded(
    tmp_path: Path,
) -> None:
    """In a file of data, in the manifest, which alone is read, or cut off at its end."""
    store, root, rng = LocalStore(), str(tmp_path), random.Random(7)
    for step, state in STATES.items():
        for rank in range(WORLD):
            save_part(
                store,
                f"{root}/step-{step:08d}",
                local_tensors(state, rank, WORLD),
                step=step,
                rank=rank,
                world_size=WORLD,
            )
    folder = tmp_path / "step-00000002"
    files = [*sorted(folder.glob("*.bin")), folder / "manifest.json"]
    for number in range(NUM_FLIPS):
        path = files[number % len(files)]
        content = path.read_bytes()
        damaged = bytearray(content)
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        exclude: set[str] = set()
        while True:
            found = find_committed(store, root, lineage=LINEAGE, exclude=frozenset(exclude))
            assert found is not None
            try:
                loaded = _load(found.checkpoint)
            except CheckpointCorruptError:
                exclude.add(f"step-{found.step:08d}")
                continue
            break
        path.write_bytes(content)

        assert found.step == 1, f"flip {number} in {path.name} was not noticed"
        for fqn, value in STATES[1].items():
            assert loaded[fqn].tobytes() == value.tobytes(), (number, fqn)
