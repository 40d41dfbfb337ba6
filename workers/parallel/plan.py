"""How a model is cut along the axes that need to know it: tensor parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.distributed.tensor.placement_types import Shard

from workers.errors import TaskError
from workers.parallel.fsdp import keeping_shared, own_names
from workers.parallel.mesh import Mesh

__all__ = ["ModelPlan", "apply_tensor_plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """How a model is cut.

    Attributes:
        tensor: A style of ``torch.distributed.tensor.parallel`` for each module that tensor
            parallelism cuts, by its name; ``*`` stands for one part of a name. Modules without one
            are whole on every rank.
    """

    tensor: Mapping[str, ParallelStyle] = field(default_factory=dict)


def apply_tensor_plan(model: nn.Module, mesh: Mesh, plan: ModelPlan) -> None:
    """Cut the weights of ``model``, on the meta device, over the tensor-parallel ranks.

    Does nothing if each weight is whole on a rank. Call it before ``shard_model``, which then
    shards what is left.

    Raises:
        TaskError: There is no plan, a name in it is that of no module, or a weight cannot be cut
            into equal parts.
    """
    if mesh.tensor is None:
        return
    degree = mesh.layout.tp
    kind = type(model).__name__
    if not plan.tensor:
        raise TaskError(
            f"parallel.tp={degree}: model {kind} has no plan for it; give one, "
            "session.model(build, plan=everstep.ModelPlan(tensor={...})), or write parallel.tp: 1"
        )
    modules = [name for name, _ in model.named_modules()]
    unused = [each for each in plan.tensor if not any(_is_named(name, each) for name in modules)]
    if unused:
        raise TaskError(f"plan: model {kind} has no module named {', '.join(unused)}")
    with keeping_shared(model):
        parallelize_module(model, mesh.tensor, dict(plan.tensor))
    uneven = [
        f"{name}: {placement.dim} of {list(parameter.shape)}"
        for name, parameter in own_names(model.named_parameters()).items()
        if isinstance(parameter, DTensor)
        for placement in parameter.placements
        if isinstance(placement, Shard) and parameter.shape[placement.dim] % degree
    ]
    if uneven:
        raise TaskError(
            f"parallel.tp={degree} does not divide dim {'; dim '.join(uneven)}; choose a divisor "
            "of these sizes"
        )


def _is_named(name: str, pattern: str) -> bool:
    """Return whether ``pattern`` stands for ``name``, as ``parallelize_module`` understands it."""
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))
