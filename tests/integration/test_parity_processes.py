"""Keepers as processes that keep parities of their group; two of them are killed at any moment."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.support.keeper_process import KeeperProcess, keeper
from tests.support.memory_versions import local_tensors, make_state, write_version
from tests.support.snapshots import eventually
from ucp_core.native import Checkpoint, load
from workers.keeper import MemorySources
from workers.keeper.peers.parity_mirror import parity_name
from workers.memory import Arena, notify, open_arena, reserve
from workers.protocol import LOCAL_MEMORY, PARITY, PEER_MEMORY, GroupPlace, ParityGroup, PartRef

#: Ranks by node: the first has more than the others.
RANKS = ((0, 1), (2,), (3,), (4,), (5,))
WORLD = 6
#: Nodes without a rank of the second row keep parities of it all the same.
NUM_LANES = 2
BODY_BYTES = 1 << 19


class _Group:
    """Five nodes with their ranks' arenas, under double parity."""

    def __init__(self, keepers: Sequence[KeeperProcess], directories: Sequence[Path]) -> None:
        self.keepers, self.directories = keepers, directories
        self.arenas = {
            rank: reserve(keepers[node].door, f"w{rank}.0", body_bytes=BODY_BYTES, attempt=1)
            for node, ranks in enumerate(RANKS)
            for rank in ranks
        }
        for one in keepers:
            places = tuple(
                GroupPlace(peer=None if other is one else other.peer, ranks=ranks)
                for other, ranks in zip(keepers, RANKS, strict=True)
            )
            one.protect(ParityGroup(attempt=1, tolerance=2, places=places))
        assert eventually(lambda: all(arena.is_followed() for arena in self.arenas.values()))

    def take(self, step: int) -> None:
        """Have every rank take its snapshot of a step."""
        for node, ranks in enumerate(RANKS):
            for rank in ranks:
                state, arena = make_state(step), self.arenas[rank]
                write_version(arena, state, step=step, rank=rank, world_size=WORLD)
                notify(self.keepers[node].door, f"w{rank}.0")

    def is_protected(self) -> bool:
        return all(arena.is_copied() for arena in self.arenas.values())

    def left(self, lost: set[int]) -> dict[int, list[PartRef]]:
        """Return all that the other nodes hold, by step."""
        found: dict[int, list[PartRef]] = {}
        for node, (one, ranks) in enumerate(zip(self.keepers, RANKS, strict=True)):
            names = [f"w{rank}.0" for rank in ranks]
            names += [parity_name(row, 1) for row in range(NUM_LANES)]
            for name in names if node not in lost else ():
                arena: Arena = open_arena(one.door, name)
                for held in arena.versions():
                    ref = PartRef(node=one.peer.node, arena=name, held=held, peer=one.peer)
                    found.setdefault(held.step, []).append(ref)
                arena.close()
        return found


@pytest.fixture
def group(tmp_path: Path) -> Iterator[_Group]:
    directories = [tmp_path / str(node) for node in range(len(RANKS))]
    with ExitStack() as stack:
        keepers = [
            stack.enter_context(keeper(f"node{number:08d}", directory))
            for number, directory in enumerate(directories)
        ]
        made = _Group(keepers, directories)
        yield made
        for arena in made.arenas.values():
            arena.close()


def _check_loads(group: _Group, places: Sequence[PartRef], near: int, step: int) -> set[str]:
    """Load a version on a node that is left, to the bit; return the kinds of its sources."""

    def fill(checkpoint: Checkpoint) -> None:
        state = make_state(step)
        need = local_tensors({fqn: value * 0 for fqn, value in state.items()}, 0, 1)
        load(checkpoint, need)
        expected = local_tensors(state, 0, 1)
        assert [bytes(one.data) for one in need] == [bytes(one.data) for one in expected]

    node = group.keepers[near].peer.node
    sources = MemorySources(places, node=node, keeper_directory=group.directories[near])
    with closing(sources) as found:
        found.load(fill)
    return set(found.taken_bytes)


@pytest.mark.parametrize("lost", [(0, 1), (2, 4)])
def test_two_lost_nodes_of_a_group_lose_no_version(group: _Group, lost: tuple[int, int]) -> None:
    """With their ranks' parts go their parities; what is left of the group has to do."""
    for step in range(1, 5):
        group.take(step)
        assert eventually(group.is_protected)
    for node in lost:
        group.keepers[node].kill()

    left = group.left(set(lost))
    assert max(left) == 4
    assert _check_loads(group, left[4], 3, 4) == {LOCAL_MEMORY, PEER_MEMORY, PARITY}
    assert _check_loads(group, left[3], 3, 3) == {LOCAL_MEMORY, PEER_MEMORY, PARITY}


def test_two_nodes_that_are_lost_while_parities_are_made_leave_the_version_before(
    group: _Group,
) -> None:
    """Some nodes may have parities of the newest; all nodes have those of the one before."""
    group.take(1)
    assert eventually(group.is_protected)
    group.take(2)
    # Not a wait for a condition: a moment at which they are usually under way.
    time.sleep(0.002)
    group.keepers[4].kill()
    group.keepers[0].kill()

    left = group.left({0, 4})
    assert PARITY in _check_loads(group, left[1], 2, 1)
