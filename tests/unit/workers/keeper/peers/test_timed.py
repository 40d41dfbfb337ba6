"""How fast bytes get to a peer's kernel."""

import socket
import threading
import time
from dataclasses import replace

import pytest

from tests.support.wired import SECRET
from workers.keeper.peers import WireServer, rate_to
from workers.keeper.peers.frames import CHALLENGE_BYTES, receive
from workers.keeper.peers.timed import WITHIN_S
from workers.protocol import Peer


@pytest.fixture
def size() -> int:
    """The rate is that of the snapshot that the keeper has."""
    return 1000


def _peer(address: tuple[str, int]) -> Peer:
    return Peer(node="n", host=address[0], port=address[1], secret=SECRET)


def test_a_keeper_takes_what_is_timed_and_serves_on(server: WireServer) -> None:
    peer = _peer(server.address)

    assert [rate_to(peer) > 1e7 for _ in range(2)] == [True, True]


def test_a_slow_way_is_timed_for_no_longer_and_told_as_slow() -> None:
    """This peer's kernel has room for a part, and its process takes 1 MB/s."""
    with socket.socket() as narrow:
        narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 10)
        narrow.bind(("127.0.0.1", 0))
        narrow.listen()

        def serve() -> None:
            with narrow.accept()[0] as taken:
                taken.sendall(bytes(CHALLENGE_BYTES))
                receive(taken, CHALLENGE_BYTES)
                while taken.recv(5000):
                    time.sleep(0.005)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        begun_s = time.monotonic()
        rate = rate_to(_peer(narrow.getsockname()))
        took_s = time.monotonic() - begun_s
        thread.join(30)

    assert 1e4 < rate < 1e7
    assert took_s >= WITHIN_S


def test_an_unreachable_peer_or_one_without_the_secret_is_not_timed(server: WireServer) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        with pytest.raises(OSError, match="refused"):
            rate_to(_peer(closed.getsockname()))
    stranger = replace(_peer(server.address), secret=b"other")
    with pytest.raises(OSError, match=r"reset|Broken"):
        rate_to(stranger)
