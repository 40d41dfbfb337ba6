"""Copies of another node's snapshots: the newest, whole, and without delaying training."""

import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from tests.support.made import held_of
from tests.support.snapshots import eventually
from workers.keeper.arena_table import ArenaTable
from workers.keeper.peers import mirror as mirror_module
from workers.keeper.peers import server as wire
from workers.keeper.peers.client import WireClient
from workers.keeper.peers.mirror import Mirror, Mirrors, wanted
from workers.keeper.peers.server import WireServer
from workers.memory import NUM_BUFFERS, Arena
from workers.memory import arena as arena_module
from workers.protocol import Held, Peer

SECRET = b"of the peer"
NODE = "0123456789abcdef"
NAME = "w0001.0"
COPY = "0123456789ab/w0001.0"
SIZE = 200_000
#: Only a wait's end takes so long, however busy the machine is.
LONG_S = 60.0


def _content(attempt: int, step: int, size: int = SIZE) -> bytes:
    return np.random.default_rng((attempt, step)).bytes(size)


def _write(
    table: ArenaTable,
    step: int,
    *,
    attempt: int = 1,
    name: str = NAME,
    size: int = SIZE,
    kept: tuple[int, int] | None = None,
) -> Held:
    """Write a version as a trainer does, and give notice of it."""
    arena = table.arena(name)
    assert arena is not None
    buffer = arena.choose(table.lineage, kept=kept)
    arena.begin(buffer, attempt=attempt, step=step, rank=3, world_size=5)
    arena.body(buffer)[:size] = _content(attempt, step, size)
    arena.finish(buffer, data_bytes=size - 1000, record_bytes=1000)
    table.tell()
    held = arena.held(buffer)
    assert held is not None
    return held


def _check_whole(arena: Arena) -> list[tuple[int, int]]:
    """Return the versions of an arena, each of which must be all there while it is said to be."""
    held = arena.versions()
    for each in held:
        size = each.data_bytes + each.record_bytes
        found = bytes(arena.body(each.buffer)[:size])
        if arena.held(each.buffer) == each:
            assert found == _content(each.attempt, each.step, size)
    return [(each.attempt, each.step) for each in held]


@pytest.fixture
def theirs() -> Iterator[ArenaTable]:
    table = ArenaTable(budget_bytes=1 << 30)
    table.reserve(NAME, body_bytes=SIZE)
    yield table
    table.drop(NAME)


@pytest.fixture
def source(theirs: ArenaTable) -> Arena:
    arena = theirs.arena(NAME)
    assert arena is not None
    return arena


@pytest.fixture
def ours() -> Iterator[ArenaTable]:
    table = ArenaTable(budget_bytes=1 << 30)
    yield table
    for name in table.versions():
        table.drop(name)


@pytest.fixture
def server(theirs: ArenaTable) -> Iterator[WireServer]:
    server = WireServer(theirs, host="127.0.0.1", secret=SECRET)
    yield server
    server.close()


def _peer(server: WireServer) -> Peer:
    host, port = server.address
    return Peer(node=NODE, host=host, port=port, secret=SECRET)


@pytest.fixture
def mirrors(ours: ArenaTable) -> Iterator[Mirrors]:
    mirrors = Mirrors(ours)
    yield mirrors
    mirrors.stop()


def _copies(ours: ArenaTable) -> list[tuple[int, int]]:
    arena = ours.arena(COPY)
    return [] if arena is None else [(held.attempt, held.step) for held in arena.versions()]


def _wait_for_copy(ours: ArenaTable, step: int) -> None:
    assert eventually(lambda: (1, step) in _copies(ours))


def test_a_copy_is_the_original_but_for_its_place(
    theirs: ArenaTable, ours: ArenaTable, server: WireServer, mirrors: Mirrors
) -> None:
    """A loader must find the rank's own record behind the rank's own bytes."""
    for step in (4, 5):
        original = _write(theirs, step)
    mirrors.follow([_peer(server)])
    assert eventually(lambda: _copies(ours) == [(1, 5)])

    copy = ours.arena(COPY)
    assert copy is not None
    _check_whole(copy)
    (held,) = copy.versions()
    assert replace(held, buffer=original.buffer, sequence=original.sequence) == original


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let peers wait for news and for each other so long that it shows."""
    monkeypatch.setattr(mirror_module, "POLL_S", LONG_S)
    monkeypatch.setattr(wire, "_POLL_S_MAX", LONG_S)
    monkeypatch.setattr(wire, "STALL_S", 2 * LONG_S)
    monkeypatch.setattr(wire, "_FOLLOW_STALL_S", 2 * LONG_S)
    monkeypatch.setattr(arena_module, "_FOLLOWED_NS", int(2e9 * LONG_S))


@pytest.mark.usefixtures("patient")
def test_every_version_is_copied_soon_and_the_ranks_are_told(
    theirs: ArenaTable, source: Arena, ours: ArenaTable, server: WireServer, mirrors: Mirrors
) -> None:
    """A poll once in a while would do for the copies, and cost the ranks all snapshots between."""
    mirrors.follow([_peer(server)])
    assert eventually(source.is_followed)
    begun_s = time.monotonic()
    for step in range(1, 21):
        _write(theirs, step)
        assert eventually(source.is_copied)
        assert _copies(ours)[-1] == (1, step)
    assert time.monotonic() - begun_s < LONG_S, "that is a wait's end, no news"


def test_the_last_copy_that_counts_outlives_what_is_copied_after_it(
    theirs: ArenaTable, ours: ArenaTable, server: WireServer, mirrors: Mirrors
) -> None:
    """Until all ranks have a version of the new attempt, the old one is what there is."""
    mirrors.follow([_peer(server)])
    for step in (8, 9, 10):
        _write(theirs, step)
        _wait_for_copy(ours, step)
    lineage = ((1, 0), (2, 8))
    theirs.fence(2, lineage)
    ours.fence(2, lineage)
    _write(theirs, 9, attempt=2)
    assert eventually(lambda: (2, 9) in _copies(ours))

    assert (1, 8) in _copies(ours)


def test_versions_that_are_dead_are_not_copied_and_not_waited_for(
    theirs: ArenaTable, source: Arena, ours: ArenaTable, server: WireServer, mirrors: Mirrors
) -> None:
    """After a resume the newest that a rank holds may be ahead of the history."""
    for step in (8, 9, 10):
        _write(theirs, step)
    ours.fence(2, ((1, 0), (2, 8)))
    mirrors.follow([_peer(server)])

    assert eventually(lambda: _copies(ours) == [(1, 8)])
    assert eventually(lambda: source.is_followed() and not source.copy_behind())


@pytest.mark.parametrize(
    ("lineage", "expected"),
    [((), (2, 7)), (((1, 0), (2, 5), (3, 6)), (2, 6)), (((1, 0), (2, 5), (3, 5)), (1, 5))],
)
def test_what_is_wanted_is_the_newest_that_counts(
    lineage: tuple[tuple[int, int], ...], expected: tuple[int, int]
) -> None:
    """Newest is by attempt first: steps are counted again after a resume."""
    versions = [(1, 5), (1, 9), (2, 6), (2, 7)]
    parts = [
        held_of(step, attempt=attempt, world_size=1, data_bytes=1) for attempt, step in versions
    ]
    found = wanted(parts, lineage)
    assert found is not None
    assert (found.attempt, found.step) == expected


def test_a_peer_that_comes_back_elsewhere_is_followed_into_the_same_copies(
    theirs: ArenaTable, ours: ArenaTable, server: WireServer, mirrors: Mirrors
) -> None:
    """Its keeper was restarted: another port, another secret, the ranks' memory as before."""
    mirrors.follow([_peer(server)])
    _write(theirs, 1)
    assert eventually(lambda: _copies(ours) == [(1, 1)])
    server.close()
    assert eventually(lambda: bool(mirrors.problems()))
    assert f"node {NODE} fails: the keeper at 127.0.0.1" in mirrors.problems()[0]
    _write(theirs, 2)

    again = WireServer(theirs, host="127.0.0.1", secret=b"another")
    mirrors.follow([replace(_peer(again), secret=b"another")])
    assert eventually(lambda: _copies(ours) == [(1, 1), (1, 2)])
    assert not mirrors.problems(), "what has passed is no problem"
    mirrors.stop()
    again.close()


def test_a_problem_goes_once_it_has_passed(
    theirs: ArenaTable,
    ours: ArenaTable,
    server: WireServer,
    mirrors: Mirrors,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A page said for a minute that copying fails, while copies were made."""
    listen, (_, port) = socket.create_server, server.address
    mirrors.follow([_peer(server)])
    server.close()
    assert eventually(lambda: bool(mirrors.problems()))

    monkeypatch.setattr(
        socket, "create_server", lambda address, **more: listen((address[0], port), **more)
    )
    again = WireServer(theirs, host="127.0.0.1", secret=SECRET)
    assert eventually(lambda: not mirrors.problems())
    _write(theirs, 1)
    assert eventually(lambda: _copies(ours) == [(1, 1)])
    mirrors.stop()
    again.close()


def test_a_broken_connection_is_made_again(
    theirs: ArenaTable,
    source: Arena,
    ours: ArenaTable,
    server: WireServer,
    mirrors: Mirrors,
) -> None:
    """Networks do that; it needs no report."""
    mirrors.follow([_peer(server)])
    for step in range(1, 6):
        _write(theirs, step)
        assert eventually(lambda: source.is_followed() and not source.copy_behind())
        server.disconnect()
        assert not mirrors.problems()
    assert _copies(ours)[-1] == (1, 5)


def test_a_peer_that_forgot_the_copied_versions_gets_them_again(
    theirs: ArenaTable, source: Arena, ours: ArenaTable, server: WireServer, mirrors: Mirrors
) -> None:
    """The connection broke before it heard: its ranks would wait for a copy that is there."""
    mirrors.follow([_peer(server)])
    held = _write(theirs, 1)
    _wait_for_copy(ours, 1)
    assert eventually(lambda: not source.copy_behind())
    server.disconnect()
    source.note_copied(replace(held, sequence=held.sequence - 2))
    assert eventually(lambda: source.is_followed() and not source.copy_behind())


def test_a_new_connection_lists_the_copied_versions_again(
    theirs: ArenaTable, source: Arena, ours: ArenaTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A range goes on by itself where its connection broke off, and the peer has forgotten who had
    got what: where two copy, the other one's word alone would never do."""
    monkeypatch.setattr(wire, "_FOLLOW_STALL_S", LONG_S)
    theirs.reserve("w0002.0", body_bytes=SIZE)
    slow = WireServer(theirs, host="127.0.0.1", secret=SECRET, bytes_per_s=SIZE / 2)
    other = WireClient(slow.address, secret=SECRET)
    first = _write(theirs, 1)
    other.list_arenas(after=-1, timeout_s=0.0)
    others = set(slow._open)
    mirror = Mirror(ours, _peer(slow), SECRET)
    assert eventually(lambda: len(slow._open) == 2)
    (follower,) = slow._open - others
    assert eventually(lambda: slow._liveness._got.get(follower, {}).get(NAME) == first)

    second = _write(theirs, 1, name="w0002.0")
    assert eventually(lambda: ours.arena("0123456789ab/w0002.0") is not None)
    follower.shutdown(socket.SHUT_RDWR)
    assert eventually(lambda: len(ours.versions()["0123456789ab/w0002.0"]) == 1)
    other.list_arenas(after=-1, timeout_s=0.0, copied={NAME: first, "w0002.0": second})
    assert eventually(source.is_copied)
    mirror.stop()
    other.close()
    slow.close()
    theirs.drop("w0002.0")


def test_nothing_half_is_ever_a_copy(
    theirs: ArenaTable,
    source: Arena,
    ours: ArenaTable,
    mirrors: Mirrors,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A writer that does not wait overtakes the copying; its buffers change under the reads."""
    monkeypatch.setattr(wire, "CHUNK_BYTES", 1 << 14)
    slow = WireServer(theirs, host="127.0.0.1", secret=SECRET, bytes_per_s=20 * SIZE)
    mirrors.follow([_peer(slow)])
    end_s = time.monotonic() + 2.0
    step = 0
    while time.monotonic() < end_s:
        step += 1
        _write(theirs, step)
        if (copy := ours.arena(COPY)) is not None:
            _check_whole(copy)
        time.sleep(0.01)
    assert eventually(lambda: not source.copy_behind())

    copy = ours.arena(COPY)
    assert copy is not None
    assert _check_whole(copy)[-1] == (1, step)
    mirrors.stop()
    slow.close()


def test_ranks_that_do_not_wait_keep_what_the_copy_has_and_it_is_reported(
    theirs: ArenaTable, source: Arena, ours: ArenaTable, mirrors: Mirrors
) -> None:
    """A peer too slow for good: the one version that both have must outlive all that are not."""
    slow = WireServer(theirs, host="127.0.0.1", secret=SECRET, bytes_per_s=10 * SIZE)
    mirrors.follow([_peer(slow)])
    _write(theirs, 1)
    assert eventually(lambda: source.is_followed() and not source.copy_behind())
    for step in itertools.count(2):
        source.keep((1, 1))
        _write(theirs, step, kept=(1, 1))
        copy = ours.arena(COPY)
        assert copy is not None
        assert (1, 1) in _check_whole(copy)
        assert (1, 1) in _check_whole(source)
        if told := mirrors.problems():
            break
        time.sleep(0.01)
    assert "w0001.0 of node 0123456789abcdef is written faster than it can be copied" in told[0]
    mirrors.stop()
    slow.close()


def test_memory_that_is_refused_is_a_problem_and_delays_no_peer(
    theirs: ArenaTable,
    source: Arena,
    server: WireServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Training goes on without the copy; it is made once there is room."""
    monkeypatch.setattr(mirror_module, "_REFUSED_S", 0.2)
    theirs.reserve("w0002.0", body_bytes=SIZE)
    need = 2 * NUM_BUFFERS * (SIZE + 8192)
    small = ArenaTable(budget_bytes=need)
    small.reserve("w0007.0", body_bytes=SIZE)
    _write(theirs, 1)
    _write(theirs, 1, name="w0002.0")
    mirror = Mirror(small, _peer(server), SECRET)
    second = theirs.arena("w0002.0")
    assert second is not None

    assert eventually(lambda: bool(mirror.problems))
    told = mirror.problems["w0002.0"]
    assert told.startswith(f"w0002.0 of node {NODE} is not copied: snapshots of ")
    assert eventually(lambda: source.is_followed() and not source.copy_behind())
    assert eventually(lambda: not second.is_followed())
    small.drop("w0007.0")
    assert eventually(lambda: second.is_followed() and not second.copy_behind())
    assert eventually(lambda: not mirror.problems), "what has passed is no problem"
    mirror.stop()


def test_a_peer_with_another_secret_is_a_problem(ours: ArenaTable, server: WireServer) -> None:
    """It is not the keeper that the order meant."""
    mirror = Mirror(ours, _peer(server), b"wrong")
    assert eventually(lambda: bool(mirror.problems))
    mirror.stop()
    assert not ours.versions()


@pytest.mark.usefixtures("patient")
def test_a_mirror_stops_at_once_while_it_waits_for_news(
    source: Arena, ours: ArenaTable, server: WireServer
) -> None:
    """Every order may end it, and the keeper has reports to send."""
    mirror = Mirror(ours, _peer(server), SECRET)
    assert eventually(source.is_followed)
    begun_s = time.monotonic()
    mirror.stop()
    assert eventually(lambda: not source.is_followed(), within_s=LONG_S / 2), (
        "told, not only run out"
    )
    assert time.monotonic() - begun_s < LONG_S


@pytest.mark.usefixtures("patient")
def test_a_mirror_stops_at_once_while_it_connects(ours: ArenaTable) -> None:
    """A machine that is gone answers nothing, not even no."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as deaf:
        address = deaf.getsockname()
        with socket.create_connection(address):
            peer = Peer(node=NODE, host=address[0], port=address[1], secret=SECRET)
            mirror = Mirror(ours, peer, SECRET)
            assert eventually(lambda: _is_connecting(address[1]))
            begun_s = time.monotonic()
            mirror.stop()
            assert time.monotonic() - begun_s < LONG_S


def _is_connecting(port: int) -> bool:
    """Return whether some connection to ``port`` of this machine waits for its answer."""
    with open("/proc/self/net/tcp") as table:  # noqa: PTH123
        rows = [line.split() for line in table][1:]
    return any(row[2].endswith(f":{port:04X}") and row[3] == "02" for row in rows)


def test_copying_takes_what_trainers_leave(
    theirs: ArenaTable, ours: ArenaTable, server: WireServer
) -> None:
    """The keeper itself is above them, and no thread of it but those that copy may be below."""
    # Threads of earlier tests may end meanwhile.
    before, usual = set(threading.enumerate()), os.getpriority(os.PRIO_PROCESS, 0)
    mirrors = Mirrors(ours, usual + 2)
    mirrors.follow([_peer(server)])
    _write(theirs, 1)
    _wait_for_copy(ours, 1)
    niceness: dict[str, int] = {}
    for thread in {*threading.enumerate()} - before | {threading.main_thread()}:
        with contextlib.suppress(ProcessLookupError):
            niceness[thread.name] = os.getpriority(os.PRIO_PROCESS, thread.native_id or 0) - usual
    assert niceness == {"MainThread": 0, "wire-peer": 0, "mirror": 2}
    mirrors.stop()
