"""Draw dropout in modules that tensor parallelism cuts: each rank draws for its own part."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle


def is_cut(module: nn.Module, style: ParallelStyle) -> bool:
    """Return whether a dropout sees columns or heads that other ranks do not have."""
    return type(module) is nn.Dropout and type(style) is ColwiseParallel


def draw_by_part(module: Any, mesh: DeviceMesh) -> None:
    """Make a dropout draw another mask on each rank of ``mesh``.

    All ranks draw the same seed for it. So a repeated pass draws the same mask, and later draws for
    uncut tensors stay equal on all ranks.
    """
    module.forward = partial(_drop, module, module.forward, mesh.get_local_rank())


def _drop(module: Any, forward: Callable[[Tensor], Tensor], part: int, given: Tensor) -> Tensor:
    if not module.training or given.is_meta:
        return forward(given)
    seed = int(torch.randint(1 << 62, ()))
    device = given.device
    generator = (
        torch.default_generator
        if device.type == "cpu"
        else torch.get_device_module(device).default_generators[device.index]
    )
    state = generator.get_state()
    generator.manual_seed(seed + part)
    try:
        return forward(given)
    finally:
        generator.set_state(state)
