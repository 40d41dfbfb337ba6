"""Whom this node reaches: one connection to each peer, all at once.

A connection that is made, or refused, shows that packets go both ways. The kernels do all of it, so
a keeper that is busy or stopped is reached all the same.
"""

from __future__ import annotations

import errno
import select
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Final

__all__ = ["unreached"]

#: The kernel repeats a packet that was lost after a second.
PROBE_S: Final = 1.2
#: So many connections are open at once: few beside the descriptors that a process may have.
_BATCH: Final = 256
_ANSWERS: Final = frozenset({0, errno.ECONNREFUSED})


def unreached(peers: Mapping[str, tuple[str, int]], *, within_s: float = PROBE_S) -> list[str]:
    """Return the names of the peers that no connection could be made to.

    Args:
        peers: Address (host, port) by name.
        within_s: For every 256 of them.
    """
    left = list(peers.items())
    lost: list[str] = []
    while left:
        some, left = left[:_BATCH], left[_BATCH:]
        lost += _unreached(some, within_s)
    return lost


def _unreached(peers: Sequence[tuple[str, tuple[str, int]]], within_s: float) -> list[str]:
    poll = select.poll()
    pending: dict[int, tuple[str, socket.socket]] = {}
    lost: list[str] = []
    for name, address in peers:
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        code = connection.connect_ex(address)
        if code == errno.EINPROGRESS:
            pending[connection.fileno()] = (name, connection)
            poll.register(connection, select.POLLOUT)
            continue
        connection.close()
        if code not in _ANSWERS:
            lost.append(name)
    end_s = time.monotonic() + within_s
    while pending:
        ready = poll.poll(max(0.0, end_s - time.monotonic()) * 1000.0)
        for number, _ in ready:
            name, connection = pending.pop(number)
            poll.unregister(number)
            if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) not in _ANSWERS:
                lost.append(name)
            connection.close()
        if not ready and time.monotonic() >= end_s:
            break
    for name, connection in pending.values():
        connection.close()
        lost.append(name)
    return lost
