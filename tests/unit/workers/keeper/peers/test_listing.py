"""A keeper's listing for nodes that copy from it, and its ranks' view of them."""

import socket
import threading
import time
from functools import partial

import pytest

from tests.support.snapshots import eventually
from tests.support.wired import SECRET, write
from ucp_core.errors import StorageError
from workers.keeper.arena_table import ArenaTable
from workers.keeper.peers import server as wire
from workers.keeper.peers.client import WireClient
from workers.keeper.peers.server import WireServer
from workers.memory import Arena
from workers.memory import arena as arena_module

SIZE = 12_345
#: Only a wait's end takes so long, however busy the machine is.
LONG_S = 60.0

_write = partial(write, size=SIZE)


@pytest.fixture
def size() -> int:
    return SIZE


def test_a_listing_has_what_the_nodes_own_ranks_wrote(
    table: ArenaTable, arena: Arena, client: WireClient
) -> None:
    """Copies of copies would go round a ring of nodes for ever."""
    _write(table.reserve("0123456789ab/w0009.0", body_bytes=SIZE), 7)
    listing = client.list_arenas(after=-1, timeout_s=0.0)

    assert listing.arenas.keys() == {"w0001"}
    assert listing.arenas["w0001"].body_bytes == arena.body_bytes
    assert list(listing.arenas["w0001"].parts) == arena.versions()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every wait be so long that its end cannot be taken for an answer on a busy machine."""
    monkeypatch.setattr(wire, "_POLL_S_MAX", LONG_S)
    monkeypatch.setattr(wire, "STALL_S", 2 * LONG_S)
    monkeypatch.setattr(wire, "_FOLLOW_STALL_S", 2 * LONG_S)
    monkeypatch.setattr(arena_module, "_FOLLOWED_NS", int(2e9 * LONG_S))


@pytest.mark.usefixtures("patient")
def test_a_listing_waits_for_news(table: ArenaTable, arena: Arena, client: WireClient) -> None:
    """A peer that polls instead is late, or takes the node's processors."""
    before = client.list_arenas(after=-1, timeout_s=0.0)
    begun_s = time.monotonic()
    assert client.list_arenas(after=before.news, timeout_s=0.4).news == before.news
    assert time.monotonic() - begun_s > 0.35, "it answered without news"

    def finish() -> None:
        assert eventually(arena.is_followed)
        _write(arena, 2)
        table.tell()

    writer = threading.Thread(target=finish)
    begun_s = time.monotonic()
    writer.start()
    after = client.list_arenas(after=before.news, timeout_s=LONG_S)
    writer.join()
    assert time.monotonic() - begun_s < LONG_S, "it waited for the end of its time"
    assert [held.step for held in after.arenas["w0001"].parts] == [1, 2]


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(("together_s", "expected"), [(LONG_S, {2}), (0.01, {1, 2})])
def test_ranks_that_finish_together_are_listed_together(
    table: ArenaTable,
    arena: Arena,
    client: WireClient,
    monkeypatch: pytest.MonkeyPatch,
    together_s: float,
    expected: set[int],
) -> None:
    """A listing for each costs both ends; but one that never finishes must not hold the others."""
    monkeypatch.setattr(wire, "_TOGETHER_S", together_s)
    second = table.reserve("w0002", body_bytes=SIZE)
    _write(second, 1)
    before = client.list_arenas(after=-1, timeout_s=0.0)

    def finish() -> None:
        _write(arena, 2)
        table.tell()
        if together_s > 1:
            assert eventually(lambda: table.wait_news(-1, 0.0) > before.news)
            _write(second, 2)
            table.tell()

    writer = threading.Thread(target=finish)
    writer.start()
    after = client.list_arenas(after=before.news, timeout_s=LONG_S)
    writer.join()
    assert {listed.parts[-1].step for listed in after.arenas.values()} == expected
    table.drop("w0002")


@pytest.mark.usefixtures("patient")
def test_what_is_copied_here_is_no_news_to_those_who_copy_from_here(
    table: ArenaTable, arena: Arena, client: WireClient
) -> None:
    """Two nodes that copy each other would wake each other once more for every version."""
    before = client.list_arenas(after=-1, timeout_s=0.0)
    _write(table.reserve("0123456789ab/w0009.0", body_bytes=SIZE), 7)
    table.tell()
    begun_s = time.monotonic()
    after = client.list_arenas(after=before.news, timeout_s=0.4)
    assert time.monotonic() - begun_s > 0.35, "it answered without news"
    assert (after.news > before.news, after.arenas) == (True, before.arenas)

    _write(arena, 2)
    table.tell()
    last = client.list_arenas(after=after.news, timeout_s=LONG_S)
    assert [held.step for held in last.arenas["w0001"].parts] == [1, 2]
    assert client.list_arenas(after=-1, timeout_s=LONG_S) == last, "who has nothing is told at once"
    assert time.monotonic() - begun_s < LONG_S


def test_ranks_wait_only_for_whoever_is_there(
    server: WireServer, arena: Arena, client: WireClient
) -> None:
    """A peer that died while it copied must not keep the ranks from their snapshots for ever."""
    assert not arena.is_followed()
    client.list_arenas(after=-1, timeout_s=0.0)
    assert arena.is_followed()

    other = WireClient(server.address, secret=SECRET)
    other.list_arenas(after=-1, timeout_s=0.0)
    client.close()
    other.list_arenas(after=-1, timeout_s=0.0)
    assert arena.is_followed(), "one of two is still there"
    other.close()
    assert eventually(lambda: not arena.is_followed())


def test_ranks_do_not_wait_for_whoever_has_no_memory_for_them(
    arena: Arena, client: WireClient
) -> None:
    """It would never have their versions: they would stop taking snapshots."""
    client.list_arenas(after=-1, timeout_s=0.0)
    assert arena.is_followed()
    client.list_arenas(after=-1, timeout_s=0.0, without=["w0001"])
    assert not arena.is_followed()


def test_what_was_copied_is_noted_and_never_taken_back(arena: Arena, client: WireClient) -> None:
    """The slower one of two copying nodes still reports the version before."""
    (old,) = arena.versions()
    client.list_arenas(after=-1, timeout_s=0.0)
    assert arena.copy_behind()
    client.note_copied({"w0001": old})
    assert eventually(lambda: not arena.copy_behind())

    new = _write(arena, 2)
    assert arena.copy_behind()
    client.note_copied({"w0001": new})
    client.note_copied({"w0001": old})
    client.note_copied({"w0404": old})
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
    assert eventually(lambda: not arena.is_followed())
    client.read("w0001", held, 0, [memoryview(bytearray(8))])
    client.list_arenas(after=-1, timeout_s=0.0, copied={"w0001": held})
    assert arena.is_followed()
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
        each.note_copied({"w0001": held})
        each.list_arenas(after=-1, timeout_s=0.0, without=["w0001"] if each is others[1] else [])
    assert arena.copy_behind(), "one has got it, and one that does not follow"
    others[0].close()
    assert eventually(lambda: not arena.copy_behind())
    assert arena.is_followed()
    others[1].close()


def test_a_follower_that_stops_asking_is_left_alone(
    arena: Arena, client: WireClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its machine may be gone without a word, or its process stopped."""
    monkeypatch.setattr(wire, "_FOLLOW_STALL_S", LONG_S)
    monkeypatch.setattr(arena_module, "_FOLLOWED_NS", int(1e9 * LONG_S))
    client.list_arenas(after=-1, timeout_s=0.0)
    assert arena.is_followed()
    client.list_arenas(after=-1, timeout_s=0.0, without=["w0001"])
    monkeypatch.setattr(wire, "_FOLLOW_STALL_S", 0.2)
    client.list_arenas(after=-1, timeout_s=0.0)
    assert eventually(lambda: not arena.is_followed(), within_s=LONG_S / 2)


@pytest.mark.usefixtures("patient")
def test_a_listing_that_is_broken_off_waits_no_longer(arena: Arena, client: WireClient) -> None:
    """A keeper that is given a new order waits for this one to end."""
    news = client.list_arenas(after=-1, timeout_s=0.0).news
    threading.Timer(0.1, client.abort).start()
    begun_s = time.monotonic()
    failing = partial(client.list_arenas, after=news, timeout_s=LONG_S)
    with pytest.raises(StorageError, match=r"the keeper at 127\.0\.0\.1:\d+ does not answer"):
        failing()
    with pytest.raises(StorageError, match="reading was stopped"):
        failing()
    assert eventually(lambda: not arena.is_followed(), within_s=LONG_S / 2)
    assert time.monotonic() - begun_s < LONG_S
