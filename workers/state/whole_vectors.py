"""Whole vectors: with them an update of an element does not depend on the size of its shard.

torch computes a tensor on a CPU by vectors, and the elements behind the last whole one singly. Some
kernels round these in another way: the fused ones of AdamW and SGD, and pow, sigmoid or atan2 in
any optimizer (torch 2.13). Which elements are last depends on the number of workers. So in
deterministic mode the optimizer gets each shard with rows behind it, in memory that the model does
not use, up to whole vectors. No kernel is chosen here, so this holds for any of them, and for any
width of vectors and any device.
"""

from __future__ import annotations

from math import gcd, prod
from typing import Final

import torch
from torch import Tensor, nn, optim
from torch.nn import functional

__all__ = ["fitted", "in_whole_vectors", "of_shard"]

#: Two vectors of 64 bytes, as AVX-512 takes at a time, with elements of 2 bytes.
_ELEMENTS: Final = 64


def in_whole_vectors(optimizer: optim.Optimizer) -> None:
    """Give each parameter of ``optimizer`` zeros behind its rows, up to whole vectors, in place.

    Its elements stay in the memory of the model, and dims but the first stay as they are. What the
    optimizer keeps for it already gets zeros, too.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            before = parameter.shape
            shape = _whole(tuple(before))
            if shape == before or not parameter.requires_grad:
                continue
            parameter.data = _extended(parameter.detach(), shape)
            for name, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.shape == before:
                    optimizer.state[parameter][name] = fitted(value, parameter)


def fitted(tensor: Tensor | None, parameter: nn.Parameter) -> Tensor | None:
    """Return a tensor of a shard, such as its gradient, in the shape that the optimizer sees."""
    if tensor is None or tensor.shape == parameter.shape:
        return tensor
    missing = parameter.numel() - tensor.numel()
    return functional.pad(tensor.reshape(-1), (0, missing)).view(parameter.shape)


def of_shard(tensor: Tensor, local: Tensor) -> Tensor:
    """Return the part of an optimizer's tensor that belongs to the shard ``local``, in place."""
    if tensor.shape == local.shape:
        return tensor
    return tensor.view(-1)[: local.numel()].view(local.shape)


def _whole(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return ``shape`` with as many rows as make up whole vectors."""
    num_rows = _ELEMENTS // gcd(_ELEMENTS, prod(shape[1:]))
    return (-(-shape[0] // num_rows) * num_rows, *shape[1:])


def _extended(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return ``tensor`` in the same memory, which grows, with zeros behind it."""
    memory = tensor.untyped_storage()
    end = (tensor.storage_offset() + prod(shape)) * tensor.element_size()
    if memory.size() < end:
        # The model's views of the memory stay valid: they know where it is through this.
        memory.resize_(end)
    flat = tensor.as_strided((prod(shape),), (1,))
    flat[tensor.numel() :].zero_()
    return flat.view(shape)
