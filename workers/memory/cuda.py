"""All that snapshots ask of CUDA: a queue for copies beside the computation, and pinned memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from workers.errors import ArenaError
from workers.memory.arena import NUM_SLOTS, Arena

__all__ = ["CopyStream", "CudaStream", "Mark", "is_recording_graph", "register", "unregister"]


class Mark(Protocol):
    """A place in what a device was asked to do."""

    def wait(self) -> None:
        """Return when the device has come there; any thread may."""

    def is_reached(self) -> bool:
        """Return whether the device has come there."""

    def since(self, other: Mark) -> float:
        """Return how many seconds after another mark the device came there; it has been at both."""


class CopyStream(Protocol):
    """A queue of copies, which a device works off beside what training asks of it."""

    def mark(self) -> Mark:
        """Return the place behind all that training has asked for."""

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Mark | None) -> Mark:
        """Ask for copies into the first of each pair, behind ``after`` and all copies before.

        Any thread may, one at a time.

        Returns:
            The place behind them.
        """

    def hold(self, mark: Mark) -> None:
        """Have what training asks for from now on begin behind ``mark``."""


class CudaStream:
    """A stream of its own, of the lowest priority.

    Args:
        device: Which the sources are on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device, priority=0)

    def mark(self) -> Mark:
        """Return the place behind all that this thread has asked for."""
        return _Event(torch.cuda.current_stream(self._device))

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Mark | None) -> Mark:
        """Ask for copies; see ``CopyStream``."""
        # Which device is the current one is a matter of each thread.
        with torch.no_grad(), torch.cuda.stream(self._stream):
            if after is not None:
                assert isinstance(after, _Event)
                self._stream.wait_event(after.event)
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            return _Event(self._stream)

    def hold(self, mark: Mark) -> None:
        """Have what this thread asks for from now on begin behind ``mark``."""
        assert isinstance(mark, _Event)
        torch.cuda.current_stream(self._device).wait_event(mark.event)


class _Event:
    """A place in a stream."""

    def __init__(self, stream: Any) -> None:
        # Whoever waits sleeps: a processor that spins is one that training does not have.
        self.event: Any = torch.cuda.Event(enable_timing=True, blocking=True)
        self.event.record(stream)

    def wait(self) -> None:
        """Return when the stream has come there."""
        self.event.synchronize()

    def is_reached(self) -> bool:
        """Return whether the stream has come there."""
        return bool(self.event.query())

    def since(self, other: Mark) -> float:
        """Return the seconds between two marks of this device."""
        assert isinstance(other, _Event)
        return float(other.event.elapsed_time(self.event)) / 1000


def is_recording_graph() -> bool:
    """Return whether this thread records a CUDA graph: what it asks for now is done later."""
    # Where there is no device, asking for it alone would fail.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def register(arena: Arena) -> None:
    """Make the slots known to the CUDA driver: copies into them run at the full speed of the bus.

    Raises:
        ArenaError: The driver refuses.
    """
    for slot in range(NUM_SLOTS):
        body = torch.frombuffer(arena.body(slot), dtype=torch.uint8)
        error = torch.cuda.cudart().cudaHostRegister(body.data_ptr(), body.numel(), 0)
        if int(error) != 0:
            # Or the next try would fail of those that are known already.
            unregister(arena, num_slots=slot)
            raise ArenaError(
                f"CUDA does not take {body.numel()} bytes of snapshot memory as pinned: error "
                f"{int(error)}; raise the limit of locked memory (ulimit -l)",
                body_bytes=body.numel(),
            )


def unregister(arena: Arena, *, num_slots: int = NUM_SLOTS) -> None:
    """Take back what ``register`` did, before the memory is let go of; of the first slots only."""
    for slot in range(num_slots):
        body = torch.frombuffer(arena.body(slot), dtype=torch.uint8)
        torch.cuda.cudart().cudaHostUnregister(body.data_ptr())
