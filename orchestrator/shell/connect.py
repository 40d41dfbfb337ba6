"""Connect this process to a Ray cluster, quietly."""

from __future__ import annotations

import logging
import os

import ray
from ray._private import worker as ray_worker


def connect(address: str, *, namespace: str | None = None) -> None:
    """Join the cluster at ``address``; nothing of its logs reaches our output.

    Raises ``ConnectionError`` or ``RayError`` if nothing answers there.
    """
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


def _drop(*_: object, **__: object) -> None:
    """Print nothing."""
