"""Arenas whose snapshots go over a connection: what is in them, and what is asked for it."""

import numpy as np

from workers.memory import Arena
from workers.protocol import Held

SECRET = b"of this run"


def write(arena: Arena, step: int, *, size: int) -> Held:
    """Fill the arena's next buffer with bytes that only ``step`` has; return what it holds then."""
    buffer = arena.choose(())
    arena.begin(buffer, attempt=1, step=step, rank=0, world_size=1)
    body = np.frombuffer(arena.body(buffer), np.uint8)[:size]
    body[:] = np.random.default_rng(step).integers(0, 256, size, np.uint8)
    arena.finish(buffer, data_bytes=size, record_bytes=0)
    held = arena.held(buffer)
    assert held is not None
    return held
