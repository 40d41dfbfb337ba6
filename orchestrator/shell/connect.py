"""Connect this process to a Ray cluster, quietly."""

from __future__ import annotations

import logging
import os
import socket

import ray
from ray._private import worker as ray_worker

#: A cluster that is there accepts a connection in milliseconds, also from far away.
ANSWER_S = 10.0
_OWN_NAMES = frozenset({"127.0.0.1", "localhost"})


def connect_ray(address: str, *, namespace: str | None = None) -> None:
    """Join the cluster at ``address``; nothing of its logs reaches our output.

    Raises ``ConnectionError`` or ``RayError`` if nothing answers there.
    """
    _require_answer(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray 2.60 prints a raylet's words about dead workers to our stdout whatever log_to_driver
    # says; --json must stay clean, and a run's incidents tell the same in our words.
    ray_worker.print_to_stdstream = _drop
    ray.init(
        address=address,
        namespace=namespace,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )


def _require_answer(address: str) -> None:
    """Raise ``ConnectionError`` if nothing answers there: Ray would look for it for minutes."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or "/" in host:
        return  # others, as "auto" and "ray://host:port", are Ray's to understand
    # A head may listen at its node's address only, which Ray takes for the machine's own names.
    own = [ray.util.get_node_ip_address()] if host in _OWN_NAMES else []
    for name in (host.strip("[]"), *own):
        try:
            socket.create_connection((name, int(port)), timeout=ANSWER_S).close()
        except OSError as error:
            why = error
        else:
            return
    raise ConnectionError(str(why))


def _drop(*_: object, **__: object) -> None:
    """Print nothing."""
