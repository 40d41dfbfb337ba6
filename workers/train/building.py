"""Build the model of an attempt: cut for its layout, sharded, and without values."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any

import torch
from torch import nn

from workers.data import numbers_of_stage
from workers.errors import LayoutRefusedError, TaskError
from workers.models import documents
from workers.parallel import (
    Mesh,
    ModelPlan,
    Pipeline,
    Stages,
    Units,
    Used,
    apply_sequence_plan,
    apply_tensor_plan,
    local_shards,
    materialize,
    own_names,
    shard_model,
)
from workers.protocol import Assignment
from workers.settings import Settings, TrainSettings
from workers.state import Optimizers, PersistentBuffers, Registered, TrainingState, reserve
from workers.train.executor import (
    Average,
    BuiltModel,
    RankCalls,
    ShardedModel,
    TensorReplicas,
    Trained,
    WholeGradients,
    exchanged,
    reduction_of,
    refuse_hooks,
)
from workers.train.loading import aliases_of


def build_model(
    build: Callable[[], nn.Module],
    plan: ModelPlan,
    *,
    mesh: Mesh,
    settings: Settings,
    device: torch.device,
    averaged: Sequence[str] = (),
) -> BuiltModel:
    """Build the model on the meta device, cut and shard it, and allocate this rank's part.

    ``averaged`` names the buffers that become means over micro-batches.
    """
    with torch.device("meta"):
        model = build()
    _check(model, averaged, mesh)
    described = documents(model) if mesh.rank == 0 else {}
    parameters = own_names(model.named_parameters())
    relations = _relations(model)
    names = [name for name, _ in model.named_modules()]
    called, pipeline = model, None
    if mesh.stages is not None:
        stages = Stages(model, plan, mesh.layout.pp, settings.parallel.stages_per_worker)
        called = staged = stages.of_rank(mesh.stage, build, numbers_of_stage)
        dtype = torch.bfloat16 if settings.train.precision == "bf16" else None
        pipeline = Pipeline(staged, stages, mesh=mesh, device=device, dtype=dtype)
        model = staged.stages
    for part in (model,) if pipeline is None else model.children():
        apply_tensor_plan(part, mesh, plan, names)
    sequence = apply_sequence_plan(model, mesh, plan)
    keeps_gathered = shard_model(
        model,
        mesh,
        precision=settings.train.precision,
        reshard_after_forward=settings.parallel.reshard_after_forward,
    )
    materialize(model, device)
    if pipeline is not None:
        pipeline.model.share_buffers()
    reduction = reduction_of(model, device, deterministic=settings.train.deterministic)
    shards = local_shards(model, mesh)
    if settings.train.deterministic:
        reserve(shards)
    for shard in shards:
        # Sharding makes new parameters, without the attributes that the script has set on them.
        vars(shard.parameter).update(vars(parameters[shard.fqn]))
    shapes = {name: tuple(one.shape) for name, one in parameters.items()}
    used = Used(shards, shapes)
    parts: dict[int, nn.Module] = {0: model}
    if pipeline is not None:
        parts = {number: pipeline.model.stage(number) for number in pipeline.model.numbers}
    return BuiltModel(
        model=model,
        called=called,
        shapes=shapes,
        shards=shards,
        buffers=PersistentBuffers(model, averaged),
        keeps_gathered=keeps_gathered,
        sequence=sequence,
        pipeline=pipeline,
        reduction=reduction,
        units={number: Units(part, used) for number, part in parts.items()},
        used=used,
        mesh=mesh,
        device=device,
        documents=described,
        relations=relations,
    )


def _relations(model: nn.Module) -> dict[str, Any]:
    """Return which of the names are buffers, and which are other names of parameters."""
    buffers = [
        f"{name}.{key}" if name else key
        for name, module in own_names(model.named_modules()).items()
        for key in module._buffers  # noqa: SLF001
        if key not in module._non_persistent_buffers_set  # noqa: SLF001
    ]
    return {"buffers": buffers, "ties": aliases_of(model)}


def _refuse_averaged(mesh: Mesh, averaged: Sequence[str]) -> None:
    reasons = {
        "pp": "in a pipeline several micro-batches are open at a time, and no buffer may change",
        "cp": "a worker with a part of a micro-batch would make another buffer of it",
    }
    for axis, why in reasons.items():
        if averaged and getattr(mesh.layout, axis) > 1:
            raise LayoutRefusedError(
                f"session.model: average_buffers={list(averaged)} needs parallel.{axis}: 1; {why}",
                axis=axis,
            )


def _groups_elsewhere(
    built: BuiltModel, optimizers: Optimizers, parameters: Mapping[str, nn.Parameter]
) -> list[list[str]] | None:
    """Return the names of the parameters that only other stages have, by group of the optimizers.

    Return None if the model is whole. Otherwise every worker must call this.
    """
    if built.pipeline is None:
        return None
    if not any(shard.parameter.requires_grad for shard in built.shards):
        raise LayoutRefusedError(
            "with parallel.pp above 1 each stage must have a parameter to train, and that of "
            f"{next(iter(parameters), 'this worker')} has none; write parallel.pp: 1",
            axis="pp",
        )
    names = {id(one): name for name, one in parameters.items()}
    mine = [
        [names[id(one)] for one in group["params"] if id(one) in names]
        for group in optimizers.param_groups
    ]
    every = exchanged(mine, built.device)
    least, most = min(map(len, every)), max(map(len, every))
    if most != least:
        raise LayoutRefusedError(
            f"session.optimizer: stages have {least} to {most} parameter groups; with "
            "parallel.pp above 1 make as many on every worker, empty ones if need be",
            axis="pp",
        )
    return [sorted({*chain(*theirs)} - parameters.keys()) for theirs in zip(*every, strict=True)]


def assemble(
    built: BuiltModel,
    parameters: Mapping[str, nn.Parameter],
    every: Sequence[torch.optim.Optimizer],
    *,
    assignment: Assignment,
    train: TrainSettings,
) -> ShardedModel:
    """Return the model with its optimizers, ``every``, which may be empty."""
    optimizers = Optimizers(every, parameters)
    return ShardedModel(
        **{field.name: getattr(built, field.name) for field in fields(built)},
        parameters=parameters,
        optimizers=optimizers,
        state=TrainingState(
            built.shards,
            parameters,
            optimizers,
            rank=assignment.rank,
            guards=assignment.saved_too,
            elsewhere=_groups_elsewhere(built, optimizers, parameters) if every else None,
            buffers=built.buffers.named(),
            sharers=built.mesh.sharers,
        ),
        registered=Registered(optimizers.every),
        whole=WholeGradients(
            built.shards,
            built.shapes,
            num_parts=train.num_micro_batches if train.deterministic else 1,
            counts=built.mesh.tensor_rank == 0,
            device=built.device,
        ),
        rank_calls=RankCalls(built.model),
        tensor_replicas=TensorReplicas(built.mesh),
        average=Average(built.shards),
        trained=Trained(
            built.shards,
            parameters,
            built.shapes,
            built.used,
            lambda one: optimizers.owner(one) is not None,
            built.device,
        ),
    )


def as_optimizers(made: Any) -> list[torch.optim.Optimizer]:
    """Return the result of a script's function; raise ``TaskError`` if it has another type."""
    every = list(made) if isinstance(made, list | tuple) else [made]
    other = next((one for one in every if not isinstance(one, torch.optim.Optimizer)), None)
    if other is not None or not every:
        raise TaskError(
            f"session.optimizer: your function returned {type(other or made).__name__}, not an "
            "optimizer; return a torch.optim.Optimizer, or a list of them"
        )
    return every


def _check(model: nn.Module, averaged: Sequence[str], mesh: Mesh) -> None:
    """Raise ``TaskError`` if ``model`` keeps state that differs between workers."""
    refuse_hooks(own_names(model.named_parameters()))
    _refuse_averaged(mesh, averaged)
    for name, module in own_names(model.named_modules()).items():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise TaskError(
                f"module {name} ({type(module).__name__}) has max_norm={module.max_norm}: it would "
                "change a gathered copy of its weight, which is dropped. Leave it out, and limit "
                "the norm in a hook of the optimizer (optimizer.register_step_post_hook)",
                module=name,
            )
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise TaskError(
                f"module {name} ({type(module).__name__}) has get_extra_state, which no checkpoint "
                "keeps: hold that in a persistent buffer or session.register it, and set "
                "get_extra_state = nn.Module.get_extra_state in the class",
                module=name,
            )
        if isinstance(getattr(module, "running_mean", None), torch.Tensor):
            own = [f"{name}.{key}" for key in ("running_mean", "running_var")]
            if any(not any(fnmatchcase(one, pattern) for pattern in averaged) for one in own):
                raise TaskError(
                    f"module {name} ({type(module).__name__}) keeps running statistics, which "
                    "depend on the samples of each worker; use LayerNorm, RMSNorm or GroupNorm, or "
                    "have them averaged: session.model(build, average_buffers="
                    '["*.running_mean", "*.running_var"])',
                    module=name,
                )
