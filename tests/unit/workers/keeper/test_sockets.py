"""A keeper's view of its trainers' connections, by real kernels."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TypeAlias

import pytest

from tests.support.network_cluster import why_not
from tests.support.no_descriptors import no_descriptors
from workers.keeper.sockets import Sockets
from workers.protocol import Flow
from workers.telemetry import process_state

#: Connects, sends what it is told to, and reads nothing.
SENDER = """
import socket, sys
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])))
connection.sendall(bytes(int(sys.argv[3])))
print("sent", flush=True)
connection.recv(1)
"""

#: In a network of its own, which then loses all packets.
CUT = """
import os, socket, subprocess, time
from workers.keeper.sockets import Sockets

subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
listener = socket.create_server(("127.0.0.1", 0))
connection = socket.create_connection(listener.getsockname())
taken = listener.accept()[0]
sockets = Sockets()
assert not any(flow.backoff for flow in sockets.look({"w0": os.getpid()}))
subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
connection.sendall(bytes(10_000))
begun_s = time.monotonic()
while not (dead := [flow for flow in sockets.look({"w0": os.getpid()}) if flow.backoff >= 2]):
    assert time.monotonic() < begun_s + 60.0
    time.sleep(0.02)
assert [flow.here for flow in dead] == [connection.getsockname()[:2]], dead
print(dead[0].in_flight > 0, dead[0].queued_bytes, time.monotonic() - begun_s)
"""

#: Where one end listens, and where the other connects; the last end has an address of both kinds.
HOSTS = (("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("::", "127.0.0.1"))

Connect: TypeAlias = Callable[[tuple[str, str], int], tuple[socket.socket, int]]


def _flow(flows: tuple[Flow, ...] | None, port: int, *, at: str) -> Flow:
    """Return the one connection whose end ``at`` ("here" or "there") has that port."""
    (found,) = (flow for flow in flows or () if getattr(flow, at)[1] == port)
    return found


@pytest.fixture
def frozen() -> Iterator[Connect]:
    """Return how to get a connection from a process that is stopped, and its id."""
    with ExitStack() as stack:

        def connect(hosts: tuple[str, str], num_bytes: int) -> tuple[socket.socket, int]:
            is_6 = ":" in hosts[0]
            family = socket.AF_INET6 if is_6 else socket.AF_INET
            listener = stack.enter_context(
                socket.create_server((hosts[0], 0), family=family, dualstack_ipv6=is_6)
            )
            words = [sys.executable, "-c", SENDER, hosts[1], str(listener.getsockname()[1])]
            command = [*words, str(num_bytes)]
            sender = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
            stack.callback(sender.kill)
            taken = stack.enter_context(listener.accept()[0])
            assert sender.stdout is not None
            sender.stdout.readline()
            os.kill(sender.pid, signal.SIGSTOP)
            while process_state(sender.pid).letter != "T":
                time.sleep(0.01)
            return taken, sender.pid

        yield connect


@pytest.mark.parametrize("hosts", HOSTS)
def test_both_ends_of_a_connection_are_seen_and_one_is_frozen(
    frozen: Connect, hosts: tuple[str, str]
) -> None:
    taken, pid = frozen(hosts, 5000)
    taken.recv(2000)
    port = taken.getsockname()[1]
    sockets = Sockets()

    flows = sockets.look({"w1": pid, "w2": os.getpid()})

    sender, receiver = _flow(flows, port, at="there"), _flow(flows, port, at="here")
    assert (sender.worker, receiver.worker) == ("w1", "w2")
    assert (sender.here, sender.there) == (receiver.there, receiver.here)
    # The kernel counts the packet that opens a connection as a byte.
    assert (sender.acked_bytes, sender.queued_bytes, sender.backoff) == (5001, 0, 0)
    assert (receiver.received_bytes, receiver.unread_bytes) == (5000, 3000)
    assert sender.rtt_us > 0
    assert "ffff" not in sender.here[0], "both ends write an address alike"


def test_only_news_is_reported_and_now_and_then_everything(
    frozen: Connect,
) -> None:
    taken, pid = frozen(HOSTS[0], 100)
    sockets = Sockets()
    first = sockets.look({"w1": pid})
    quiet = sockets.look({"w1": pid})
    taken.sendall(b"news")
    news = sockets.look({"w1": pid})
    later = [sockets.look({"w1": pid}) or () for _ in range(10)]

    assert [flow.worker for flow in first or ()] == ["w1"], "this process is no trainer"
    assert quiet == ()
    assert [flow.received_bytes for flow in news or ()] == [4]
    assert sum(map(len, later)) == 1


def test_a_trainer_that_is_found_later_has_its_connections(
    frozen: Connect,
) -> None:
    _, pid = frozen(HOSTS[0], 100)
    sockets = Sockets()
    sockets.look({"w2": os.getpid()})

    flows = sockets.look({"w1": pid, "w2": os.getpid()})

    assert {flow.worker for flow in flows or ()} >= {"w1"}


def test_nothing_is_known_while_no_socket_can_be_made() -> None:
    """As where a kernel or a sandbox does not answer."""
    sockets = Sockets()
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        stack.enter_context(socket.create_connection(listener.getsockname()))
        with no_descriptors():
            refused = sockets.look({"w1": os.getpid()})

        assert refused is None
        assert sockets.look({"w1": os.getpid()})


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can be made")
def test_a_dead_link_backs_off() -> None:
    command = ["unshare", "--net", sys.executable, "-c", CUT]
    root = Path(__file__).parents[4]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=120, cwd=root
    )

    is_in_flight, queued_bytes, _ = done.stdout.split()
    assert (is_in_flight, int(queued_bytes)) == ("True", 10_000)
