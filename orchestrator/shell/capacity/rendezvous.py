"""The store in which the members of an attempt find each other.

It lives in the controller's process, outside every member: the death of any rank, rank 0
included, leaves it standing. Each attempt gets a server of its own, so that nothing of an
old attempt can reach a new one.

The next one is made ahead, in a thread: the first import of torch takes seconds, and where no
name server answers, torch looks for the name of the first connection for as long.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Final

import ray

#: How long a client waits for a key before it gives up; the fence ends the wait far earlier.
CLIENT_TIMEOUT = timedelta(seconds=120)

_THREAD: Final = ThreadPoolExecutor(1, thread_name_prefix="rendezvous")


class Rendezvous:
    """Serves one store at a time; the last one stays up until the next is asked for."""

    def __init__(self) -> None:
        self._server: Any = None
        self._next: asyncio.Future[Any] | None = None

    def prepare(self) -> None:
        """Begin to make the store that ``open`` returns next; does not wait. On the loop."""
        if self._next is None:
            host = ray.util.get_node_ip_address()
            self._next = asyncio.get_running_loop().run_in_executor(_THREAD, _serve, host)

    async def open(self) -> tuple[str, int]:
        """Return the host and port of a fresh store, which members connect to."""
        self.prepare()
        coming, self._next = self._next, None
        self.prepare()
        assert coming is not None
        self._server = server = await coming
        return server.host, server.port


def _serve(host: str) -> Any:
    from torch.distributed import TCPStore

    return TCPStore(host, 0, None, is_master=True, wait_for_workers=False, timeout=CLIENT_TIMEOUT)
