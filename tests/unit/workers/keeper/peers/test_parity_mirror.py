"""A group of nodes that keep each other's parities while their ranks write."""

import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import pytest

from tests.support.memory_versions import check_loads, make_state, write_version
from tests.support.snapshots import eventually
from workers.errors import ParityError
from workers.keeper.arena_table import ArenaTable
from workers.keeper.peers import parity_mirror
from workers.keeper.peers import server as wire
from workers.keeper.peers.client import RemotePart, WireClient
from workers.keeper.peers.parity_mirror import ParityMirror, parity_name
from workers.keeper.peers.server import WireServer
from workers.memory import Arena, Part, is_copy, is_parity
from workers.memory import arena as arena_module
from workers.parity import lost_parts
from workers.protocol import GroupPlace, ParityGroup, Peer

BODY_BYTES = 1 << 17
#: Ranks by node: one node has more than the others, one has none.
RANKS = ((0, 1), (2,), (3,), ())
WORLD = 4
#: Only a wait's end takes so long, however busy the machine is.
LONG_S = 60.0


@dataclass
class _Node:
    place: int
    ranks: tuple[int, ...]
    table: ArenaTable
    server: WireServer
    arenas: dict[int, Arena]
    client: WireClient
    mirror: ParityMirror | None = None

    @property
    def problems(self) -> list[str]:
        return [] if self.mirror is None else list(self.mirror.problems.values())

    @property
    def peer(self) -> Peer:
        host, port = self.server.address
        return Peer(node=f"node{self.place}", host=host, port=port, secret=b"s")

    def parts(self, step: int, *, parity: bool) -> list[Part]:
        """Return what its memory has of a step, as a loader on another node reads it."""
        return [
            RemotePart(self.client, name, held)
            for name, versions in self.table.versions().items()
            for held in versions
            if held.step == step and is_parity(name) == parity
        ]


@contextmanager
def _node(place: int, ranks: tuple[int, ...], budget_bytes: int = 1 << 26) -> Iterator[_Node]:
    table = ArenaTable(budget_bytes=budget_bytes)
    arenas = {rank: table.reserve(f"w{rank}.0", body_bytes=BODY_BYTES) for rank in ranks}
    server = WireServer(table, host="127.0.0.1", secret=b"s")
    client = WireClient(server.address, secret=b"s")
    yield _Node(place, ranks, table, server, arenas, client)
    client.close()
    server.close()
    for name in table.versions():
        table.drop(name)


@pytest.fixture
def nodes() -> Iterator[list[_Node]]:
    with ExitStack() as stack:
        yield [stack.enter_context(_node(place, ranks)) for place, ranks in enumerate(RANKS)]


@contextmanager
def _protecting(
    nodes: Sequence[_Node], num_parities: int, attempt: int = 1
) -> Iterator[list[ParityMirror]]:
    mirrors = []
    for own in nodes:
        places = tuple(
            GroupPlace(peer=None if node is own else node.peer, ranks=node.ranks) for node in nodes
        )
        group = ParityGroup(attempt=attempt, tolerance=num_parities, places=places)
        own.mirror = ParityMirror(own.table, group)
        mirrors.append(own.mirror)
    yield mirrors
    for mirror in mirrors:
        mirror.stop()


def _write(
    nodes: Sequence[_Node], step: int, attempt: int = 1, kept: tuple[int, int] | None = None
) -> None:
    for node in nodes:
        for rank, arena in node.arenas.items():
            state = make_state(step)
            write_version(
                arena, state, step=step, rank=rank, world_size=WORLD, attempt=attempt, kept=kept
            )
            node.table.tell()


def _is_protected(nodes: Sequence[_Node]) -> bool:
    arenas = [arena for node in nodes for arena in node.arenas.values()]
    return all(arena.is_followed() and not arena.copy_behind() for arena in arenas)


def _all_have_parities(nodes: Sequence[_Node], step: int) -> bool:
    num_rows = max(len(node.ranks) for node in nodes)
    return all(len(node.parts(step, parity=True)) == num_rows for node in nodes)


def _check_survives(nodes: Sequence[_Node], lost: set[int], step: int) -> None:
    left = [node for node in nodes if node.place not in lost]
    parts = [part for node in left for part in node.parts(step, parity=False)]
    parities = [part for node in left for part in node.parts(step, parity=True)]
    found: list[Part] = [*parts, *lost_parts(parities, parts)]
    check_loads({part.held.rank: part for part in found}, make_state(step), world_size=3)


@pytest.mark.parametrize(
    ("num_parities", "losses"),
    [(1, [{0}, {1}, {2}, {3}]), (2, [{0}, {0, 1}, {1, 2}, {0, 3}, {2, 3}])],
)
def test_whatever_nodes_are_lost_the_newest_version_is_not(
    nodes: list[_Node], num_parities: int, losses: list[set[int]]
) -> None:
    """With their own parities; while the ranks have gone on step by step."""
    with _protecting(nodes, num_parities):
        _write(nodes, 1)
        assert eventually(lambda: _all_have_parities(nodes, 1))
        for step in range(2, 6):
            _write(nodes, step)
            assert eventually(lambda: _is_protected(nodes))
        for lost in losses:
            _check_survives(nodes, lost, 5)
            _check_survives(nodes, lost, 4)
        with pytest.raises(ParityError):
            _check_survives(nodes, {0, 1, 2} if num_parities > 1 else {0, 1}, 5)
    assert not any(node.problems for node in nodes)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let peers wait for news and for each other so long that it shows; before any node is."""
    monkeypatch.setattr(parity_mirror, "POLL_S", LONG_S * len(RANKS))
    monkeypatch.setattr(wire, "_POLL_S_MAX", LONG_S)
    monkeypatch.setattr(wire, "STALL_S", 8 * LONG_S)
    monkeypatch.setattr(wire, "_FOLLOW_STALL_S", 8 * LONG_S)
    monkeypatch.setattr(arena_module, "_FOLLOWED_NS", int(8e9 * LONG_S))


@pytest.mark.usefixtures("patient")
def test_ranks_are_told_at_once(nodes: list[_Node]) -> None:
    """Every wait for a poll's end would be snapshots that are not taken."""
    with _protecting(nodes, 1):
        _write(nodes, 1)
        assert eventually(lambda: _is_protected(nodes))
        begun_s = time.monotonic()
        for step in range(2, 22):
            _write(nodes, step)
            assert eventually(lambda: _is_protected(nodes))
    assert time.monotonic() - begun_s < LONG_S, "a wait's end, before it was told or was stopped"


@pytest.mark.usefixtures("patient")
def test_ranks_wait_while_another_node_of_their_group_is_behind(nodes: list[_Node]) -> None:
    """Half of a version's parts in a parity bring none of them back."""
    with _protecting(nodes, 1):
        _write(nodes, 1)
        assert eventually(lambda: _is_protected(nodes))
        _write(nodes[:2], 2)
        first = nodes[0].arenas[0]
        assert not eventually(lambda: not first.copy_behind(), within_s=1.0)
        _write(nodes[2:], 2)
        assert eventually(lambda: _is_protected(nodes))


def test_a_group_of_the_next_attempt_keeps_what_the_last_one_made(nodes: list[_Node]) -> None:
    """Until the first version of the new attempt is there, the old ones are what there is."""
    with _protecting(nodes, 1):
        _write(nodes, 1)
        assert eventually(lambda: _all_have_parities(nodes, 1))
    _write(nodes, 2)
    with _protecting(nodes, 1, attempt=2):
        assert eventually(lambda: _is_protected(nodes)), "the ranks wait for late parities"
        _check_survives(nodes, {1}, 1)
        _write(nodes, 3, attempt=2)
        assert eventually(lambda: _all_have_parities(nodes, 3))
        _check_survives(nodes, {0}, 3)
        _check_survives(nodes, {0}, 1)


def test_parities_of_what_is_kept_stay_whatever_dead_workers_kept(nodes: list[_Node]) -> None:
    """Memory of a worker that died stays while it is on its way to storage, and names what was kept
    in its own attempt: that is older than what the ranks of now have agreed on."""
    dead = nodes[1].table.reserve("w9.0", body_bytes=BODY_BYTES)
    write_version(dead, make_state(1), step=1, rank=0, world_size=WORLD, attempt=1)
    dead.keep((1, 1))
    with _protecting(nodes, 1, attempt=2):
        for step in range(2, 7):
            for arena in (arena for node in nodes for arena in node.arenas.values()):
                arena.keep((2, 2) if step > 2 else None)
            _write(nodes, step, attempt=2, kept=(2, 2))
            assert eventually(partial(_all_have_parities, nodes, step))
        assert _all_have_parities(nodes, 2)
        _check_survives(nodes, {0}, 2)


def test_parts_that_outgrow_their_parities_are_protected_all_the_same(nodes: list[_Node]) -> None:
    """Optimizers make state when a parameter gets its first gradient: a rank takes more memory."""
    with _protecting(nodes, 1):
        _write(nodes, 1)
        assert eventually(lambda: _is_protected(nodes))
        for factor in (2, 8):
            for rank, arena in nodes[1].arenas.items():
                body_bytes = factor * arena.body_bytes
                nodes[1].arenas[rank] = nodes[1].table.reserve(
                    f"w{rank}.{factor}", body_bytes=body_bytes
                )
            _write(nodes, factor)
            assert eventually(lambda: _is_protected(nodes))
            _check_survives(nodes, {0}, factor)
    _check_survives(nodes, {0}, 2)
    assert not any(node.problems for node in nodes)


def test_a_broken_connection_is_made_again(nodes: list[_Node]) -> None:
    """Networks do that; it needs no report."""
    with _protecting(nodes, 2):
        for step in range(1, 5):
            _write(nodes, step)
            assert eventually(lambda: _is_protected(nodes))
            for connection in list(nodes[0].server._open):
                connection.shutdown(socket.SHUT_RDWR)
        assert eventually(lambda: _all_have_parities(nodes, 4))
        _check_survives(nodes, {0, 2}, 4)
    assert not any(node.problems for node in nodes)


def test_memory_that_is_refused_is_a_problem_and_delays_no_peer() -> None:
    """One node of the group has no room: its group is not protected, and trains."""
    with ExitStack() as stack:
        nodes = [stack.enter_context(_node(place, (place,))) for place in range(2)]
        small = stack.enter_context(_node(2, (2,), budget_bytes=3 * (BODY_BYTES + (8 << 10))))
        nodes.append(small)
        with _protecting(nodes, 1):
            _write(nodes, 1)
            assert eventually(lambda: bool(small.problems))
            assert "protecting a group of 3 nodes by parity fails: " in small.problems[0]
            arenas = [node.arenas[node.place] for node in nodes]
            assert eventually(lambda: not any(arena.copy_behind() for arena in arenas))


def test_no_peer_copies_parities(nodes: list[_Node]) -> None:
    """They are redundancy already, and no rank's version."""
    assert is_parity(parity_name(0, 1))
    assert is_copy(parity_name(0, 1))
    with _protecting(nodes, 1):
        _write(nodes, 1)
        assert eventually(lambda: _is_protected(nodes))
        listing = nodes[0].client.list_arenas(after=-1, timeout_s=0.0)
        assert listing.arenas.keys() == {"w0.0", "w1.0"}
