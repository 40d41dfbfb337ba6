"""Versions in memory as trainers leave them, and a store that one can hold up."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from tests.support.filling import FilledStore
from tests.support.made import save_part, tensor_of
from ucp_core.geometry import Box
from ucp_core.native import LocalTensor, checkpoint_name
from ucp_core.storage import Buffer, MemoryStore
from workers.memory import Arena
from workers.protocol import Held

ROWS = 4096


def eventually(is_so: Callable[[], bool], *, within_s: float = 90.0) -> bool:
    """Return whether it came true in time; looks all the time, and once more at the end."""
    end_s = time.monotonic() + within_s
    while True:
        # Read before: a busy machine may run others between looking and reading.
        is_over = time.monotonic() > end_s
        if is_so():
            return True
        if is_over:
            return False
        time.sleep(0.002)


def weights(step: int) -> np.ndarray:
    """Return the whole state after ``step``: 2 MiB, so that it is written in several chunks."""
    return np.random.default_rng(step).standard_normal((ROWS, 128), dtype=np.float32)


def part(step: int, rank: int, world: int) -> LocalTensor:
    """Return what ``rank`` of ``world`` holds of it."""
    box = Box.full((ROWS, 128)).split(0, world)[rank]
    data = np.ascontiguousarray(weights(step)[box.start[0] : box.stop[0]])
    return tensor_of("w", (ROWS, 128), memoryview(bytearray(data.tobytes())), box=box)


def body_bytes(world: int) -> int:
    """Return what a buffer needs for the part of one of ``world`` ranks."""
    return weights(0).nbytes // world + (16 << 10)


def snapshot(
    arena: Arena,
    step: int,
    *,
    attempt: int = 1,
    rank: int = 0,
    world: int = 1,
    pin: bool = False,
    lineage: Sequence[tuple[int, int]] = (),
) -> Held:
    """Write one version as a trainer does and return what the buffer says then."""
    buffer = arena.choose(lineage)
    arena.begin(buffer, attempt=attempt, step=step, rank=rank, world_size=world)
    save_part(
        FilledStore(arena, buffer),
        checkpoint_name(step),
        [part(step, rank, world)],
        step=step,
        attempt=attempt,
        rank=rank,
        world_size=world,
        extra={"cursor": step},
    )
    if pin:
        arena.pin(buffer)
    held = arena.held(buffer)
    assert held is not None
    return held


class StallingStore(MemoryStore):
    """Lets nothing be written behind the first chunk of a file until it is let go on."""

    def __init__(self) -> None:
        super().__init__()
        self.is_stalled = threading.Event()  #: Set while somebody waits in a write.
        self.may_go_on = threading.Event()  #: Clear it and writes stall.

    def write_file(self, path: str, chunks: Iterable[Buffer], *, fsync: bool) -> int:
        """Write when it is allowed."""
        return super().write_file(path, self._slowly(chunks), fsync=fsync)

    def _slowly(self, chunks: Iterable[Buffer]) -> Iterable[Buffer]:
        for chunk in chunks:
            yield chunk
            self.is_stalled.set()
            self.may_go_on.wait()
