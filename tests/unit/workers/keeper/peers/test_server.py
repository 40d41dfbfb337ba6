"""Snapshots over the network: the bytes that were asked for, or an error that says why not."""

import contextlib
import dataclasses
import errno
import os
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.memory_versions import check_loads, make_state, write_version
from tests.support.snapshots import eventually
from tests.support.wired import SECRET, write
from ucp_core.errors import CheckpointCorruptError, StorageError
from ucp_core.numerics import crc32
from workers.keeper.arena_table import ArenaTable
from workers.keeper.peers import frames
from workers.keeper.peers import server as wire
from workers.keeper.peers.client import RemotePart, WireClient
from workers.keeper.peers.frames import CHALLENGE_BYTES
from workers.keeper.peers.probe import unreached
from workers.keeper.peers.server import CHUNK_BYTES, WireServer
from workers.memory import Arena
from workers.memory import arena as arena_module
from workers.protocol import Held

SIZE = 4 * CHUNK_BYTES + 12_345

_write = partial(write, size=SIZE)


@pytest.fixture
def size() -> int:
    return SIZE


_FIELDS = [field.name for field in dataclasses.fields(Held)]


class _HeldBack:
    """A peer that answers three requests at once, and none before it has all of them."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._listener.close()
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            with connection:
                connection.sendall(bytes(CHALLENGE_BYTES))
                frames.receive(connection, 32)
                asked = [frames.receive_json(connection, size_bytes_max=1000) for _ in range(3)]
                for request in asked:
                    data = bytes([request["offset_bytes"]]) * request["size_bytes"]
                    connection.sendall(frames.CHUNK.pack(len(data), crc32(data)) + data)


@pytest.fixture
def held_back() -> Iterator[_HeldBack]:
    peer = _HeldBack()
    yield peer
    peer.close()


def _has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


def _expected(arena: Arena, held: Held, start: int, stop: int) -> bytes:
    return bytes(arena.body(held.buffer)[start:stop])


@pytest.mark.parametrize("is_unchecked", [False, True])
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
    is_unchecked: bool,  # noqa: FBT001
) -> None:
    """Buffers and chunks have nothing to do with each other."""
    (held,) = arena.versions()
    client = WireClient(server.address, secret=SECRET)
    targets = [bytearray(size) for size in cuts]
    views = [memoryview(target) for target in targets]
    client.read("w0001", held, start, views, is_unchecked=is_unchecked)

    assert b"".join(targets) == _expected(arena, held, start, start + sum(cuts))
    client.close()


@pytest.mark.skipif(not _has_ipv6(), reason="needs the address ::1")
def test_machines_that_have_only_ipv6_reach_one_another(table: ArenaTable, arena: Arena) -> None:
    """Their runs would train without snapshots, and say so in one word of the log."""
    server = WireServer(table, host="::1", secret=SECRET)
    client = WireClient(server.address, secret=SECRET)
    (held,) = arena.versions()

    assert _read(client, held, 0, SIZE) == _expected(arena, held, 0, SIZE)
    assert unreached({"peer": server.address}, within_s=5.0) == []
    client.close()
    server.close()


def _read(client: WireClient, held: Held, start: int, size_bytes: int) -> bytes:
    target = bytearray(size_bytes)
    client.read("w0001", held, start, [memoryview(target)])
    return bytes(target)


def test_what_is_asked_for_ahead_is_sent_without_being_asked_again(held_back: _HeldBack) -> None:
    """A round trip for each range would leave a fast network idle half of the time."""
    client = WireClient(held_back.address, secret=SECRET)
    held = Held(**dict.fromkeys(_FIELDS, 1))
    client.ask("w0001", held, [(0, 5), (9, 3), (2, 4)])

    found = [_read(client, held, start, size) for start, size in [(0, 5), (9, 3), (2, 4)]]
    assert found == [bytes([0]) * 5, bytes([9]) * 3, bytes([2]) * 4]
    client.close()


@given(
    calls=st.lists(
        st.tuples(
            st.booleans(),
            st.lists(st.tuples(st.integers(0, 50), st.integers(0, 40)), min_size=1, max_size=70),
        ),
        max_size=12,
    ),
)
@settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_a_client_gets_what_it_reads_whatever_it_requested(
    server: WireServer, arena: Arena, calls: list[tuple[bool, list[tuple[int, int]]]]
) -> None:
    """A load that ends early leaves unwanted bytes on the connection."""
    (held,) = arena.versions()
    client = WireClient(server.address, secret=SECRET)
    for is_ahead, ranges in calls:
        if is_ahead:
            client.ask("w0001", held, ranges)
        read = ranges[: 1 + len(ranges) // 2] if is_ahead else ranges
        for start, size in read:
            assert _read(client, held, start, size) == _expected(arena, held, start, start + size)
        assert client.list_arenas(after=-1, timeout_s=0.0).arenas.keys() == {"w0001"}
    client.close()


def test_what_was_asked_for_ahead_is_refused_like_anything_else(
    server: WireServer, arena: Arena
) -> None:
    """The refusals of the others are still on their way when the first is told."""
    (held,) = arena.versions()
    client = WireClient(server.address, secret=SECRET)
    for step in (2, 3, 4):
        _write(arena, step)
    newest = arena.versions()[-1]
    client.ask("w0001", held, [(0, 10), (10, 10), (20, 10)])
    with pytest.raises(StorageError, match="after step 1 was overwritten; use another source"):
        _read(client, held, 0, 10)

    assert _read(client, newest, 10, 10) == _expected(arena, newest, 10, 20)
    client.close()


def test_what_was_asked_for_ahead_goes_on_where_a_connection_broke_off(
    server: WireServer, arena: Arena
) -> None:
    """Nothing that was on its way then arrives: it is asked for once more."""
    (held,) = arena.versions()
    bridge = _Bridge(server.address, spare_bytes=CHUNK_BYTES, faults=1, flip=False)
    client = WireClient(bridge.address, secret=SECRET)
    half = CHUNK_BYTES // 2
    ranges = [(start, half) for start in range(0, 4 * half, half)]
    client.ask("w0001", held, ranges)

    found = b"".join(_read(client, held, start, size) for start, size in ranges)
    assert found == _expected(arena, held, 0, 4 * half)
    client.close()
    bridge.close()


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


def test_a_client_without_the_secret_gets_nothing(server: WireServer, arena: Arena) -> None:
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
    """A range outside of a buffer would be another rank's state."""
    (held,) = arena.versions()
    client = WireClient(server.address, secret=SECRET)
    with pytest.raises(StorageError, match="no snapshot of w0002 is held here"):
        client.read("w0002", held, 0, [memoryview(bytearray(1))])
    with pytest.raises(StorageError, match="a buffer of w0001 has"):
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
    table: ArenaTable, server: WireServer, spare_bytes: int
) -> None:
    """Loads do without the checksums of the wire, since those of the record are end to end."""
    state = make_state(1)
    held = write_version(
        table.reserve("w0002", body_bytes=1 << 20), state, step=1, rank=0, world_size=1
    )
    # The record comes first, the data behind it.
    spare_bytes += CHALLENGE_BYTES + (held.record_bytes if spare_bytes else 0)
    bridge = _Bridge(server.address, spare_bytes=spare_bytes, faults=1, flip=True)
    client = WireClient(bridge.address, secret=SECRET)
    part = RemotePart(client, "w0002", held, is_unchecked=True)
    with pytest.raises(CheckpointCorruptError):
        check_loads({0: part}, state, world_size=2)

    check_loads({0: part}, state, world_size=2)
    client.close()
    bridge.close()
    table.drop("w0002")


def test_a_peer_that_never_works_is_given_up(server: WireServer, arena: Arena) -> None:
    """There are other sources; somebody waits for this one."""
    (held,) = arena.versions()
    bridge = _Bridge(server.address, spare_bytes=100, faults=99, flip=False)
    client = WireClient(bridge.address, secret=SECRET)
    with pytest.raises(StorageError, match="use another source"):
        client.read("w0001", held, 0, [memoryview(bytearray(SIZE))])
    bridge.close()


def test_nonsense_on_the_port_does_no_harm(server: WireServer, arena: Arena) -> None:
    """Scanners knock at every port."""
    with socket.create_connection(server.address) as scanner:
        scanner.sendall(os.urandom(200))
    (held,) = arena.versions()
    client = WireClient(server.address, secret=SECRET)
    client.read("w0001", held, 0, [memoryview(bytearray(10))])
    client.close()


def test_a_rate_limit_is_kept(table: ArenaTable, arena: Arena) -> None:
    """Recovery of one run must not take the network from another's training."""
    (held,) = arena.versions()
    server = WireServer(table, host="127.0.0.1", secret=SECRET, bytes_per_s=SIZE / 1.5)
    client = WireClient(server.address, secret=SECRET)
    begun = time.monotonic()
    client.read("w0001", held, 0, [memoryview(bytearray(SIZE))])
    client.read("w0001", held, 0, [memoryview(bytearray(SIZE))])
    took_s = time.monotonic() - begun
    assert took_s > 1.9, "two ranges of 1.5 s each, less the one second that was saved up"
    client.close()
    server.close()


def test_a_slow_sender_is_not_silent_for_long(table: ArenaTable, arena: Arena) -> None:
    """A peer that hears nothing for 5 s gives up, and ranks wait for none that takes nothing.

    At 1 MiB a second a chunk of 4 MiB was sent after 4 s without a word, to one peer alone.
    """
    (held,) = arena.versions()
    server = WireServer(table, host="127.0.0.1", secret=SECRET, bytes_per_s=SIZE)
    client = WireClient(server.address, secret=SECRET)
    target = memoryview(bytearray(SIZE))
    sizes = list(client._stream("w0001", held, 0, [target], is_unchecked=False))
    assert bytes(target) == _expected(arena, held, 0, SIZE)
    assert max(sizes) <= SIZE / 10, "a tenth of what may go out in a second"
    client.close()
    server.close()


def test_a_reader_that_shares_a_limit_with_many_waits_briefly(
    table: ArenaTable, arena: Arena
) -> None:
    """A hundred workers that load at once would each hear nothing for longer than they wait."""
    (held,) = arena.versions()
    server = WireServer(table, host="127.0.0.1", secret=SECRET, bytes_per_s=SIZE)
    others = [socket.create_connection(server.address) for _ in range(9)]
    assert eventually(lambda: len(server._open) == 9)
    client = WireClient(server.address, secret=SECRET)
    target = memoryview(bytearray(SIZE))
    sizes = list(client._stream("w0001", held, 0, [target], is_unchecked=False))
    assert max(sizes) <= SIZE / 100, "a tenth of what may go out in a tenth of a second"
    for other in others:
        other.close()
    client.close()
    server.close()


def test_a_client_that_comes_while_no_file_can_be_opened_is_served_afterwards(
    server: WireServer, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many may load at once, from a keeper that may open few files."""
    accept, failures = socket.socket.accept, [OSError(errno.EMFILE, "too many open files")]

    def fail_once(listener: socket.socket) -> tuple[socket.socket, object]:
        if failures:
            raise failures.pop()
        return accept(listener)

    (held,) = arena.versions()
    monkeypatch.setattr(socket.socket, "accept", fail_once)
    # The server waits for the first one already.
    for _ in range(2):
        client = WireClient(server.address, secret=SECRET)
        client.read("w0001", held, 0, [memoryview(bytearray(10))])
        client.close()
    assert not failures


@pytest.mark.parametrize("is_unchecked", [False, True])
def test_a_follower_on_a_slow_link_is_there_though_a_chunk_takes_long(
    server: WireServer,
    arena: Arena,
    is_unchecked: bool,  # noqa: FBT001
) -> None:
    """Ranks go on without whoever gives no sign for 2 s, and the copy under way is for nothing."""

    def attended_until_ns() -> int:
        return int(arena._words[arena_module._FOLLOWED])

    with socket.create_connection(server.address) as slow:
        slow.sendall(frames.proof(SECRET, frames.receive(slow, frames.CHALLENGE_BYTES)))
        frames.send_json(slow, {"list": True, "after": -1, "timeout_s": 0.0, "without": []})
        frames.receive_json(slow, size_bytes_max=wire.LISTING_BYTES_MAX)
        listed_ns = attended_until_ns()
        held = frames.fields_of(arena.versions()[0])
        range_ = {"offset_bytes": 0, "size_bytes": SIZE, "unchecked": is_unchecked}
        frames.send_json(slow, {"arena": "w0001", "held": held} | range_)

        assert eventually(lambda: attended_until_ns() > listed_ns)


def test_a_silent_peer_is_given_up_on_either_side(
    server: WireServer, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is stopped keeps its connections, and says nothing."""
    monkeypatch.setattr(wire, "STALL_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        client = WireClient(deaf.getsockname(), secret=SECRET)
        with pytest.raises(StorageError, match="TimeoutError: the peer sends nothing"):
            client.list_arenas(after=-1, timeout_s=0.0)

    # As long as it takes to say who one is on a busy machine, too.
    monkeypatch.setattr(wire, "STALL_S", 2.0)
    with socket.create_connection(server.address) as greedy:
        assert eventually(lambda: bool(server._open))
        greedy.sendall(frames.proof(SECRET, frames.receive(greedy, frames.CHALLENGE_BYTES)))
        held = frames.fields_of(arena.versions()[0])
        request = {"arena": "w0001", "held": held, "offset_bytes": 0, "size_bytes": SIZE}
        for _ in range(20):
            frames.send_json(greedy, request)
        assert eventually(lambda: not server._open)
