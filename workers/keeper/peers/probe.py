"""Find the peers that this node reaches, by one connection to each, all at once.

A connection that is made or refused shows that packets go both ways. Bytes that the peer's kernel
accepts show that large packets arrive; a wrong MTU on the way drops only these. The kernels do all
of this, so the probe also reaches a keeper that is busy or stopped. The peer's own probe tests
large packets in the other direction.
"""

import contextlib
import errno
import select
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Final

from workers.keeper.peers.frames import family_of, num_queued

#: Seconds for a probe: the kernel repeats a lost packet after a second.
PROBE_S: Final = 1.2
#: Maximum number of open connections: few compared with the descriptors that a process may have.
_BATCH: Final = 256
#: A listener closes a connection that sends such bytes after it has read the first packet.
_ANSWERS: Final = frozenset({0, errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE})
#: More than a packet holds, and less than a kernel accepts for a process that does not read.
SIZE_BYTES: Final = 16 << 10
#: Period of checking with the kernel whether the bytes have arrived.
_LOOK_S: Final = 0.005


def unreached(
    peers: Mapping[str, tuple[str, int]],
    *,
    within_s: float = PROBE_S,
    size_bytes: int = SIZE_BYTES,
) -> list[str]:
    """Return the names of the peers that cannot be connected to, or that no bytes reach.

    Args:
        peers: Address (host, port) by name.
        within_s: Time for every 256 of them.
        size_bytes: Number of bytes to send to each; with 0 a connection is enough.
    """
    left = list(peers.items())
    lost: list[str] = []
    while left:
        some, left = left[:_BATCH], left[_BATCH:]
        lost += _unreached(some, within_s, bytes(size_bytes))
    return lost


def _unreached(
    peers: Sequence[tuple[str, tuple[str, int]]], within_s: float, payload: bytes
) -> list[str]:
    pending, lost = _connecting(peers)
    poll, sent = select.poll(), set[int]()
    for number in pending:
        poll.register(number, select.POLLOUT)
    end_s = time.monotonic() + within_s
    while pending:
        left_s = max(0.0, end_s - time.monotonic())
        ready = {
            number for number, _ in poll.poll(1000.0 * (min(left_s, _LOOK_S) if sent else left_s))
        }
        for number in ready | sent:
            name, connection = pending[number]
            code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if not code and payload and number not in sent:
                with contextlib.suppress(OSError):
                    connection.send(payload)
                sent.add(number)
                # From now on the kernel reports only the end of the connection.
                poll.modify(number, 0)
            elif number in ready or not num_queued(connection):
                if code not in _ANSWERS:
                    lost.append(name)
                del pending[number]
                sent.discard(number)
                poll.unregister(number)
                connection.close()
        if not left_s:
            break
    for name, connection in pending.values():
        connection.close()
        lost.append(name)
    return lost


def _connecting(
    peers: Sequence[tuple[str, tuple[str, int]]],
) -> tuple[dict[int, tuple[str, socket.socket]], list[str]]:
    """Return the connections that are being made, by descriptor, and the peers without one."""
    pending: dict[int, tuple[str, socket.socket]] = {}
    lost: list[str] = []
    for name, address in peers:
        kind = socket.SOCK_STREAM | socket.SOCK_NONBLOCK
        connection = socket.socket(family_of(address[0]), kind)
        code = connection.connect_ex(address)
        if code in (0, errno.EINPROGRESS):
            pending[connection.fileno()] = (name, connection)
            continue
        connection.close()
        if code not in _ANSWERS:
            lost.append(name)
    return pending, lost
