import socket
import time

from workers.keeper.peers import unreached


def test_a_peer_that_takes_or_refuses_connections_is_reached() -> None:
    """A keeper that died leaves a closed port, and its machine is there all the same."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        peers = {"open": server.getsockname()[:2], "closed": closed.getsockname()[:2]}

        assert unreached(peers) == []


def test_a_peer_that_is_too_busy_to_answer_is_reached() -> None:
    """Nobody accepts here: the kernel does, and a stopped keeper is no lost link."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as server:
        peers = {f"n{number}": server.getsockname()[:2] for number in range(500)}

        assert unreached(peers) == []


def test_a_peer_that_drops_packets_is_not_reached_and_the_others_are() -> None:
    """That is how a lost link looks. The kernel drops them too where nobody accepts any more."""
    with (
        socket.create_server(("127.0.0.1", 0), backlog=0) as full,
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(full.getsockname()[:2]),
    ):
        peers = {"here": server.getsockname()[:2], "cut": full.getsockname()[:2]}
        began_s = time.monotonic()

        assert unreached(peers, within_s=0.5) == ["cut"]
        assert time.monotonic() - began_s >= 0.5
