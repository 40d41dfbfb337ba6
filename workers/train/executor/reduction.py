"""Gradient sums that do not depend on the number of workers, to the bit.

Floating point addition is not associative, so a sum over ranks differs with the ranks. Here the
micro-batches of a step are the leaves of one binary tree; a node is always left child + right
child, whoever adds them up. FSDP2's reduce-scatter is replaced by an all-to-all, after which
every rank holds its shard of every rank's node and adds them in the order of the tree. The
result appears with the last reduction of the step; earlier ones return zeros.

What else it needs: micro-batches of one size (a matmul's bits depend on its rows), one thread
count, and random numbers keyed by micro-batch. Cost: ``tests/benchmarks/bench_deterministic.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from workers.parallel import fsdp_modules

__all__ = ["Reduction", "SumTree", "use_all_to_all", "use_tree"]

Node = tuple[int, int]


class SumTree:
    """Partial sums over micro-batches; a node ``(level, index)`` covers ``2 ** level`` leaves.

    Nodes come in any order. The number of leaves need not be a power of two: what cannot be
    paired any more is added from the left at the end.
    """

    def __init__(self) -> None:
        self._nodes: dict[Node, Tensor] = {}

    def add(self, node: Node, value: Tensor) -> None:
        """Put in a node. ``value`` is kept and written to."""
        level, index = node
        while (sibling := self._nodes.pop((level, index ^ 1), None)) is not None:
            left, right = (sibling, value) if index & 1 else (value, sibling)
            value = left.add_(right)
            level, index = level + 1, index >> 1
        self._nodes[level, index] = value

    def take(self) -> Tensor:
        """Return the sum of all nodes and forget them."""
        nodes = sorted(self._nodes.items(), key=lambda item: item[0][1] << item[0][0])
        self._nodes = {}
        total = nodes[0][1]
        for _, value in nodes[1:]:
            total = total.add_(value)
        # A sum of one leaf may hold -0.0, one of zeros and a leaf does not.
        return total.add_(0.0)


class Reduction:
    """Which reduction of a step is under way; one for all FSDP groups of a model."""

    def __init__(self) -> None:
        self.nodes: Sequence[Node | None] = ()
        self.is_last = False

    def begin(self, nodes: Sequence[Node | None], *, is_last: bool) -> None:
        """Say what each rank hands in next, in rank order, and whether the sum is then whole."""
        self.nodes, self.is_last = nodes, is_last


def use_tree(model: nn.Module, reduction: Reduction) -> None:
    """Have every FSDP group of a spread ``model`` reduce by a tree of its own."""
    for module in fsdp_modules(model):
        reducer = _TreeReduceScatter(reduction)
        module.set_custom_reduce_scatter(reducer)
        # A group of one rank skips the reduce-scatter; the hook runs in its place.
        module.set_all_reduce_hook(reducer.reduce_alone)


def use_all_to_all(model: nn.Module) -> None:
    """Have every FSDP group of a spread ``model`` reduce by an all-to-all and an own sum.

    gloo's reduce-scatter is an all-reduce of a copy: 0.6 to 0.8 GB/s with 2 to 4 ranks where
    the all-to-all and the sum make 2.6 GB/s (torch 2.13, loopback).
    """
    for module in fsdp_modules(model):
        module.set_custom_reduce_scatter(_SumReduceScatter())


class _OwnReduceScatter(ReduceScatter):
    """FSDP2's reduce-scatter, as an all-to-all and ``_sum``."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,  # noqa: ARG002  always a sum, see ``workers.parallel.fsdp``
        async_op: bool = False,  # noqa: ARG002, FBT001, FBT002
    ) -> None:
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        self._sum(received.view(group.size(), -1), output_tensor)

    def _sum(self, shards: Tensor, output: Tensor) -> None:
        """Put the sum over ``shards``, one row per rank, which may be written to, in ``output``."""
        raise NotImplementedError


class _SumReduceScatter(_OwnReduceScatter):
    def _sum(self, shards: Tensor, output: Tensor) -> None:
        torch.sum(shards, dim=0, out=output)


class _TreeReduceScatter(_OwnReduceScatter):
    def __init__(self, reduction: Reduction) -> None:
        self._reduction = reduction
        self._tree = SumTree()

    def _sum(self, shards: Tensor, output: Tensor) -> None:
        for node, shard in zip(self._reduction.nodes, shards, strict=True):
            if node is not None:
                self._tree.add(node, shard)
        self._put(output)

    def reduce_alone(self, output: Tensor) -> None:
        """Do the same in place for a group of one; does nothing in a larger one."""
        if len(self._reduction.nodes) > 1:
            return
        (node,) = self._reduction.nodes
        assert node is not None, "a rank that is alone has something to do in every pass"
        self._tree.add(node, output.clone())
        self._put(output)

    def _put(self, output: Tensor) -> None:
        if self._reduction.is_last:
            output.copy_(self._tree.take())
        else:
            output.zero_()
