"""Compare the gradients of parameters that tensor parallelism leaves whole, in some steps.

If a plan misses a module between two cut ones, each rank computes the gradient of its own part. The
ranks' weights would then drift apart, and each saves only a share of them. Gradients before an
output layer of zeros are zero in the first step, so that step shows nothing.
"""

from collections.abc import Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from ucp_core.numerics import shortened
from workers.collectives import on_host
from workers.errors import LayoutRefusedError
from workers.parallel import LocalShard, Mesh

#: A device may sum equal gradients in another order; gradients of different parts differ by much
#: more.
_RTOL: Final = 1e-2
_NUM_NAMED: Final = 3
#: Steps of an attempt that are compared; after these, powers of ten.
_FIRST: Final = 3
#: Sums of all elements with random signs. For two independent gradients, one such sum differs by
#: less than the tolerance in 1 of 180 cases, and the norm in half of them.
_NUM_SUMS: Final = 2


class TensorReplicas:
    """The parameters whose elements are the same on all ranks of a tensor-parallel group."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._num_steps = 0

    def refuse(self, shards: Sequence[LocalShard], device: torch.device, step: int) -> None:
        """Compare their gradients if that is due; every rank of the group calls it in each step."""
        self._num_steps += 1
        is_due = self._num_steps <= _FIRST or str(self._num_steps).rstrip("0") == "1"
        if self._mesh.tensor is None or not is_due:
            return
        layout, rank = self._mesh.layout, self._mesh.rank
        group = set(layout.ranks_along(rank, ["tp"]))
        whole = [shard for shard in shards if group <= set(shard.replicas)]
        if not whole:
            return
        signs = torch.Generator(device).manual_seed(step)
        mine = torch.stack([_described(shard.gradient, signs, device) for shard in whole])
        both = torch.stack((mine, -mine))
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self._mesh.tensor.get_group())
        ends = torch.tensor(on_host(both.reshape(-1))).view(2, len(whole), 1 + _NUM_SUMS)
        most, least = ends[0], -ends[1]
        apart = [
            f"{shard.fqn} ({low[0]:.4g} to {high[0]:.4g})"
            for shard, low, high in zip(whole, least, most, strict=True)
            if bool(((high - low) > _RTOL * high[0]).any())
        ]
        if apart:
            raise LayoutRefusedError(
                f"parallel.tp={layout.tp}: ranks {', '.join(map(str, sorted(group)))} have the "
                f"same weights and got different gradients in step {step}, here with their norms: "
                f"{shortened(apart, _NUM_NAMED)}; the plan lacks these modules or one "
                "before them, or the ranks had different samples",
                axis="tp",
            )


def _described(gradient: Tensor | None, signs: torch.Generator, device: torch.device) -> Tensor:
    """Return the norm of a gradient, and sums of its elements with random signs."""
    if gradient is None:
        return torch.zeros(1 + _NUM_SUMS, dtype=torch.float64, device=device)
    sums = []
    for _ in range(_NUM_SUMS):
        drawn = torch.empty_like(gradient).bernoulli_(generator=signs)
        sums.append((gradient * (2 * drawn - 1)).sum())
    return torch.stack((gradient.norm(), *sums)).double()
