"""Names of torch that this room uses and torch may change; checked with 2.11, 2.13 to 2.15."""

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup as Group
from torch.distributed.tensor import _random
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.utils._pytree import tree_map

__all__ = [
    "Group",
    "NoGroup",
    "StridedShard",
    "draw_by_own_states",
    "in_backward",
    "param_group",
    "tree_map",
]


class NoGroup:
    """Replaces the parameter group of a module without parameters of its own."""

    fsdp_params: tuple[Any, ...] = ()
    reduce_grads = False

    def pre_forward(self, _module: Any, args: Any, kwargs: Any) -> Any:
        """Change nothing."""
        return args, kwargs

    def post_forward(self, _module: Any, _given: Any, output: Any) -> Any:
        """Change nothing."""
        return output

    def pre_backward(self, *_how: Any) -> None:
        """Do nothing."""

    def post_backward(self, *_unused: Any) -> None:
        """Do nothing."""


def param_group(module: FSDPModule) -> Group | None:
    """Return the parameters of a unit; None if all belong to units inside of it."""
    return module._get_fsdp_state()._fsdp_param_group  # noqa: SLF001


def in_backward() -> bool:
    """Return whether a backward pass is running; a forward pass inside it is a recomputation."""
    return torch._C._current_graph_task_id() != -1  # noqa: SLF001


def draw_by_own_states(mesh: DeviceMesh) -> None:
    """Make DTensor draw from the random state of each rank, which every pass seeds.

    Otherwise the first random operation of a process broadcasts rank 0's state to all ranks. Ranks
    with other samples would then draw the same numbers, and a new process would broadcast alone.
    """
    has_states = hasattr(_random._get_device_handle(mesh.device_type), "set_rng_state")  # noqa: SLF001
    if has_states and _random._rng_tracker is None:  # noqa: SLF001
        _random._rng_tracker = _random.OffsetBasedRNGTracker(mesh, run_state_sync=False)  # noqa: SLF001
