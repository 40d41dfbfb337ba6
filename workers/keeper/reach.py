"""Watch whether other machines answer, according to their kernels.

The kernels of both ends keep an open connection alive, once a second. No process has to run for
that: one that is stopped, swapped out, or waits for a processor does not prevent the answer. A
machine without power, or behind a cut, does not answer, however long a step takes.
"""

import asyncio
import contextlib
import functools
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from workers.keeper.peers import unreached

#: Maximum time until a vanished machine counts as silent: it must fail to answer one of the probes
#: that are sent each second, and then two new connections.
SILENT_S: Final = 3.0
_ASK_S: Final = 1
_MISSED_MS: Final = 1500
_NUM_PROBES: Final = 2
_PROBE_S: Final = 0.4
#: A connection to a living listener is made at once.
_CONNECT_S: Final = 0.5
#: Pause before connecting again. A server closes a connection that is silent for long. A dead or
#: silent server is also tried again, in case its port outlived the connection.
_RECALL_S: Final = 0.5
#: Maximum number of threads, which only wait. A rack of machines may vanish at once, and machines
#: behind a cut are tried repeatedly.
_ASKING: Final = ThreadPoolExecutor(32, thread_name_prefix="reach")
#: Bytes that a server sends first are ignored.
_GREETING_BYTES: Final = 1 << 10


async def hung_up(address: tuple[str, int]) -> bool:
    """Wait until the connection to a listener ends, or is not made.

    Return whether its machine answered to the end: it closed or refused the connection.
    """
    try:
        # Unlike wait_for, a timeout does not swallow a cancellation as the connection is made.
        async with asyncio.timeout(_CONNECT_S):
            reader, writer = await asyncio.open_connection(*address)
        try:
            _keep_alive(writer.get_extra_info("socket"))
            while await reader.read(_GREETING_BYTES):
                pass
        finally:
            writer.close()
    except ConnectionError:
        return True
    except OSError:
        return False
    return True


async def silent(machines: Mapping[str, tuple[str, int]]) -> set[str]:
    """Return the names of ``machines`` (address of a port by name) that do not answer."""
    left = dict(machines)
    try:
        for _ in range(_NUM_PROBES):
            ask = functools.partial(unreached, left, within_s=_PROBE_S, size_bytes=0)
            names = await asyncio.get_running_loop().run_in_executor(_ASKING, ask)
            left = {name: left[name] for name in names}
    except OSError:
        # Without a socket nothing can be found out.
        return set()
    return set(left)


class Reach:
    """Detects that this machine reaches no other one.

    ``on_cut_off`` is called on the event loop each time this begins.
    """

    def __init__(self, on_cut_off: Callable[[], None]) -> None:
        self._on_cut_off = on_cut_off
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._silent: set[tuple[str, int]] = set()

    def follow(self, addresses: frozenset[tuple[str, int]]) -> None:
        """Watch these listeners on other machines instead of the earlier ones.

        With fewer than two listeners nothing is reported, because a single one may itself be gone.
        """
        for address in self._tasks.keys() - addresses:
            self._tasks.pop(address).cancel()
            self._silent.discard(address)
        for address in addresses - self._tasks.keys():
            self._tasks[address] = asyncio.create_task(self._watch(address))

    async def _watch(self, address: tuple[str, int]) -> None:
        while True:
            if address not in self._silent and await hung_up(address):
                await asyncio.sleep(_RECALL_S)
            elif not await silent({"": address}):
                self._silent.discard(address)
            else:
                was_cut_off = self._is_cut_off()
                self._silent.add(address)
                if self._is_cut_off() and not was_cut_off:
                    self._on_cut_off()
                await asyncio.sleep(_RECALL_S)

    def _is_cut_off(self) -> bool:
        return len(self._tasks) > 1 and self._silent >= self._tasks.keys()


def _keep_alive(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        # The connection may have ended.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _ASK_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _ASK_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _MISSED_MS)
