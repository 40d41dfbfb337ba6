"""Compute tensor-parallel matrices on plain tensors.

torch's column- and row-wise styles give the same weights and values (Megatron-LM, arXiv 1909.08053,
section 3). But for every new mesh torch plans the sharding of each operation again. In the first
step of an attempt this takes 0.1 s of processor time per rank, one pipeline stage after the other.
Each operation also costs more.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn import functional

_Forward = Callable[[Any, ProcessGroup, Tensor], Tensor]


def are_plain(styled: Iterable[tuple[nn.Module, ParallelStyle]]) -> bool:
    """Return whether all these modules can compute on plain tensors.

    None can if a style passes DTensors from module to module.
    """
    return all(_forward_of(module, style) is not None for module, style in styled)


def cut_plainly(module: nn.Module, style: ParallelStyle, mesh: DeviceMesh) -> None:
    """Cut the weights of a module as ``style`` does, and make it compute on its part."""
    forward = _forward_of(module, style)
    assert forward is not None, f"{style} is not computed on plain tensors"
    dims: dict[str, int | None] = {"weight": 0, "bias": 0}
    if type(module) is nn.Linear and type(style) is not ColwiseParallel:
        dims = {"weight": 1, "bias": None}  # None: whole on every rank.
    part, num_parts = mesh.get_local_rank(), mesh.size()
    for name, parameter in list(module.named_parameters(recurse=False)):
        dim = dims[name]
        whole = parameter.detach()
        # The last parts are shorter or empty; the plan is then refused.
        parts = list(whole.chunk(num_parts, dim)) if dim is not None else [whole] * num_parts
        empty = parts[0].narrow(dim or 0, 0, 0)
        local = [*parts, *[empty] * num_parts][part].clone()
        cut: Any = DTensor.from_local(
            local,
            mesh,
            [Shard(dim) if dim is not None else Replicate()],
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        # nn.Parameter does this too, but it also detaches the tensor, for which torch plans a
        # sharding.
        cut._is_param = True  # noqa: SLF001
        module.register_parameter(name, cut.requires_grad_(parameter.requires_grad))
    module.forward = partial(forward, module, mesh.get_group())


def _forward_of(module: nn.Module, style: ParallelStyle) -> _Forward | None:
    """Return how a module with ``style`` computes on plain tensors; None if it cannot."""
    is_column = type(style) is ColwiseParallel
    if not isinstance(style, ColwiseParallel | RowwiseParallel) or not style.use_local_output:
        return None
    if type(style) not in (ColwiseParallel, RowwiseParallel):
        return None
    (given,), (returned,) = style.input_layouts, style.output_layouts
    if type(module) is nn.Linear:
        if is_column and given == Replicate():
            return {Shard(-1): _column, Replicate(): _whole_column}.get(returned)
        if not is_column and (given, returned) == (Shard(-1), Replicate()):
            return _row
    is_whole = (given, returned) == (Replicate(), Replicate())
    if type(module) is nn.Embedding and not is_column and is_whole and _is_usual(module):
        return _embedding_row
    return None


def _is_usual(module: nn.Embedding) -> bool:
    return module.padding_idx is None and not module.sparse and not module.scale_grad_by_freq


def _column(module: Any, group: ProcessGroup, given: Tensor) -> Tensor:
    shared = _SplitShare.apply(given, group)
    return functional.linear(shared, _local(module.weight), _local(module.bias))


def _whole_column(module: Any, group: ProcessGroup, given: Tensor) -> Tensor:
    whole: Tensor = _Gather.apply(_column(module, group, given), group)
    return whole


def _row(module: Any, group: ProcessGroup, given: Tensor) -> Tensor:
    bias: Tensor | None = module.bias
    summed = _summed(functional.linear(given, _local(module.weight)), group)
    return summed if bias is None else summed + _local(bias)


def _embedding_row(module: Any, group: ProcessGroup, given: Tensor) -> Tensor:
    weight = _local(module.weight)
    places = given - group.rank() * len(weight)
    is_elsewhere = (places < 0) | (places >= len(weight))
    found = functional.embedding(places.masked_fill(is_elsewhere, 0), weight)
    return _summed(found.masked_fill(is_elsewhere.unsqueeze(-1), 0.0), group)


def _local(parameter: Any) -> Any:
    return None if parameter is None else parameter.to_local()


def _summed(part: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum over the ranks; every rank already has its whole gradient."""
    summed: Tensor = _Sum.apply(part, group)
    return summed


def _sum_of(part: Tensor, group: ProcessGroup) -> Tensor:
    total = part.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class _SplitShare(torch.autograd.Function):
    """Returns what every rank has; its gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _sum_of(gradient, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, part: Tensor, group: ProcessGroup) -> Tensor:
        return _sum_of(part, group)

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gather(torch.autograd.Function):
    """Joins the last dims of all ranks; each rank has the gradient of the whole."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.chunk(ctx.group.size(), dim=-1)[ctx.group.rank()], None
