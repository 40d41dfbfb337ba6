"""Let the main thread of an actor rest while nobody is in a hurry.

Ray has the main thread of every actor wake 100 times a second to look for signals: in a keeper
that is three quarters of all it costs. The thread runs Python only to handle signals, so that is
where it rests. Meanwhile calls of the actor's methods wait, no longer than a slice each: who is
about to make some in a hurry rings a bell before, which another thread hears.
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterable
from typing import Any, Final

__all__ = ["SLICE_S", "Bell", "Rest", "hang_bell", "ring"]

#: How long a call waits at most. Between two slices Ray looks once for signals and for calls.
SLICE_S: Final = 0.2
#: From a slice's end to the signal that begins the next one: Ray gets its turn before.
_PAUSE_S: Final = 0.001


class Rest:
    """The rest of this process's main thread: there can be one, and SIGALRM is its own.

    To be made on the main thread; elsewhere nobody may handle signals, and it does nothing.
    """

    def __init__(self) -> None:
        self._over = threading.Event()
        self._over.set()
        self._may_begin = threading.current_thread() is threading.main_thread()
        if self._may_begin:
            signal.signal(signal.SIGALRM, self._take_slice)

    def begin(self) -> None:
        """Have the main thread rest from now on. By one thread, as ``end``; again is once."""
        if self._may_begin and self._over.is_set():
            self._over.clear()
            _thread.interrupt_main(signal.SIGALRM)

    def end(self) -> bool:
        """Have it answer calls at once again; return whether it rested."""
        rested = not self._over.is_set()
        self._over.set()
        return rested

    def _take_slice(self, *_: Any) -> None:
        if not self._over.wait(SLICE_S):
            signal.setitimer(signal.ITIMER_REAL, _PAUSE_S)


class Bell(asyncio.DatagramProtocol):
    """A UDP port where anybody may ring. What is sent says nothing, so it needs no secret.

    Attributes:
        port: 0 where none could be had.
    """

    port = 0

    def __init__(self, on_ring: Callable[[], None]) -> None:
        self._on_ring = on_ring

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Asyncio has opened the port."""
        self._transport = transport
        self.port = int(transport.get_extra_info("sockname")[1])

    def datagram_received(self, _data: bytes, _sender: Any) -> None:
        """Somebody rings."""
        self._on_ring()

    def close(self) -> None:
        """Give the port back."""
        self._transport.close()


async def hang_bell(host: str, on_ring: Callable[[], None]) -> Bell:
    """Have ``on_ring`` called on this loop whenever somebody rings."""
    bell = Bell(on_ring)
    with contextlib.suppress(OSError):
        await asyncio.get_running_loop().create_datagram_endpoint(
            lambda: bell, local_addr=(host, 0)
        )
    return bell


def ring(bells: Iterable[tuple[str, int]]) -> None:
    """Ring bells, each a host and a port; where one is not heard, calls wait for a slice."""
    for host, port in bells:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as line:
            line.setblocking(False)
            line.sendto(b"!", (host, port))
