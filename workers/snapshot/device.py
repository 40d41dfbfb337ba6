"""From a device into a slot: beside the computation, and done before the next update.

What lies in the memory of this machine ``workers.snapshot.host_copy`` copies, but for what is not
contiguous there. On CUDA a copy goes over a stream of its own into memory that the
driver knows, so that the training thread waits for nothing; the optimizer's kernels do. For all of
it, not for a part each: optimizers update every parameter in one call (foreach, fused), so the
first update would wait for the last part anyway.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from workers.errors import ArenaError
from workers.keeper.arena import NUM_SLOTS, Arena

__all__ = ["DeviceCopy", "register", "unregister"]


class DeviceCopy:
    """Copies of a state off its device, one at a time."""

    def __init__(self) -> None:
        self._stream: Any = None
        self._event: Any = None

    def begin(self, targets: list[Tensor], sources: list[Tensor]) -> None:
        """Copy; on CUDA begin to."""
        if not sources:
            return
        with torch.no_grad():
            if not any(source.is_cuda for source in sources):
                torch._foreach_copy_(targets, sources)
                return
            if self._stream is None:
                self._stream = torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for target, source in zip(targets, sources, strict=True):
                    target.copy_(source, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(self._stream)

    def hold_update(self) -> None:
        """Have what the training thread asks of the device from now on run after the copy."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)

    def wait(self) -> None:
        """Return when the copy is there; any thread may."""
        if self._event is not None:
            self._event.synchronize()


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
