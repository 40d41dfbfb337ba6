"""Measure how fast bytes reach another node: send some and time its kernel's answers.

The fastest period counts: a connection starts slowly, especially with a long round trip, and
traffic in the other direction says nothing about the way there.
"""

import os
import select
import socket
import time
from collections import deque
from typing import Final

from workers.keeper.peers.frames import (
    CHALLENGE_BYTES,
    family_of,
    num_queued,
    proof,
    receive,
    send,
    send_json,
)
from workers.protocol import Peer

#: Bytes to send, enough that the start of a connection is a small part: 32 ms at 1 Gbit/s.
SIZE_BYTES: Final = 4 << 20
#: Time limit for the bytes to arrive.
WITHIN_S: Final = 0.2
#: Length of the period: longer than a busy machine keeps a process from running.
_STRETCH_S: Final = 0.05
#: Time limit for the connection, and for the proof.
_GREET_S: Final = 0.25
#: Period of reading from the kernel how many bytes have arrived.
_LOOK_S: Final = 0.001


def rate_to(peer: Peer, *, size_bytes: int = SIZE_BYTES, within_s: float = WITHIN_S) -> float:
    """Return the bytes per second that arrive at a peer's kernel."""
    with socket.socket(family_of(peer.host), socket.SOCK_STREAM) as connection:
        connection.settimeout(_GREET_S)
        connection.connect((peer.host, peer.port))
        challenge = receive(connection, CHALLENGE_BYTES)
        send(connection, proof(peer.secret, challenge))
        send_json(connection, {"take": size_bytes})
        connection.setblocking(False)
        return _timed(connection, memoryview(bytes(size_bytes)), within_s)


def _timed(connection: socket.socket, left: memoryview, within_s: float) -> float:
    size_bytes, begun_s = len(left), time.monotonic()
    poll = select.poll()
    poll.register(connection, select.POLLOUT)
    arrived = deque([(0.0, 0)])
    best = 0.0
    while True:
        passed_s = time.monotonic() - begun_s
        num_arrived = size_bytes - len(left) - num_queued(connection)
        arrived.append((passed_s, num_arrived))
        while len(arrived) > 1 and arrived[1][0] <= passed_s - _STRETCH_S:
            arrived.popleft()
        since_s, before = arrived[0]
        is_over = num_arrived == size_bytes or passed_s >= within_s
        if passed_s - since_s >= _STRETCH_S or (is_over and not best):
            best = max(best, (num_arrived - before) / (passed_s - since_s))
        if is_over:
            # If the peer ends the connection, the bytes in the queue are dropped.
            if code := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(code, os.strerror(code))
            return best
        if left:
            poll.poll(1e3 * _STRETCH_S / 10)
            try:
                left = left[connection.send(left) :]
            except BlockingIOError:
                continue
        else:
            time.sleep(_LOOK_S)
