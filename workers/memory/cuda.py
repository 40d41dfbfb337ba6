"""Use CUDA for snapshots: a stream for copies beside the computation, and pinned memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from workers.errors import ArenaError
from workers.memory.arena import NUM_BUFFERS, Arena


class Mark(Protocol):
    """A position in a stream."""

    def wait(self) -> None:
        """Wait until the device has reached the mark. Any thread may call this."""

    def is_reached(self) -> bool:
        """Return whether the device has reached the mark."""

    def since(self, other: Mark) -> float:
        """Return the seconds from ``other`` to this mark; the device has reached both."""


class CopyStream(Protocol):
    """A stream of copies beside the training."""

    def mark(self) -> Mark:
        """Return a mark after everything that training has enqueued."""

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Mark | None) -> Mark:
        """Enqueue copies into the first of each pair, after ``after`` and all earlier copies.

        Any thread may call this, one at a time. Return a mark after the copies.
        """

    def hold(self, mark: Mark) -> None:
        """Make later work of training wait for ``mark``."""

    def gap(self) -> None:
        """Enqueue a small computation after the copies, for ``Leaving.pieces``."""


class CudaStream:
    """A separate CUDA stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device, priority=0)
        self._small: Tensor | None = None

    def mark(self) -> Mark:
        """Return a mark after everything that this thread has enqueued."""
        return _Event(torch.cuda.current_stream(self._device))

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Mark | None) -> Mark:
        """Enqueue copies; see ``CopyStream``."""
        # Each thread has its own current device.
        with torch.no_grad(), torch.cuda.stream(self._stream):
            if after is not None:
                assert isinstance(after, _Event)
                self._stream.wait_event(after.event)
            if pairs:
                # One call makes all copies, because each call takes the interpreter from training.
                targets, sources = map(list, zip(*pairs, strict=True))
                torch._foreach_copy_(targets, sources, non_blocking=True)
            return _Event(self._stream)

    def hold(self, mark: Mark) -> None:
        """Make later work of this thread wait for ``mark``."""
        assert isinstance(mark, _Event)
        torch.cuda.current_stream(self._device).wait_event(mark.event)

    def gap(self) -> None:
        """Enqueue a small computation; see ``CopyStream``."""
        with torch.no_grad(), torch.cuda.stream(self._stream):
            if self._small is None:
                self._small = torch.zeros(1, device=self._device)
            self._small.add_(1)


class _Event:
    def __init__(self, stream: Any) -> None:
        # Waiting threads sleep: spinning would take a processor from training.
        self.event: Any = torch.cuda.Event(enable_timing=True, blocking=True)
        self.event.record(stream)

    def wait(self) -> None:
        """Wait until the stream has reached the event."""
        self.event.synchronize()

    def is_reached(self) -> bool:
        """Return whether the stream has reached the event."""
        return bool(self.event.query())

    def since(self, other: Mark) -> float:
        """Return the seconds between two marks of this device."""
        assert isinstance(other, _Event)
        return float(other.event.elapsed_time(self.event)) / 1000


def register(arena: Arena) -> None:
    """Pin the buffers with the CUDA driver: copies into them run at the full speed of the bus.

    Raise ``ArenaError`` if the driver refuses.
    """
    for buffer in range(NUM_BUFFERS):
        body = torch.frombuffer(arena.body(buffer), dtype=torch.uint8)
        error = torch.cuda.cudart().cudaHostRegister(body.data_ptr(), body.numel(), 0)
        if int(error) != 0:
            # If these buffers stayed pinned, the next try would fail.
            unregister(arena, num_buffers=buffer)
            raise ArenaError(
                f"CUDA does not pin {body.numel()} bytes of snapshot memory: error "
                f"{int(error)}; raise the limit of locked memory (ulimit -l)",
                body_bytes=body.numel(),
            )


def unregister(arena: Arena, *, num_buffers: int = NUM_BUFFERS) -> None:
    """Unpin the first ``num_buffers`` buffers. Call this before releasing the memory."""
    for buffer in range(num_buffers):
        body = torch.frombuffer(arena.body(buffer), dtype=torch.uint8)
        torch.cuda.cudart().cudaHostUnregister(body.data_ptr())
