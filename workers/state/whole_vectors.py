"""Pad shards to whole vectors, so that an element's update does not depend on its shard's size.

On a CPU, torch processes a tensor by vectors, and the elements after the last whole vector one by
one. Some kernels round these differently: the fused ones of AdamW and SGD, and pow, sigmoid or
atan2 in any optimizer (torch 2.13). Which elements are the last ones depends on the number of
workers. So in deterministic mode the optimizer gets each shard padded with rows to whole vectors,
in memory that the model does not use. This works for any kernel, any width of vectors and any
device.
"""

from collections.abc import Iterable, Mapping
from math import gcd, prod
from typing import Any, Final

from torch import Tensor, nn
from torch.nn import functional

from workers.parallel import LocalShard

#: Two vectors of 64 bytes, as AVX-512 processes at a time, with elements of 2 bytes.
_ELEMENTS: Final = 64


def reserve(shards: Iterable[LocalShard]) -> None:
    """Grow the memory of each shard to whole vectors. The model's views of it stay valid.

    Call this before the memory is used, because memory that NumPy has seen cannot grow.
    """
    for shard in shards:
        memory = shard.local.untyped_storage()
        end = int(shard.local.storage_offset()) + prod(_whole(tuple(shard.local.shape)))
        size_bytes = end * shard.local.element_size()
        if memory.size() < size_bytes:
            memory.resize_(size_bytes)


def in_whole_vectors(
    parameters: Iterable[nn.Parameter], state: Mapping[Any, dict[str, Any]] | None = None
) -> None:
    """Add zeros after each parameter's rows, up to whole vectors, in place.

    ``parameters`` come from ``local_parameters``, after ``reserve``. Only the first dim grows.
    ``state``, of an optimizer that was made over them earlier, gets zeros too.
    """
    for parameter in parameters:
        before = tuple(parameter.shape)
        shape = _whole(before)
        if shape == before:
            continue
        flat = parameter.detach().as_strided((prod(shape),), (1,))
        flat[parameter.numel() :].zero_()
        parameter.data = flat.view(shape)
        held = (state or {}).get(parameter, {})
        for name, value in held.items():
            if isinstance(value, Tensor) and tuple(value.shape) == before:
                held[name] = fitted(value, parameter)


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
    """Return ``shape`` with enough rows for whole vectors; the shape of a number gets one dim."""
    num_rows, *row = shape or (1,)
    step = _ELEMENTS // gcd(_ELEMENTS, prod(row))
    return (-(-num_rows // step) * step, *row)
