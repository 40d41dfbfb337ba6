"""Copies by a thread beside the training, as a device makes them, in a process that trains."""

import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from workers.memory import CopyStream, Mark
from workers.snapshot import device
from workers.snapshot.buffer_layout import HostTensors
from workers.snapshot.writing import BLOCK_BYTES

BUSY_S_MAX = 1.0


class Done:
    """A place in what the processor was asked for, or a thread that copies."""

    def __init__(self, future: Future[None] | None = None) -> None:
        self._future = future
        self._set_s = time.monotonic()

    def wait(self) -> None:
        if self._future is not None:
            self._future.result()

    def is_reached(self) -> bool:
        return self._future is None or self._future.done()

    def since(self, other: Mark) -> float:
        assert isinstance(other, Done)
        return self._set_s - other._set_s


class CopyingLane:
    """A ``workers.memory.cuda.CopyStream``. Requests to the processor are done at once.

    Its bus is busy until an update comes, which is when a copy can go wrong; a second at most, for
    states that no update follows. It writes down how many shares each state left in, a line of its
    file for each.
    """

    def __init__(self, notes: Path) -> None:
        self._notes = notes
        self._thread = ThreadPoolExecutor(1)
        self._num_marks = 0
        self._is_free = threading.Event()

    def mark(self) -> Mark:
        self._num_marks += 1
        return Done()

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Mark | None) -> Mark:
        def run() -> None:
            if after is not None:
                after.wait()
            self._is_free.wait(BUSY_S_MAX)
            self._is_free.set()
            for target, source in pairs:
                target.copy_(source)

        return Done(self._thread.submit(run))

    def hold(self, mark: Mark) -> None:
        with self._notes.open("a") as file:
            file.write(f"{self._num_marks}\n")
        self._num_marks = 0
        self._is_free.set()
        mark.wait()
        self._is_free.clear()

    def gap(self) -> None:
        pass


def install(directory: Path) -> None:
    """Have all states of this process leave by such a stream, in small buckets."""
    stream = CopyingLane(directory / f"{os.getpid()}.stream")

    def begin(copy: device.DeviceCopy) -> CopyStream:
        copy._stream = stream
        return stream

    found: Any = device
    found.BUCKET_BYTES = BLOCK_BYTES
    found.DeviceCopy._stream_for = lambda copy, _sources: begin(copy)
    # As of tensors that are not in the memory of this machine.
    host: Any = HostTensors
    host.views = lambda _self: None


def releases(directory: Path) -> list[list[int]]:
    """Return, by process, how many shares each state left in."""
    return [[int(one) for one in file.read_text().split()] for file in directory.glob("*.stream")]
