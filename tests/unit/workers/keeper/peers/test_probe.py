import socket
import subprocess
import sys
import time

import pytest

from tests.support import network_cluster
from workers.keeper.peers import unreached
from workers.keeper.peers.probe import PROBE_S
from workers.keeper.peers.server import WireServer


def test_a_peer_that_takes_or_refuses_connections_is_reached() -> None:
    """A keeper that died leaves a closed port, and its machine is there all the same."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        peers = {"open": server.getsockname()[:2], "closed": closed.getsockname()[:2]}

        assert unreached(peers) == []


def test_a_peer_that_is_too_busy_to_answer_is_reached() -> None:
    """No process accepts here: the kernel does, and a stopped keeper is no lost link."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as server:
        peers = {f"n{number}": server.getsockname()[:2] for number in range(500)}

        assert unreached(peers) == []


def test_a_peer_that_drops_packets_is_not_reached_and_the_others_are() -> None:
    """That is how a lost link looks. The kernel also drops them if no process accepts."""
    with (
        socket.create_server(("127.0.0.1", 0), backlog=0) as full,
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(full.getsockname()[:2]),
    ):
        peers = {"here": server.getsockname()[:2], "cut": full.getsockname()[:2]}
        began_s = time.monotonic()

        assert unreached(peers, within_s=0.5) == ["cut"]
        assert time.monotonic() - began_s >= 0.5


def test_a_peer_that_takes_a_part_of_what_is_sent_is_not_reached() -> None:
    """Small packets pass, and the data of a collective never does."""
    with socket.socket() as narrow, socket.create_server(("127.0.0.1", 0)) as server:
        narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2 << 10)
        narrow.bind(("127.0.0.1", 0))
        narrow.listen()
        peers = {"here": server.getsockname()[:2], "narrow": narrow.getsockname()[:2]}

        assert unreached(peers, within_s=0.5) == ["narrow"]
        assert unreached(peers, within_s=0.5, size_bytes=0) == []


def test_a_keeper_is_reached_though_it_hangs_up(server: WireServer) -> None:
    """The bytes sent to it prove no secret."""
    began_s = time.monotonic()

    assert unreached({"n1": server.address}) == []
    assert time.monotonic() - began_s < PROBE_S


@pytest.mark.skipif(bool(network_cluster.why_not()), reason=network_cluster.why_not())
def test_a_link_that_swallows_large_packets_alone_is_lost() -> None:
    """A wrong MTU on the way, with ICMP filtered: a connection is made, and no gradient arrives."""
    done = subprocess.run(
        ["unshare", "--net", "sh", "-ec", _SWALLOW, "-", sys.executable, "-c", _ASK],  # noqa: S607
        check=True,
        capture_output=True,
        text=True,
    )

    assert done.stdout.split() == ["0", "0", "0", "1"]


#: Asks, loses IP packets of 1,024 bytes and more (one of the upper bits of their length is set),
#: and asks again. Some kernels lack the action "drop".
_SWALLOW = """
ip link set lo mtu 1500 up
ip link add void up type veth peer name nowhere
ip link set nowhere up
"$@"
tc qdisc add dev lo clsact
for bit in 0x8000 0x4000 0x2000 0x1000 0x0800 0x0400; do
    tc filter add dev lo egress protocol ip u32 match u16 $bit $bit at 2 \\
        action mirred egress redirect dev void
done
"$@"
"""
_ASK = """
import socket
from workers.keeper.peers import unreached
with socket.create_server(("127.0.0.1", 0)) as server:
    for options in ({"size_bytes": 0}, {}):
        print(len(unreached({"n1": server.getsockname()[:2]}, **options)))
"""
