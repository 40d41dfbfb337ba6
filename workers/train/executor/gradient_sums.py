"""Decide how often a step reduces its gradients: once, or after every pass if memory is short.

Until FSDP2 reduces gradients, every rank adds up whole gradients over its passes. If it reduces
after every pass, a rank keeps only its part, but sends once per pass.
"""

import logging
import math
import os
import resource
from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import nn

from ucp_core.layout import ParallelLayout
from workers.parallel import num_foreign
from workers.settings import USABLE_MEMORY, TrainSettings
from workers.train.executor.quotas import Quota, quota

log = logging.getLogger(__name__)

#: Smaller whole gradients are always added up.
_LARGE_BYTES: Final = 256 << 20
#: Bytes of a gradient element: gradients are added up in float32.
_GRADIENT_BYTES: Final = 4


class GradientSums:
    """The passes of a rank's steps, and after which of them gradients are reduced.

    If nothing is configured and whole gradients are large, the first step of an attempt reduces
    after every pass, and each rank measures the memory that the step needs. If whole gradients fit
    beside that on all ranks, later steps reduce once.

    Args:
        round_of: As for ``quota``.
        room: Returns how much memory this rank has, and the most that it has used.
    """

    def __init__(
        self,
        train: TrainSettings,
        model: nn.Module,
        shapes: Mapping[str, tuple[int, ...]],
        layout: ParallelLayout,
        data_rank: int,
        *,
        round_of: int,
        room: Callable[[], tuple[float, float]],
    ) -> None:
        self._once, self._each = (
            quota(
                train.num_micro_batches,
                layout.dp,
                data_rank,
                fixed_tree=train.deterministic,
                every_pass=every_pass,
                round_of=round_of,
            )
            for every_pass in (False, True)
        )
        self._model, self._room = model, room
        # All ranks decide by the same numbers.
        num_bytes = _GRADIENT_BYTES * sum(map(math.prod, shapes.values()))
        is_large = num_bytes / (layout.tp * layout.pp) >= _LARGE_BYTES
        self._is_open = (
            train.reduce_gradients == "auto"
            and self._once != self._each
            and layout.dp_shard * layout.cp > 1
            and is_large
        )
        is_each = self._is_open or train.reduce_gradients == "every_pass"
        self.quota: Quota = self._each if is_each else self._once  #: The passes of the next step.

    def lacks_room(self) -> bool:
        """Return whether this rank lacks memory for whole gradients; call it in each step.

        It measures only in the first step.
        """
        if not self._is_open:
            return False
        there_is, most = self._room()
        return most + _GRADIENT_BYTES * num_foreign(self._model) > there_is

    def agree(self, *, lacks_room: bool) -> None:
        """Choose when to reduce, given whether a rank lacks room; all ranks pass the same value."""
        if self._is_open and not lacks_room:
            self.quota = self._once
        elif self._is_open:
            log.info("reduces_every_pass", extra={"passes": len(self.quota.passes)})
        self._is_open = False


def room_of(device: torch.device, *, share: float, num_workers: int) -> tuple[float, float]:
    """Return how much memory this rank has for tensors, and the most that it has used, in bytes.

    A rank may use the part ``share`` of its GPU. Without one, the most is the peak of the process,
    and all workers may be on this machine.
    """
    if device.type == "cuda":
        there_is = torch.cuda.get_device_properties(device).total_memory * share
        return there_is * USABLE_MEMORY, torch.cuda.max_memory_allocated(device)
    there_is = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return there_is / num_workers, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
