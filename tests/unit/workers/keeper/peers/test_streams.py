"""Large ranges over several connections: the same bytes, the same refusals, and an end at once."""

import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from tests.support.snapshots import eventually
from tests.support.wired import SECRET
from ucp_core.errors import StorageError
from workers.keeper.arena_table import ArenaTable
from workers.keeper.peers.client import WireClient
from workers.keeper.peers.server import WireServer
from workers.keeper.peers.streams import Streams, dial
from workers.memory import Arena

NAME = "w0001"
SIZE = 8 << 20
#: So slow that a copy is cut into pieces: the first one is larger than what may go out at once.
BYTES_PER_S = 3 << 20


@pytest.fixture
def arena(table: ArenaTable) -> Arena:
    arena = table.reserve(NAME, body_bytes=SIZE)
    _write(arena, 1)
    return arena


@pytest.fixture
def server(table: ArenaTable) -> Iterator[WireServer]:
    server = WireServer(table, host="127.0.0.1", secret=SECRET, bytes_per_s=BYTES_PER_S)
    yield server
    server.close()


@pytest.fixture
def streams(server: WireServer, client: WireClient) -> Iterator[Streams]:
    streams = Streams(client, server.address, secret=SECRET)
    yield streams
    streams.close()


def _write(arena: Arena, step: int) -> None:
    buffer = arena.choose(())
    arena.begin(buffer, attempt=1, step=step, rank=0, world_size=1)
    if step == 1:
        arena.body(buffer)[:] = np.random.default_rng(step).bytes(SIZE)
    arena.finish(buffer, data_bytes=SIZE, record_bytes=0)


def test_a_large_range_arrives_whole_in_pieces(streams: Streams, arena: Arena) -> None:
    """The second copy uses the connections of the first."""
    for _ in range(2):
        (held,) = arena.versions()
        target = bytearray(SIZE)
        streams.read(NAME, held, memoryview(target))

        assert target == arena.body(held.buffer)
        assert any(each.name == "stream" for each in threading.enumerate())


def test_what_is_overwritten_meanwhile_is_refused(streams: Streams, arena: Arena) -> None:
    """No stream writes into the target afterwards."""
    (held,) = arena.versions()
    target = bytearray(SIZE)

    def write() -> None:
        eventually(lambda: any(each.name == "stream" for each in threading.enumerate()))
        for step in (2, 3, 4):
            _write(arena, step)

    writer = threading.Thread(target=write)
    writer.start()
    with pytest.raises(StorageError) as refusal:
        streams.read(NAME, held, memoryview(target))
    writer.join()

    assert refusal.value.facts["refused"]
    assert not any(each.name == "stream" for each in threading.enumerate())


def test_a_read_is_interrupted_at_once(streams: Streams, client: WireClient, arena: Arena) -> None:
    """A keeper that gets another peer does not wait for the old one."""
    (held,) = arena.versions()
    failed = threading.Event()

    def read() -> None:
        with pytest.raises(StorageError):
            streams.read(NAME, held, memoryview(bytearray(SIZE)))
        client.close()
        failed.set()

    reader = threading.Thread(target=read)
    reader.start()
    eventually(lambda: any(each.name == "stream" for each in threading.enumerate()))
    begun_s = time.monotonic()
    streams.abort()

    assert failed.wait(5.0)
    assert time.monotonic() - begun_s < 2.0
    reader.join()


def test_a_peer_that_breaks_every_connection_is_given_up(
    streams: Streams, arena: Arena, server: WireServer
) -> None:
    """Its mirror then reports it, and tries on."""
    (held,) = arena.versions()
    over = threading.Event()

    def breaking() -> None:
        while not over.wait(0.02):
            if any(each.name == "stream" for each in threading.enumerate()):
                server.disconnect()

    breaker = threading.Thread(target=breaking)
    breaker.start()
    with pytest.raises(StorageError) as broken:
        streams.read(NAME, held, memoryview(bytearray(SIZE)))
    over.set()
    breaker.join()

    assert not broken.value.facts["refused"]


def test_ports_that_do_not_answer_are_left_out() -> None:
    """A listener with a full queue drops what comes."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        made = dial(listener.getsockname(), 8, 0.2)
        assert 0 < len(made) < 8
        for each in made:
            each.close()
