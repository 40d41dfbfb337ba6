"""Processes forked from a server that has imported torch and what trains on it.

Each would need seconds of a processor for these imports, and there are hundreds of them.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext


def forking() -> ForkServerContext:
    """Return how processes are made; the server starts with the first of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.trainers", "tests.support.doomed"])
    return context
