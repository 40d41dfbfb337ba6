"""Gradients of the parameters that FSDP2 leaves alone, because there is nothing to shard.

Every rank has those without a dim or without an element. Their gradients are added up in the
all-reduce of the step's sums, as float64. In deterministic mode each micro-batch has its own
elements there, as with losses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from workers.parallel import LocalShard, is_whole
from workers.train.executor.norm import ordered_sum

__all__ = ["WholeGradients"]


class WholeGradients:
    """The gradients of one step after the other.

    Args:
        shards: This rank's shard of every parameter.
        shapes: Shapes of all parameters of the whole model, by name.
        num_parts: Micro-batches that have elements of their own; 1 if their sum does.
        counts: Whether this rank's gradients count: tensor-parallel ranks have the same.
        device: The device of the sums.
    """

    def __init__(
        self,
        shards: Sequence[LocalShard],
        shapes: Mapping[str, tuple[int, ...]],
        *,
        num_parts: int,
        counts: bool,
        device: torch.device,
    ) -> None:
        held = {shard.fqn: shard for shard in shards}
        names = sorted(name for name, shape in shapes.items() if is_whole(shape))
        #: None for those of other pipeline stages.
        self._shards = [held.get(name) for name in names]
        self._sizes = [prod(shapes[name]) for name in names]
        self._num_parts, self._counts, self._device = num_parts, counts, device
        self._parts: dict[str, dict[int, Tensor]] = {}
        self.num_sums = num_parts * sum(self._sizes)

    def end_pass(self, part: int | None) -> None:
        """Take the gradients of a pass as those of ``part``; None if the pass does not count."""
        for shard in self._shards if self._num_parts > 1 else ():
            if shard is not None and shard.parameter.grad is not None:
                parts = self._parts.setdefault(shard.fqn, {})
                if part is not None:
                    parts[part] = shard.parameter.grad
                shard.parameter.grad = None

    def end_passes(self) -> None:
        """Let each parameter have a gradient again, to be looked at and dropped as others."""
        for shard in self._shards:
            if shard is not None and shard.fqn in self._parts:
                parts = list(self._parts[shard.fqn].values())
                zero = torch.zeros_like(shard.local)
                shard.parameter.grad = torch.stack(parts).sum(dim=0) if parts else zero

    def exist(self) -> list[int]:
        """Return 1 for each parameter that has a gradient, else 0; of all parameters."""
        return [int(one is not None and one.parameter.grad is not None) for one in self._shards]

    def sums(self) -> Tensor:
        """Return what this rank adds to the sums, float64, ``(num_sums,)``."""
        found = torch.zeros(
            self._num_parts, sum(self._sizes), dtype=torch.float64, device=self._device
        )
        start = 0
        for shard, size in zip(self._shards, self._sizes, strict=True):
            if self._counts and shard is not None and shard.parameter.grad is not None:
                parts = self._parts.get(shard.fqn, {0: shard.parameter.grad})
                for part, gradient in parts.items():
                    found[part, start : start + size] = gradient.reshape(-1)
            start += size
        self._parts = {}
        return found.reshape(-1)

    def put(self, sums: Tensor) -> Tensor:
        """Take the sums over ranks as gradients; return their sum of squares, a float64 scalar."""
        if not self._shards:
            return sums.sum()
        # A sum of zeros and -0.0 is 0.0, which a single part is not.
        whole = ordered_sum(sums.view(self._num_parts, -1).t().contiguous()) + 0.0
        for shard, gradient in zip(self._shards, whole.split(self._sizes), strict=True):
            if shard is not None:
                shard.parameter.grad = gradient.to(shard.local.dtype).view(shard.shape)
        return torch.cat((whole.square(), whole.new_zeros(1))).sum()

    def drop(self, exist: Sequence[float]) -> None:
        """Drop the gradients of parameters for which ``exist`` has zero: no rank had one."""
        for shard, exists in zip(self._shards, exist, strict=True):
            if shard is not None and not exists:
                shard.parameter.grad = None
