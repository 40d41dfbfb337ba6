"""Keepers as processes that copy each other's snapshots; one of them is killed at any moment."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.keeper_process import KeeperProcess, keeper
from tests.support.memory_versions import (
    check_loads,
    complete_versions,
    make_state,
    write_version,
)
from tests.support.snapshots import eventually
from workers.keeper.peers.client import RemotePart, WireClient
from workers.memory import Arena, LocalPart, Part, copy_name, notify, open_arena, reserve

NODES = ("nodeaaaaaaaaaaaa", "nodebbbbbbbbbbbb")
WORLD = 4
BODY_BYTES = 1 << 20


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[list[KeeperProcess]]:
    """Two keepers, each of which copies the other's."""
    with ExitStack() as stack:
        found = [stack.enter_context(keeper(node, tmp_path / node)) for node in NODES]
        for one, other in zip(found, reversed(found), strict=True):
            one.follow([other.peer])
        yield found


@pytest.fixture
def arenas(ring: list[KeeperProcess]) -> Iterator[list[Arena]]:
    """The snapshots of every rank, by rank; two on each node."""
    made = [
        reserve(ring[rank // 2].door, f"w{rank}.0", body_bytes=BODY_BYTES, attempt=1)
        for rank in range(WORLD)
    ]
    yield made
    for arena in made:
        arena.close()


def _step(ring: list[KeeperProcess], arenas: list[Arena], step: int) -> None:
    """Have every rank take its snapshot of a step."""
    for rank, arena in enumerate(arenas):
        write_version(arena, make_state(step), step=step, rank=rank, world_size=WORLD)
        notify(ring[rank // 2].door, f"w{rank}.0")


def _parts_without_node_0(ring: list[KeeperProcess], client: WireClient) -> list[Part]:
    """Return all that is left once node 0 is gone: what node 1 wrote, and what it copied."""
    parts: list[Part] = []
    for rank in (2, 3):
        own = open_arena(ring[1].door, f"w{rank}.0")
        parts += [LocalPart(own, held) for held in own.versions()]
    for rank in (0, 1):
        name = copy_name(NODES[0], f"w{rank}.0")
        copy = open_arena(ring[1].door, name)
        parts += [RemotePart(client, name, held) for held in copy.versions()]
        copy.close()
    return parts


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_a_lost_node_loses_no_version(
    ring: list[KeeperProcess], arenas: list[Arena], steps: int
) -> None:
    """Its ranks' parts come from the other node's memory, onto another number of ranks."""
    assert eventually(lambda: all(arena.is_followed() for arena in arenas))
    for step in range(1, steps + 1):
        _step(ring, arenas, step)
        assert eventually(lambda: all(arena.is_copied() for arena in arenas))
    ring[0].kill()

    client = WireClient((ring[1].peer.host, ring[1].peer.port), secret=ring[1].peer.secret)
    versions = complete_versions(_parts_without_node_0(ring, client))
    assert max(versions) == (1, steps)
    for (_, step), parts in versions.items():
        check_loads(parts, make_state(step), world_size=3)
    client.close()


@pytest.mark.parametrize("delay_s", [0.0, 0.001, 0.003, 0.01])
def test_a_node_that_is_lost_while_it_is_copied_leaves_the_version_before(
    ring: list[KeeperProcess], arenas: list[Arena], delay_s: float
) -> None:
    """Some ranks' parts of the newest may be here; all ranks' parts of the one before are here."""
    assert eventually(lambda: all(arena.is_followed() for arena in arenas))
    _step(ring, arenas, 1)
    assert eventually(lambda: all(arena.is_copied() for arena in arenas))
    _step(ring, arenas, 2)
    time.sleep(delay_s)
    ring[0].kill()

    client = WireClient((ring[1].peer.host, ring[1].peer.port), secret=ring[1].peer.secret)
    versions = complete_versions(_parts_without_node_0(ring, client))
    assert max(versions) in {(1, 1), (1, 2)}
    for (_, step), parts in versions.items():
        check_loads(parts, make_state(step), world_size=2)
    client.close()


def test_ranks_go_on_soon_after_the_keeper_that_copied_them_was_killed(
    ring: list[KeeperProcess], arenas: list[Arena]
) -> None:
    """Or after their own was: neither is there to say that copying has stopped.

    The last word of their own keeper expires by the clock, whatever else happens.
    """
    assert eventually(lambda: all(arena.is_followed() for arena in arenas))
    ring[1].kill()
    _step(ring, arenas, 1)
    assert eventually(lambda: not any(a.copy_behind() for a in arenas[:2]))
    assert eventually(lambda: not any(a.copy_behind() for a in arenas[2:]), within_s=3.0)
