"""Wait at the start of an attempt until its state is protected against the loss of a node.

Ranks and sizes change with the attempt, so its snapshot memory is prepared in the background. Until
a peer has copied the first snapshot, the loss of a node would lose all steps since the start. So
after the first step with a snapshot due, all ranks wait once until they took it and peers copied
it. The wait is short and bounded; training continues in any case.
"""

import time
from typing import Final

import torch

from workers.snapshot import Captured, SnapshotWriter
from workers.train.executor import exchanged

#: Preparing memory for the small preset took 5 to 60 ms, copying it 10 to 50 ms (busy machine).
_WAIT_S_MIN: Final = 1.0


class ProtectionWait:
    """One wait of all ranks: ``get_ready``, take the snapshot, then ``wait_copied``.

    It takes at most as long as the last step, or a second.
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
        """Return whether every rank can take its snapshot now. Every rank calls it."""
        begun_s = time.monotonic()
        mine = self._writer is not None and self._writer.get_ready(state, self._until_s)
        rows = exchanged([mine, self._node], self._device)
        self._has_peers = self._is_copied and len({node for _, node in rows}) > 1
        self.waited_s += time.monotonic() - begun_s
        return all(is_ready for is_ready, _ in rows)

    def wait_copied(self, step: int) -> None:
        """Wait until peers have copied the snapshot of ``step``, at most until the time limit."""
        begun_s = time.monotonic()
        if self._has_peers and self._writer is not None:
            self._writer.wait_copied(step, self._until_s)
        self.waited_s += time.monotonic() - begun_s
