"""Spread a model over the mesh with FSDP2, from the meta device.

``spread`` wraps, ``materialize`` gives memory. Nothing is communicated before the first
forward pass: whoever fills the parameters fills local pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ucp_core.geometry import Box
from workers.errors import TaskError
from workers.parallel.mesh import Mesh

__all__ = ["Piece", "drop_gathered", "fsdp_modules", "materialize", "pieces", "spread"]

#: Models of up to this many bytes of float32 parameters are gathered as one.
SMALL_BYTES_MAX: Final = 64 << 20
#: Top-level members of these kinds are taken for a row of blocks, gathered one by one.
_BLOCK_CONTAINERS = (nn.ModuleDict, nn.ModuleList, nn.Sequential)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """This rank's part of one parameter.

    Attributes:
        fqn: Name of the parameter in the model.
        shape: Its full shape.
        box: Which elements this rank has; may be empty.
        parameter: The parameter in the model; its gradient appears there.
        local: The elements themselves, the memory that the model uses.
    """

    fqn: str
    shape: tuple[int, ...]
    box: Box
    parameter: nn.Parameter
    local: Tensor

    @property
    def gradient(self) -> Tensor | None:
        """Return the local gradient, of the shape of ``local``; None before the first."""
        gradient: Any = self.parameter.grad
        # Not ``to_local``, which goes through autograd: 20 us for each parameter and step.
        return gradient._local_tensor if gradient is not None else None  # noqa: SLF001


def spread(model: nn.Module, mesh: Mesh, *, precision: str, reshard_after_forward: bool) -> bool:
    """Shard ``model``, still on the meta device, over the mesh; every rank calls it alike.

    A small model is gathered as one and kept: dropping the gathered copy would save no memory
    worth a collective, and collectives of few bytes cost by the call.

    Args:
        model: What to shard; members of its top-level lists of modules are gathered one by one.
        mesh: Over which ranks.
        precision: "fp32", or "bf16" to compute in bfloat16; parameters and gradient sums stay
            float32.
        reshard_after_forward: Whether gathered blocks are dropped after their forward pass.

    Returns:
        Whether the model stays gathered until the last backward pass of a step.
    """
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if precision == "bf16"
        else MixedPrecisionPolicy()
    )
    size_bytes = sum(4 * parameter.numel() for parameter in model.parameters())
    is_small = size_bytes <= SMALL_BYTES_MAX
    for block in () if is_small else _blocks(model):
        fully_shard(
            block,
            mesh=mesh.sharding,
            mp_policy=policy,
            reshard_after_forward=reshard_after_forward,
        )
    # What the root has for itself is needed again right at the start of the backward pass.
    fully_shard(model, mesh=mesh.sharding, mp_policy=policy, reshard_after_forward=False)
    for module in fsdp_modules(model):
        # Gradients are sums over tokens; the training step divides by their number.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return is_small or not reshard_after_forward


def materialize(model: nn.Module, device: torch.device) -> None:
    """Give the parameters of a spread model memory, and keep shared ones shared.

    Parameters and buffers come up uninitialised; ``workers.train.session`` fills both.
    """
    shared = _shared(model)
    model.to_empty(device=device)
    for owners in shared:
        first = getattr(*owners[0])
        for module, name in owners[1:]:
            # to_empty makes a parameter of its own for every place (torch 2.13).
            setattr(module, name, first)


def pieces(model: nn.Module) -> list[Piece]:
    """Return this rank's part of every parameter, sorted by name; a shared one comes once.

    Raises:
        TaskError: A parameter is not float32, or lies in several pieces.
    """
    found: list[Piece] = []
    for fqn, parameter in sorted(model.named_parameters()):
        if parameter.dtype != torch.float32:
            raise TaskError(
                f"parameter {fqn} is {parameter.dtype}; masters are float32, use "
                "train.precision=bf16 to compute in bfloat16",
                fqn=fqn,
            )
        sharded: Any = parameter
        chunks = sharded.__create_chunk_list__()
        assert len(chunks) <= 1, f"{fqn} lies in {len(chunks)} pieces under FSDP2"
        local = sharded.to_local().detach()
        shape = tuple(parameter.shape)
        start = tuple(chunks[0].offsets) if chunks else (0,) * len(shape)
        size = tuple(local.shape)
        box = Box(start, tuple(a + n for a, n in zip(start, size, strict=True)))
        found.append(Piece(fqn=fqn, shape=shape, box=box, parameter=parameter, local=local))
    return found


def fsdp_modules(model: nn.Module) -> Iterator[FSDPModule]:
    """Yield the modules that FSDP2 gathers and reduces as one."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            yield module


def drop_gathered(model: nn.Module) -> None:
    """Have the next pass gather the parameters anew; for when they have another value.

    Most are not gathered by then. They are where a script has called the model and made no
    backward pass, and that pass would take what they were.
    """
    for module in fsdp_modules(model):
        module.reshard()


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    for container in model.children():
        if isinstance(container, _BLOCK_CONTAINERS):
            for block in container.children():
                if any(True for _ in block.parameters()):
                    yield block


def _shared(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(parameter), []).append((module, name))
    return [places for places in owners.values() if len(places) > 1]
