"""Cut a model along axes that depend on its structure, such as tensor parallelism."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from workers.errors import LayoutRefusedError, TaskError
from workers.parallel.dropout import draw_by_part, is_cut
from workers.parallel.fsdp import keeping_shared, own_names
from workers.parallel.hub import cut_experts, cut_tensors, refuse_uneven
from workers.parallel.mesh import Mesh
from workers.parallel.plain_styles import are_plain, cut_plainly


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """How to cut a model."""

    #: A style of ``torch.distributed.tensor.parallel`` for each module that tensor parallelism
    #: cuts, by its name; ``*`` stands for one part of a name. Other modules are whole on every
    #: rank. ``nn.Dropout`` with ``ColwiseParallel()`` draws for each rank's part. Models of
    #: ``transformers`` have their own.
    tensor: Mapping[str, ParallelStyle] = field(default_factory=dict)
    #: Called with the whole model on the meta device, the number of a stage and the number of
    #: stages; removes what that stage lacks and renames nothing. Every stage but the first is
    #: called with the outputs of the one before: tensors, of the same shape for every micro-batch.
    #: Models of ``transformers`` need none.
    keep_stage: Callable[[Any, int, int], None] | None = None
    #: A function that cuts the weights of a model or stage itself, as in torchtitan; instead of
    #: ``tensor``. Called on every layout with the model on the meta device and the meshes by name:
    #: ``tp`` if ``parallel.tp`` is above 1, ``ep`` if ``parallel.ep`` is; and ``dp``, for experts
    #: ``efsdp``, which it needs only for ``fully_shard``. The rest is wrapped afterwards. It leaves
    #: each parameter a DTensor on these meshes, or plain. Plain ones must be equal on all ranks of
    #: ``tp``, with equal gradients. Shared ones stay shared. It makes no process groups and no
    #: ``DDP``.
    parallelize: Callable[[Any, Mapping[str, DeviceMesh]], object] | None = None
    #: Entries of a batch with positions along dim 1; ``session.part`` cuts them if ``parallel.cp``
    #: is above 1. The model then sees other positions only through ``everstep.causal_attention`` or
    #: ``bidirectional_attention``. Models of ``transformers`` need none.
    sequence: tuple[str, ...] = ()


def apply_tensor_plan(
    model: nn.Module, mesh: Mesh, plan: ModelPlan, names: Collection[str]
) -> None:
    """Cut the weights of ``model``, on the meta device, over tensor- and expert-parallel ranks.

    If every rank has whole weights, only the plan's ``parallelize`` is called. Call this before
    ``shard_model``, which shards the result. ``names`` are those of all modules of the whole model.

    Raise ``TaskError`` if there is no plan, it names a module that does not exist, or a weight does
    not divide evenly.
    """
    with keeping_shared(model):
        if plan.parallelize is not None:
            cutting = {} if mesh.tensor is None else {"tp": mesh.tensor}
            if mesh.experts is not None:
                cutting |= {"ep": mesh.experts.ranks, "efsdp": mesh.experts.sharding}
            plan.parallelize(model, {"dp": mesh.sharding, **cutting})
        else:
            _cut(model, mesh, plan, names)
    _refuse_uneven(model, mesh)


def _cut(model: nn.Module, mesh: Mesh, plan: ModelPlan, names: Collection[str]) -> None:
    if mesh.experts is not None and not cut_experts(model, mesh.experts):
        raise LayoutRefusedError(
            f"parallel.ep={mesh.layout.ep}: model {type(model).__name__} has no experts with a "
            "plan, which models of transformers bring; write parallel.ep: 1",
            axis="ep",
        )
    if mesh.tensor is not None and plan.tensor:
        _cut_by_styles(model, mesh.tensor, plan.tensor, names)
    elif mesh.tensor is not None and not cut_tensors(model, mesh):
        raise LayoutRefusedError(
            f"parallel.tp={mesh.layout.tp}: model {type(model).__name__} has no plan for it; "
            "give one, session.model(build, plan=everstep.ModelPlan(tensor={...})), or write "
            "parallel.tp: 1",
            axis="tp",
        )


def _cut_by_styles(
    model: nn.Module,
    mesh: DeviceMesh,
    styles: Mapping[str, ParallelStyle],
    names: Collection[str],
) -> None:
    unused = [each for each in styles if not any(_is_named(name, each) for name in names)]
    if unused:
        raise TaskError(
            f"plan: model {type(model).__name__} has no module named {', '.join(unused)}"
        )
    styled = [
        (module, style)
        for name, module in model.named_modules()
        for pattern, style in styles.items()
        if _is_named(name, pattern)
    ]
    matrices = [(module, style) for module, style in styled if not is_cut(module, style)]
    is_plain = are_plain(matrices)
    for module, style in matrices:
        if is_plain:
            cut_plainly(module, style, mesh)
        else:
            parallelize_module(module, mesh, style)
    for module, style in styled:
        if is_cut(module, style):
            draw_by_part(module, mesh)


def _refuse_uneven(model: nn.Module, mesh: Mesh) -> None:
    sizes: dict[str, int] = {}
    for name, parameter in sorted(own_names(model.named_parameters()).items()):
        for cut in mesh.cuts_of(parameter) if isinstance(parameter, DTensor) else ():
            if cut.axis == "tp":
                what = f"dim {cut.dim} of {name} {list(parameter.shape)}"
                sizes[what] = parameter.shape[cut.dim] // cut.num_pieces
    refuse_uneven(sizes, mesh.layout.tp)


def _is_named(name: str, pattern: str) -> bool:
    """Return whether ``pattern`` matches ``name``, by the rules of ``parallelize_module``."""
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))
