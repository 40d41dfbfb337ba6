"""How a model is cut along the axes that need to know it: tensor and pipeline parallelism."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.distributed.tensor.placement_types import Shard

from workers.errors import LayoutRefusedError, TaskError
from workers.parallel.fsdp import keeping_shared, own_names
from workers.parallel.mesh import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """How a model is cut.

    Attributes:
        tensor: A style of ``torch.distributed.tensor.parallel`` for each module that tensor
            parallelism cuts, by its name; ``*`` stands for one part of a name. Modules without one
            are whole on every rank.
        keep_stage: Called with the whole model on the meta device, the number of a stage and their
            number; removes what that stage does not have, and renames nothing. A stage but the
            first is called with what the one before returned: tensors, of the same shape for every
            micro-batch.
    """

    tensor: Mapping[str, ParallelStyle] = field(default_factory=dict)
    keep_stage: Callable[[Any, int, int], None] | None = None


def apply_tensor_plan(
    model: nn.Module, mesh: Mesh, plan: ModelPlan, names: Collection[str]
) -> None:
    """Cut the weights of ``model``, on the meta device, over the tensor-parallel ranks.

    Does nothing if each weight is whole on a rank. Call it before ``shard_model``, which then
    shards what is left.

    Args:
        names: Names of all modules of the whole model.

    Raises:
        TaskError: There is no plan, a name in it is that of no module, or a weight cannot be cut
            into equal parts.
    """
    if mesh.tensor is None:
        return
    degree = mesh.layout.tp
    kind = type(model).__name__
    if not plan.tensor:
        raise LayoutRefusedError(
            f"parallel.tp={degree}: model {kind} has no plan for it; give one, "
            "session.model(build, plan=everstep.ModelPlan(tensor={...})), or write parallel.tp: 1",
            axis="tp",
        )
    unused = [each for each in plan.tensor if not any(_is_named(name, each) for name in names)]
    if unused:
        raise TaskError(f"plan: model {kind} has no module named {', '.join(unused)}")
    here = [name for name, _ in model.named_modules()]
    styles = {
        pattern: style
        for pattern, style in plan.tensor.items()
        if any(_is_named(name, pattern) for name in here)
    }
    with keeping_shared(model):
        parallelize_module(model, mesh.tensor, styles)
    uneven = [
        f"dim {placement.dim} of {name} {list(parameter.shape)}"
        for name, parameter in sorted(own_names(model.named_parameters()).items())
        if isinstance(parameter, DTensor)
        for placement in parameter.placements
        if isinstance(placement, Shard) and parameter.shape[placement.dim] % degree
    ]
    if uneven:
        raise LayoutRefusedError(
            f"parallel.tp={degree} does not divide {', '.join(uneven)}; choose a divisor of these "
            "sizes",
            axis="tp",
        )


def _is_named(name: str, pattern: str) -> bool:
    """Return whether ``pattern`` stands for ``name``, as ``parallelize_module`` understands it."""
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))
