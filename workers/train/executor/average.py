"""Keep an average of the weights over steps, sharded like them."""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from ucp_core.native import AVERAGE
from workers.errors import TaskError
from workers.parallel import LocalShard
from workers.state import StateEntry


class Average:
    """An exponential moving average of the weights in float32; see ``Session.average``."""

    def __init__(self, shards: Sequence[LocalShard]) -> None:
        self._shards = shards
        self._held: list[tuple[LocalShard, Tensor]] = []
        self._decay, self._every = 0.0, 1
        #: Names of the averaged parameters of the whole model; empty before ``begin``.
        self.names: tuple[str, ...] = ()

    def begin(self, decay: float, every: int, names: Collection[str]) -> None:
        """Average these parameters from their present values on."""
        if self.names:
            raise TaskError("session.average was called twice in one attempt; call it once")
        if not 0 <= decay < 1 or every < 1:
            raise TaskError(
                f"session.average: decay={decay} must be at least 0 and below 1, and every={every} "
                "at least 1"
            )
        self._decay, self._every = decay, every
        self.names = tuple(sorted(names))
        chosen = set(names)
        self._held = [
            (shard, shard.local.clone(memory_format=torch.contiguous_format))
            for shard in self._shards
            if shard.fqn in chosen
        ]

    def entries(self) -> list[StateEntry]:
        """Return the averages as entries to save and load, each under a separate name."""
        return [
            StateEntry(
                fqn=f"{AVERAGE}{shard.fqn}",
                slot="weight",
                shape=shard.shape,
                box=box,
                tensor=tensor,
                replicas=shard.replicas,
            )
            for shard, average in self._held
            if 0 not in shard.shape
            for box, tensor in shard.pieces(average)
        ]

    def update(self, step: int) -> None:
        """Add the weights after ``step`` to the averages, if due."""
        if not self._held or step % self._every:
            return
        weights = [shard.local for shard, _ in self._held]
        averages = [average for _, average in self._held]
        # Each operation rounds once, so the bits do not depend on how weights are cut. A lerp
        # rounds once or twice, depending on an element's place in a vector.
        with torch.no_grad():
            torch._foreach_sub_(averages, weights)
            torch._foreach_mul_(averages, self._decay)
            torch._foreach_add_(averages, weights)

    def swap(self) -> None:
        """Exchange the weights and the averages, in place. Version counters stay as they are."""
        with torch.no_grad():
            for shard, average in self._held:
                weights = shard.local.clone()
                shard.local.data.copy_(average)
                average.copy_(weights)


class AverageOfWeights:
    """The result of ``Session.average``."""

    def __init__(self, lend: Callable[[], AbstractContextManager[None]]) -> None:
        self._lend = lend

    def swapped(self) -> AbstractContextManager[None]:
        """Put the average into the model for a block: to evaluate it, or for ``session.save``.

        Every worker enters it, between two steps. In the block no step trains.
        """
        return self._lend()
