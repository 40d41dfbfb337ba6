"""The memory in use on this rank's device."""

import math
import time
from typing import Final

import torch

#: Shortest time between two queries of the driver.
_LOOK_S: Final = 1.0


class DeviceMemory:
    """A device's memory as its driver reports it, for all processes together."""

    def __init__(self, device: torch.device, *, num_ranks: int = 1) -> None:
        self._device = device
        self._num_ranks = num_ranks
        self._look_at_s = -math.inf
        self._found = math.nan, math.nan

    def bytes(self) -> tuple[float, float]:
        """Return the bytes in use and the device's total; nan without a device of its own."""
        now_s = time.monotonic()
        if self._device.type == "cuda" and now_s >= self._look_at_s:
            self._look_at_s = now_s + _LOOK_S
            free, there_is = torch.cuda.mem_get_info(self._device)
            self._found = float(there_is - free), float(there_is)
        return self._found

    def of_ranks(self, rank: int) -> tuple[float, ...]:
        """Return the bytes in use at the place of ``rank``, else 0.0; empty without a device."""
        if self._device.type != "cuda":
            return ()
        in_use, _ = self.bytes()
        return (0.0,) * rank + (in_use,) + (0.0,) * (self._num_ranks - rank - 1)
