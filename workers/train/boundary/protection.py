"""The wait at the begin of an attempt, until the loss of a node costs one step again.

An attempt has other ranks and sizes than the one before, so its memory is got in the background
and its first snapshots would exist on one node only: whatever was trained until then would go
with it. So all ranks wait once, after the first step that is due for a snapshot, until they can
take it and peers have copied it; and never for long: training goes on without, as it would have.
"""

from __future__ import annotations

import hashlib
import time
from typing import Final

import torch
import torch.distributed as dist

from workers.snapshot import Captured, SnapshotWriter
from workers.train.executor import on_host

__all__ = ["ProtectionWait"]

#: Memory for the small preset took 5 to 60 ms and its copy 10 to 50 ms, on a busy machine.
_WAIT_S_MIN: Final = 1.0


class ProtectionWait:
    """One such wait, of all ranks: first ``get_ready``; then, once that is taken, ``wait_copied``.

    Args:
        writer: Of this rank; None if it has no memory.
        step_s: Duration of the step before: waiting takes at most as long, or a second.
        node: Where this rank is.
        is_copied: Whether snapshots are kept on other nodes too, where there are others.
        device: Where collectives take their tensors.

    Attributes:
        waited_s: How long it took so far.
    """

    def __init__(
        self,
        writer: SnapshotWriter | None,
        *,
        step_s: float,
        node: str,
        is_copied: bool,
        device: torch.device,
    ) -> None:
        self._writer = writer
        self._until_s = time.monotonic() + max(_WAIT_S_MIN, step_s)
        self._node = node
        self._is_copied = is_copied
        self._device = device
        self._has_peers = False
        self.waited_s = 0.0

    def get_ready(self, state: Captured) -> bool:
        """Return whether every rank can take a snapshot of its state now. Every rank calls it."""
        begun_s = time.monotonic()
        mine = self._writer is not None and self._writer.get_ready(state, self._until_s)
        digest = hashlib.sha256(self._node.encode()).digest()
        node = int.from_bytes(digest[:8], "little") >> 2
        said = torch.tensor([int(mine), node, -node], device=self._device)
        dist.all_reduce(said, op=dist.ReduceOp.MIN)
        all_ready, least, most = on_host(said)
        self._has_peers = self._is_copied and least != -most
        self.waited_s += time.monotonic() - begun_s
        return bool(all_ready)

    def wait_copied(self, step: int) -> None:
        """Return once peers have copied the snapshot of ``step``, if there are any, or too late."""
        begun_s = time.monotonic()
        if self._has_peers and self._writer is not None:
            self._writer.wait_copied(step, self._until_s)
        self.waited_s += time.monotonic() - begun_s
