"""The store in which the members of an attempt find each other.

It lives in the controller's process, outside every member: the death of any rank, rank 0
included, leaves it standing. Each attempt gets a server of its own, so that nothing of an
old attempt can reach a new one.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import ray

#: How long a client waits for a key before it gives up; the fence ends the wait far earlier.
CLIENT_TIMEOUT = timedelta(seconds=120)


def preload() -> None:
    """Import torch, which takes seconds, before the first attempt asks for it."""
    import torch.distributed  # noqa: F401


class Rendezvous:
    """Serves one store at a time; the last one stays up until the next begins."""

    def __init__(self) -> None:
        self._server: Any = None

    def open(self) -> tuple[str, int]:
        """Start a fresh store; return the host and port that members connect to. Blocks for ms."""
        from torch.distributed import TCPStore

        host = ray.util.get_node_ip_address()
        server = TCPStore(
            host, 0, None, is_master=True, wait_for_workers=False, timeout=CLIENT_TIMEOUT
        )
        self._server = server
        return host, server.port
