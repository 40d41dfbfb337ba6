"""Snapshots over the network: the bytes that were asked for, or an error that says why not."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from tests.support.memory_versions import check_loads, make_state, write_version
from tests.support.snapshots import eventually
from ucp_core.errors import CheckpointCorruptError, StorageError
from workers.keeper import frames, wire
from workers.keeper.arena import Arena
from workers.keeper.frames import CHALLENGE_BYTES
from workers.keeper.shelf import Shelf
from workers.keeper.wire import CHUNK_BYTES, RemotePart, WireClient, WireServer
from workers.protocol import Held

SECRET = b"of this run"
SIZE = 4 * CHUNK_BYTES + 12_345


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    shelf = Shelf(budget_bytes=1 << 30)
    yield shelf
    shelf.drop("w0001")


@pytest.fixture
def arena(shelf: Shelf) -> Arena:
    arena = shelf.reserve("w0001", body_bytes=SIZE)
    _write(arena, 1)
    return arena


@pytest.fixture
def server(shelf: Shelf) -> Iterator[WireServer]:
    server = WireServer(shelf, host="127.0.0.1", secret=SECRET)
    yield server
    server.close()


def _write(arena: Arena, step: int) -> Held:
    slot = arena.choose(())
    arena.begin(slot, attempt=1, step=step, rank=0, world_size=1)
    body = np.frombuffer(arena.body(slot), np.uint8)[:SIZE]
    body[:] = np.random.default_rng(step).integers(0, 256, SIZE, np.uint8)
    arena.finish(slot, data_bytes=SIZE, record_bytes=0)
    held = arena.held(slot)
    assert held is not None
    return held


def _expected(arena: Arena, held: Held, start: int, stop: int) -> bytes:
    return bytes(arena.body(held.slot)[start:stop])


@pytest.mark.parametrize("is_bare", [False, True])
@pytest.mark.parametrize(
    ("start", "cuts"),
    [
        (0, [SIZE]),
        (7, [1, 0, 5000, CHUNK_BYTES, 3]),
        (9, [11] * 2000),
        (SIZE, []),
        (SIZE - 1, [1]),
    ],
)
def test_ranges_arrive_in_the_buffers_they_are_for(
    server: WireServer,
    arena: Arena,
    start: int,
    cuts: list[int],
    is_bare: bool,  # noqa: FBT001
) -> None:
    """Buffers and chunks have nothing to do with each other."""
    (held,) = arena.versions()
    client = WireClient(server.address, secret=SECRET)
    targets = [bytearray(size) for size in cuts]
    views = [memoryview(target) for target in targets]
    client.read("w0001", held, start, views, is_bare=is_bare)

    assert b"".join(targets) == _expected(arena, held, start, start + sum(cuts))
    client.close()


@pytest.mark.parametrize(("near_s", "is_near"), [(10.0, True), (0.0, False)])
def test_little_is_under_way_to_a_near_peer_and_as_much_as_it_takes_to_a_far_one(
    monkeypatch: pytest.MonkeyPatch, near_s: float, *, is_near: bool
) -> None:
    """A quarter of a megabyte is far too little where a round trip takes 20 ms."""
    monkeypatch.setattr(frames, "_NEAR_S", near_s)
    options = (socket.SO_SNDBUF, socket.SO_RCVBUF)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as connection,
    ):
        before = [connection.getsockopt(socket.SOL_SOCKET, option) for option in options]
        frames.fit_buffers(connection)
        after = [connection.getsockopt(socket.SOL_SOCKET, option) for option in options]
    assert (after != before) == is_near
    # The kernel doubles what it is told, for its own use, or takes the most that it may.
    assert not is_near or (after[0] <= 256 << 10 and after[1] <= 1 << 20)


def test_whoever_does_not_know_the_secret_gets_nothing(server: WireServer, arena: Arena) -> None:
    """The state of a model is worth stealing, and the port is open to the whole network."""
    (held,) = arena.versions()
    target = bytearray(10)
    with pytest.raises(StorageError, match=r"cannot be had from 127\.0\.0\.1"):
        WireClient(server.address, secret=b"of another").read(
            "w0001", held, 0, [memoryview(target)]
        )
    assert target == bytes(10)


def test_a_version_that_was_overwritten_is_refused(server: WireServer, arena: Arena) -> None:
    """Its place holds a newer one: sent under the old name it would be loaded as such."""
    (held,) = arena.versions()
    client = WireClient(server.address, secret=SECRET)
    for step in (2, 3, 4):
        _write(arena, step)
    with pytest.raises(StorageError, match="after step 1 was overwritten; use another source"):
        client.read("w0001", held, 0, [memoryview(bytearray(100))])
    # The connection is as good as before.
    newest = arena.versions()[-1]
    target = bytearray(100)
    client.read("w0001", newest, 0, [memoryview(target)])
    assert bytes(target) == _expected(arena, newest, 0, 100)
    client.close()


def test_what_is_not_there_is_refused_by_name(server: WireServer, arena: Arena) -> None:
    """A range outside of a slot would be another rank's state."""
    (held,) = arena.versions()
    client = WireClient(server.address, secret=SECRET)
    with pytest.raises(StorageError, match="no snapshot of w0002 is held here"):
        client.read("w0002", held, 0, [memoryview(bytearray(1))])
    with pytest.raises(StorageError, match="a slot of w0001 has"):
        client.read("w0001", held, arena.body_bytes - 5, [memoryview(bytearray(10))])
    client.close()


class _Bridge:
    """Passes bytes on to a server; breaks or damages the first connections on the way back."""

    def __init__(
        self, address: tuple[str, int], *, spare_bytes: int, faults: int, flip: bool
    ) -> None:
        self._target, self._spare_bytes, self._flip = address, spare_bytes, flip
        self._faults = faults
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self.passed_bytes = 0
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for end in (self._listener, *self._ends):
            end.close()

    def _run(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._target)
            self._ends += [client, server]
            threading.Thread(target=_copy, args=(client, server), daemon=True).start()
            threading.Thread(target=self._back, args=(server, client), daemon=True).start()

    def _back(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            self._pass_on(server, client)
        for end in (server, client):
            # The other direction waits for it in another thread: closing it alone says nothing.
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _pass_on(self, server: socket.socket, client: socket.socket) -> None:
        passed = 0
        while data := server.recv(1 << 16):
            if self._faults and passed + len(data) > self._spare_bytes:
                self._faults -= 1
                if not self._flip:
                    break
                data = data[:-1] + bytes([data[-1] ^ 1])
                passed = -(1 << 40)
            client.sendall(data)
            passed += len(data)
            self.passed_bytes += len(data)


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)


@pytest.mark.parametrize("flip", [False, True])
def test_a_range_goes_on_where_a_connection_broke_off(
    server: WireServer,
    arena: Arena,
    flip: bool,  # noqa: FBT001
) -> None:
    """Or where a bit was flipped on the way: what is verified is not asked for again."""
    (held,) = arena.versions()
    spare = 3 * CHUNK_BYTES + CHUNK_BYTES // 2
    bridge = _Bridge(server.address, spare_bytes=spare, faults=1, flip=flip)
    client = WireClient(bridge.address, secret=SECRET)
    target = bytearray(SIZE)
    client.read("w0001", held, 0, [memoryview(target)])

    assert bytes(target) == _expected(arena, held, 0, SIZE)
    assert bridge.passed_bytes < SIZE + 2 * CHUNK_BYTES, "verified chunks were sent again"
    client.close()
    bridge.close()


@pytest.mark.parametrize("spare_bytes", [0, 60_000])
def test_a_bit_that_is_flipped_on_the_way_to_a_load_is_noticed(
    shelf: Shelf, server: WireServer, spare_bytes: int
) -> None:
    """Loads do without the checksums of the wire, since those of the record are end to end."""
    state = make_state(1)
    held = write_version(
        shelf.reserve("w0002", body_bytes=1 << 20), state, step=1, rank=0, world_size=1
    )
    # The record comes first, the data behind it.
    spare_bytes += CHALLENGE_BYTES + (held.record_bytes if spare_bytes else 0)
    bridge = _Bridge(server.address, spare_bytes=spare_bytes, faults=1, flip=True)
    client = WireClient(bridge.address, secret=SECRET)
    part = RemotePart(client, "w0002", held, is_bare=True)
    with pytest.raises(CheckpointCorruptError):
        check_loads({0: part}, state, world_size=2)

    check_loads({0: part}, state, world_size=2)
    client.close()
    bridge.close()
    shelf.drop("w0002")


def test_a_peer_that_never_works_is_given_up(server: WireServer, arena: Arena) -> None:
    """There are other sources; somebody waits for this one."""
    (held,) = arena.versions()
    bridge = _Bridge(server.address, spare_bytes=100, faults=99, flip=False)
    client = WireClient(bridge.address, secret=SECRET)
    with pytest.raises(StorageError, match="use another source"):
        client.read("w0001", held, 0, [memoryview(bytearray(SIZE))])
    bridge.close()


def test_nonsense_on_the_port_hurts_nobody(server: WireServer, arena: Arena) -> None:
    """Scanners knock at every port."""
    with socket.create_connection(server.address) as scanner:
        scanner.sendall(os.urandom(200))
    (held,) = arena.versions()
    client = WireClient(server.address, secret=SECRET)
    client.read("w0001", held, 0, [memoryview(bytearray(10))])
    client.close()


def test_a_rate_limit_is_kept(shelf: Shelf, arena: Arena) -> None:
    """Recovery of one run must not take the network from another's training."""
    (held,) = arena.versions()
    server = WireServer(shelf, host="127.0.0.1", secret=SECRET, bytes_per_s=SIZE / 1.5)
    client = WireClient(server.address, secret=SECRET)
    begun = time.monotonic()
    client.read("w0001", held, 0, [memoryview(bytearray(SIZE))])
    client.read("w0001", held, 0, [memoryview(bytearray(SIZE))])
    took_s = time.monotonic() - begun
    assert took_s > 1.9, "two ranges of 1.5 s each, less the one second that was saved up"
    client.close()
    server.close()


@pytest.fixture
def client(server: WireServer) -> Iterator[WireClient]:
    client = WireClient(server.address, secret=SECRET)
    yield client
    client.close()


def test_a_listing_has_what_the_nodes_own_ranks_wrote(
    shelf: Shelf, arena: Arena, client: WireClient
) -> None:
    """Copies of copies would go round a ring of nodes for ever."""
    _write(shelf.reserve("0123456789ab/w0009.0", body_bytes=SIZE), 7)
    listing = client.list_arenas(after=-1, timeout_s=0.0)

    assert listing.arenas.keys() == {"w0001"}
    assert listing.arenas["w0001"].body_bytes == arena.body_bytes
    assert list(listing.arenas["w0001"].parts) == arena.versions()


def test_a_listing_waits_for_news(shelf: Shelf, arena: Arena, client: WireClient) -> None:
    """Whoever asks again and again instead is late, or takes the node's processors."""
    before = client.list_arenas(after=-1, timeout_s=0.0)
    begun_s = time.monotonic()
    assert client.list_arenas(after=before.news, timeout_s=0.4).news == before.news
    assert time.monotonic() - begun_s > 0.35, "it answered without news"

    def finish() -> None:
        assert eventually(arena.attended)
        _write(arena, 2)
        shelf.tell()

    writer = threading.Thread(target=finish)
    begun_s = time.monotonic()
    writer.start()
    after = client.list_arenas(after=before.news, timeout_s=1.9)
    writer.join()
    assert time.monotonic() - begun_s < 1.0, "it waited for the end of its time"
    assert [held.step for held in after.arenas["w0001"].parts] == [1, 2]


@pytest.mark.parametrize(("together_s", "expected"), [(20.0, {2}), (0.01, {1, 2})])
def test_ranks_that_finish_together_are_listed_together(
    shelf: Shelf,
    arena: Arena,
    client: WireClient,
    monkeypatch: pytest.MonkeyPatch,
    together_s: float,
    expected: set[int],
) -> None:
    """A listing for each costs both ends; but one that never finishes must not hold the others."""
    monkeypatch.setattr(wire, "_TOGETHER_S", together_s)
    second = shelf.reserve("w0002", body_bytes=SIZE)
    _write(second, 1)
    before = client.list_arenas(after=-1, timeout_s=0.0)

    def finish() -> None:
        _write(arena, 2)
        shelf.tell()
        if together_s > 1:
            assert eventually(lambda: shelf.wait_news(-1, 0.0) > before.news)
            _write(second, 2)
            shelf.tell()

    writer = threading.Thread(target=finish)
    writer.start()
    after = client.list_arenas(after=before.news, timeout_s=1.9)
    writer.join()
    assert {listed.parts[-1].step for listed in after.arenas.values()} == expected
    shelf.drop("w0002")


def test_what_is_copied_here_is_no_news_to_those_who_copy_from_here(
    shelf: Shelf, arena: Arena, client: WireClient
) -> None:
    """Two nodes that copy each other would wake each other once more for every version."""
    before = client.list_arenas(after=-1, timeout_s=0.0)
    _write(shelf.reserve("0123456789ab/w0009.0", body_bytes=SIZE), 7)
    shelf.tell()
    begun_s = time.monotonic()
    after = client.list_arenas(after=before.news, timeout_s=0.4)
    assert time.monotonic() - begun_s > 0.35, "it answered without news"
    assert (after.news > before.news, after.arenas) == (True, before.arenas)

    _write(arena, 2)
    shelf.tell()
    last = client.list_arenas(after=after.news, timeout_s=1.9)
    assert [held.step for held in last.arenas["w0001"].parts] == [1, 2]
    assert client.list_arenas(after=-1, timeout_s=1.9) == last, "who has nothing is told at once"
    assert time.monotonic() - begun_s < 1.5


def test_ranks_wait_only_for_whoever_is_there(
    server: WireServer, arena: Arena, client: WireClient
) -> None:
    """A peer that died while it copied must not keep the ranks from their snapshots for ever."""
    assert not arena.attended()
    client.list_arenas(after=-1, timeout_s=0.0)
    assert arena.attended()

    other = WireClient(server.address, secret=SECRET)
    other.list_arenas(after=-1, timeout_s=0.0)
    client.close()
    other.list_arenas(after=-1, timeout_s=0.0)
    assert arena.attended(), "one of two is still there"
    other.close()
    assert eventually(lambda: not arena.attended())


def test_ranks_do_not_wait_for_whoever_has_no_memory_for_them(
    arena: Arena, client: WireClient
) -> None:
    """It would never come to have their versions: they would take no snapshot any more."""
    client.list_arenas(after=-1, timeout_s=0.0)
    assert arena.attended()
    client.list_arenas(after=-1, timeout_s=0.0, without=["w0001"])
    assert not arena.attended()


def test_what_was_copied_is_noted_and_never_taken_back(arena: Arena, client: WireClient) -> None:
    """Of two that copy, the slower one still speaks of the version before."""
    (old,) = arena.versions()
    client.list_arenas(after=-1, timeout_s=0.0)
    assert arena.copy_behind()
    client.note_copied("w0001", old)
    assert eventually(lambda: not arena.copy_behind())

    new = _write(arena, 2)
    assert arena.copy_behind()
    client.note_copied("w0001", new)
    client.note_copied("w0001", old)
    client.note_copied("w0404", old)
    # It answers in order: the notices were taken.
    client.list_arenas(after=-1, timeout_s=0.0)
    assert not arena.copy_behind()


def test_what_was_copied_is_noted_though_the_connection_broke_meanwhile(
    server: WireServer, arena: Arena, client: WireClient
) -> None:
    """To claim memory for a first copy may take long; it is said once, and ranks would wait."""
    client.list_arenas(after=-1, timeout_s=0.0)
    (held,) = arena.versions()
    for connection in list(server._open):
        connection.shutdown(socket.SHUT_RDWR)
    assert eventually(lambda: not arena.attended())
    client.read("w0001", held, 0, [memoryview(bytearray(8))])
    client.list_arenas(after=-1, timeout_s=0.0, copied={"w0001": held})
    assert arena.attended()
    assert not arena.copy_behind()


def test_ranks_wait_for_all_who_copy_them(
    server: WireServer, arena: Arena, client: WireClient
) -> None:
    """The parities of a group are on several nodes; with one of them missing there is none."""
    others = [WireClient(server.address, secret=SECRET) for _ in range(2)]
    for each in (client, others[0]):
        each.list_arenas(after=-1, timeout_s=0.0)
    (held,) = arena.versions()
    for each in (client, others[1]):
        each.note_copied("w0001", held)
        each.list_arenas(after=-1, timeout_s=0.0, without=["w0001"] if each is others[1] else [])
    assert arena.copy_behind(), "one has got it, and one that does not follow"
    others[0].close()
    assert eventually(lambda: not arena.copy_behind())
    assert arena.attended()
    others[1].close()


def test_a_follower_that_stops_asking_is_left_alone(
    arena: Arena, client: WireClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its machine may be gone without a word, or its process stopped."""
    monkeypatch.setattr(wire, "_FOLLOW_STALL_S", 0.2)
    client.list_arenas(after=-1, timeout_s=0.0)
    assert arena.attended()
    assert eventually(lambda: not arena.attended(), within_s=1.0)


def test_a_silent_peer_is_given_up_on_either_side(
    server: WireServer, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is stopped keeps its connections, and says nothing."""
    monkeypatch.setattr(wire, "_STALL_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        client = WireClient(deaf.getsockname(), secret=SECRET)
        with pytest.raises(StorageError, match="TimeoutError: the peer sends nothing"):
            client.list_arenas(after=-1, timeout_s=0.0)

    with socket.create_connection(server.address) as greedy:
        greedy.sendall(frames.proof(SECRET, frames.receive(greedy, frames.CHALLENGE_BYTES)))
        held = frames.fields_of(arena.versions()[0])
        request = {"arena": "w0001", "held": held, "offset_bytes": 0, "size_bytes": SIZE}
        for _ in range(20):
            frames.send_json(greedy, request)
        assert eventually(lambda: bool(server._open))
        assert eventually(lambda: not server._open)


def test_nothing_is_waited_for_once_it_is_broken_off(arena: Arena, client: WireClient) -> None:
    """A keeper that is given a new order waits for this one to end."""
    news = client.list_arenas(after=-1, timeout_s=0.0).news
    threading.Timer(0.1, client.abort).start()
    begun_s = time.monotonic()
    failing = functools.partial(client.list_arenas, after=news, timeout_s=1.9)
    with pytest.raises(StorageError, match=r"the keeper at 127\.0\.0\.1:\d+ does not answer"):
        failing()
    with pytest.raises(StorageError, match="nothing is asked for any more"):
        failing()
    assert eventually(lambda: not arena.attended(), within_s=0.8)
    assert time.monotonic() - begun_s < 1.0
