"""Gradients of the parameters that FSDP2 leaves alone, because there is nothing to shard.

Every rank has the parameters without a dim or without an element. Their gradients are added up in
the all-reduce of the step's sums, as float64. In deterministic mode each micro-batch has its own
elements there, as with losses.
"""

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from workers.parallel import LocalShard, is_whole
from workers.train.executor.norm import ordered_sum


class WholeGradients:
    """The gradients of these parameters, step by step.

    ``num_parts`` is the number of micro-batches with their own elements, or 1 if only their sum has
    elements. ``counts`` says whether the gradients of this rank count: tensor-parallel ranks have
    the same ones.
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
        #: In the order of names; None for a parameter of another pipeline stage.
        self._shards = [held.get(name) for name in names]
        self._sizes = [prod(shapes[name]) for name in names]
        self._num_parts, self._counts, self._device = num_parts, counts, device
        self._rows: dict[int, Tensor] = {}
        self._seen: set[int] = set()
        self.num_sums = num_parts * sum(self._sizes)

    def end_pass(self, part: int | None) -> None:
        """Record the gradients of a pass as those of ``part``; None if the pass does not count."""
        if self._num_parts == 1 or not self._shards:
            return
        if part is not None:
            row = self._row()
            # Each stage of this rank has passes of its own, with zeros for parameters of other
            # stages.
            self._rows[part] = self._rows[part] + row if part in self._rows else row
        for number, shard in enumerate(self._shards):
            if shard is not None and shard.parameter.grad is not None:
                self._seen.add(number)
                shard.parameter.grad = None

    def drop_pass(self) -> Tensor:
        """Return the gradients of the first pass of a step, which does not count, and drop them."""
        row = self._row()
        for shard in self._shards:
            if shard is not None:
                shard.parameter.grad = None
        return row

    def end_passes(self) -> None:
        """Give each parameter the sum of its gradients again, for the checks before ``put``."""
        if self._seen:
            zero = torch.zeros(sum(self._sizes), device=self._device)
            self._put(torch.stack([zero, *self._rows.values()]).sum(dim=0))
            self.drop([number in self._seen for number in range(len(self._shards))])

    def exist(self) -> list[int]:
        """Return 1 for each of all parameters that has a gradient, else 0."""
        return [int(one is not None and one.parameter.grad is not None) for one in self._shards]

    def sums(self) -> Tensor:
        """Return this rank's contribution to the sums, float64, ``(num_sums,)``."""
        rows = {0: self._row()} if self._num_parts == 1 else self._rows
        found = torch.zeros(
            self._num_parts, sum(self._sizes), dtype=torch.float64, device=self._device
        )
        for part, row in rows.items() if self._counts and self._shards else ():
            found[part] = row
        for exists, column in zip(self.exist(), found.split(self._sizes, dim=1), strict=True):
            if not exists:
                column.zero_()
        self._rows, self._seen = {}, set()
        return found.reshape(-1)

    def put(self, sums: Tensor) -> Tensor:
        """Use the sums over ranks as gradients; return their sum of squares, a float64 scalar."""
        if not self._shards:
            return sums.sum()
        # A single part may be -0.0, but the sum of zeros and -0.0 is 0.0.
        whole = ordered_sum(sums.view(self._num_parts, -1).t().contiguous()) + 0.0
        self._put(whole)
        return torch.cat((whole.square(), whole.new_zeros(1))).sum()

    def drop(self, exist: Sequence[float]) -> None:
        """Drop the gradients of parameters for which ``exist`` is zero: no rank had one."""
        for shard, exists in zip(self._shards, exist, strict=True):
            if shard is not None and not exists:
                shard.parameter.grad = None

    def _row(self) -> Tensor:
        """Return all gradients concatenated, with zeros for missing ones."""
        gradients = [one.parameter.grad if one is not None else None for one in self._shards]
        parts = [
            torch.zeros(size, device=self._device) if gradient is None else gradient.reshape(-1)
            for gradient, size in zip(gradients, self._sizes, strict=True)
        ]
        return torch.cat([*parts, torch.zeros(0, device=self._device)])

    def _put(self, row: Tensor) -> None:
        for shard, gradient in zip(self._shards, row.split(self._sizes), strict=True):
            if shard is not None:
                shard.parameter.grad = gradient.to(shard.local.dtype).view(shard.shape)
