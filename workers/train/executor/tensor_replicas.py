"""Compares the gradients of what tensor parallelism leaves whole, in the first step of an attempt.

A plan that misses a module between two cut ones has each rank compute a gradient of its own part.
The ranks' weights would then drift apart, and each saves only a share of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import torch.distributed as dist

from workers.errors import LayoutRefusedError
from workers.parallel import LocalShard, Mesh

#: Equal gradients may be summed in another order on a device; those of a part differ by much more.
_RTOL: Final = 1e-2
_NUM_NAMED: Final = 3


class TensorReplicas:
    """The parameters that all ranks of a tensor-parallel group have the same elements of."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._is_done = mesh.tensor is None

    def refuse(self, shards: Sequence[LocalShard], device: torch.device, step: int) -> None:
        """Compare the norms of their gradients, once; every rank of the group calls it.

        Raises:
            LayoutRefusedError: They differ.
        """
        if self._is_done or self._mesh.tensor is None:
            return
        self._is_done = True
        layout, rank = self._mesh.layout, self._mesh.rank
        group = set(layout.ranks_along(rank, ["tp"]))
        whole = [shard for shard in shards if group <= set(shard.replicas)]
        if not whole:
            return
        zero = torch.zeros((), device=device)
        norms = [zero if one.gradient is None else one.gradient.norm() for one in whole]
        both = torch.stack(norms).double()
        both = torch.stack((both, -both))
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self._mesh.tensor.get_group())
        most, least = both[0].tolist(), (-both[1]).tolist()
        apart = [
            f"{shard.fqn} ({low:.4g} to {high:.4g})"
            for shard, low, high in zip(whole, least, most, strict=True)
            if high - low > _RTOL * high
        ]
        if apart:
            more = f" and {len(apart) - _NUM_NAMED} more" if len(apart) > _NUM_NAMED else ""
            raise LayoutRefusedError(
                f"parallel.tp={layout.tp}: ranks {', '.join(map(str, sorted(group)))} have the "
                f"same weights and got different gradients in step {step}, here with their norms: "
                f"{', '.join(apart[:_NUM_NAMED])}{more}; the plan lacks these modules or one "
                "before them, or the ranks had different samples",
                axis="tp",
            )
