"""Writes DeepSpeed's universal folder in a form that DeepSpeed loads at every ZeRO stage.

DeepSpeed's own tool writes one form for stages 1 and 2 and another for stage 3, and each loader
accepts only its own form. This folder serves both: tensors have their shapes, every parameter has a
step, and each loader finds an optimizer state and metadata under the names that it expects.

DeepSpeed's universal load restores neither frozen parameters nor buffers. At stage 3 it restores
only the slots ``exp_avg`` and ``exp_avg_sq``, and no hyper-parameters that differ between groups.
The writer omits those, so that the target keeps its own. At stage 3 all groups and sub-groups also
share one step counter, which counts several times a step: with more than one group the losses
differ from the second step on (measured with 0.19.8). The native form
(``ucp_core.formats.deepspeed.writer``) has none of these limits.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from ucp_core.errors import UcpError
from ucp_core.formats.deepspeed import writing
from ucp_core.formats.deepspeed.writer import DTYPES, common_state
from ucp_core.language import Affine, Cut, Grid, Rules
from ucp_core.native import Checkpoint, check_memory
from ucp_core.storage import Store
from ucp_core.torch_files import Instance

#: Slots that DeepSpeed keeps as one number; its folder has only the step.
_STEP = "step"
_SUBPARAM = "deepspeed.checkpoint.universal_checkpoint.SubparamShape"


def write(  # noqa: PLR0913 - the signature of every writer
    checkpoint: Checkpoint,
    store: Store,
    directory: str,
    *,
    memory_bytes: int,
    progress: Callable[[int, int], None] | None = None,
    rules: Rules | None = None,
    dtype: str | None = None,
    tag: str | None = None,
    fsync: bool = True,
) -> None:
    """Write ``directory/TAG`` and, last, ``directory/latest_universal``, which commits it.

    DeepSpeed loads it with ``{"checkpoint": {"load_universal": true}}`` in its configuration.
    ``directory`` is the argument of ``load_checkpoint``. See ``export`` for the other arguments and
    the errors.

    Args:
        rules: How tensors are sharded, for targets with tensor-parallel ranks.
        dtype: A key of ``DTYPES``, for the run's loss scaler. None: the source's dtype.
        tag: Name of the folder; default: DeepSpeed's, ``global_step``, the step, ``_universal``.
    """
    if dtype is not None and dtype not in DTYPES:
        raise UcpError(f"dtype={dtype!r}: give one of {', '.join(DTYPES)}")
    check_memory(memory_bytes)
    model = writing.describe(checkpoint)
    expert = next((key.fqn for key in model.tensors if writing.is_expert(key.fqn)), None)
    if expert is not None:
        raise UcpError(
            f"{expert} belongs to an expert of DeepSpeed's MoE, which the universal form takes "
            "for an expert of every rank: export with --format deepspeed"
        )
    writing.require_groups(model, "DeepSpeed's universal load")
    _check(model)
    tags = {name: _tags(model, name, rules) for name in model.parameters}
    folder = tag or f"global_step{model.counters['global_steps']}_universal"
    precision = DTYPES[dtype or model.precision]
    reader = writing.FlatReader(checkpoint, memory_bytes)
    trees = writing.Trees(model=model, reader=reader, dtype=precision)

    def files() -> Iterator[tuple[str, Any]]:
        # In this order a partial folder never looks complete: metadata that name every parameter
        # come first, and each parameter's values come last.
        yield "zero/optimizer_state.pt", _optimizer_state(trees)
        yield "mp_rank_00_model_states.pt", _model_states(trees, with_tensors=True)
        # Stage 3 reads the same small values under this name.
        yield "zero_pp_rank_0_mp_rank_00_model_states.pt", _model_states(trees, with_tensors=False)
        for group in model.groups:
            for name in group.names:
                yield from _parameter(trees, group, name, tags[name])

    writing.write_files(
        store, directory, folder, files, latest="latest_universal", progress=progress, fsync=fsync
    )


def _check(model: writing.Model) -> None:
    """Raise an error if the folder cannot hold a parameter or a slot."""
    for name in model.parameters:
        if "/" in name or "\0" in name or name in {"", ".", "..", "optimizer_state.pt"}:
            raise UcpError(
                f"{name!r} cannot be the name of a folder, but the universal form has a folder "
                "for each parameter"
            )
    for group in model.groups:
        if numbers := group.scalars.keys() - {_STEP}:
            raise UcpError(
                f"the slot {min(numbers)} is one number for each parameter, for which DeepSpeed's "
                "universal folder has no place: write the native form"
            )
        for slot in group.flat:
            if "/" in slot or slot in {_STEP, "fp32", "", ".", ".."}:
                raise UcpError(f"the slot {slot!r} cannot be the name of a file")


def _parameter(
    trees: writing.Trees, group: writing.Group, name: str, tags: dict[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Yield the files of one parameter."""
    if _STEP in group.scalars:
        yield f"zero/{name}/step.pt", writing.number(*group.scalars[_STEP])
    for slot, dtype in group.flat.items():
        yield f"zero/{name}/{slot}.pt", {"param": trees.data(name, dtype, slot)} | tags
    yield f"zero/{name}/fp32.pt", {"param": trees.data(name, "F32")} | tags


def _tags(model: writing.Model, name: str, rules: Rules | None) -> dict[str, Any]:
    """Return how DeepSpeed must shard a parameter over tensor-parallel ranks."""
    cut = rules.match(name) if rules is not None else Cut(0)
    shape = model.weight(name).shape
    if not isinstance(cut, Cut | Grid | Affine):
        return {}
    if isinstance(cut, Cut) and cut.ratio is not None and shape:
        unit, rest = divmod(shape[cut.dim], sum(cut.ratio))
        if not rest:
            cut = replace(cut, ratio=None, parts=tuple(unit * part for part in cut.ratio))
    if not isinstance(cut, Cut) or (cut.widths, cut.part_widths, cut.ratio) != (None, None, None):
        raise UcpError(
            f"{name}: the universal folder can only express even cuts along one dim; write the "
            "native form for uneven ones"
        )
    if not shape:
        return {}
    dim = cut.dim % len(shape)
    if isinstance(cut.parts, tuple) and len(set(cut.parts)) > 1:
        extents = tuple(cut.parts if d == dim else extent for d, extent in enumerate(shape))
        state = {"patterns": [name], "shape": extents, "partition_dim": dim}
        return {"sub_param_shape": Instance(_SUBPARAM, (), state)}
    tags: dict[str, Any] = {"cat_dim": dim}
    if cut.parts is not None:
        tags["param_n_sub_params"] = len(cut.parts) if isinstance(cut.parts, tuple) else cut.parts
    if cut.unpadded is not None:
        tags["vocab_tensor"] = True
    return tags


def _optimizer_state(trees: writing.Trees) -> dict[str, Any]:
    """Return the optimizer state that both loaders expect."""
    groups = trees.model.groups
    param_groups = [writing.hyper_parameters(group, [index]) for index, group in enumerate(groups)]
    first = next((group.scalars[_STEP] for group in groups if _STEP in group.scalars), None)
    common = {
        key: value
        for key, value in param_groups[0].items()
        if all(key in group and group[key] == value for group in param_groups)
    }
    return trees.scaling() | {
        "zero_stage": Instance("deepspeed.runtime.zero.config.ZeroStageEnum", (1,)),
        "group_paddings": [0] * len(groups),
        "partition_count": [1] * len(groups),
        "ds_version": writing.DS_VERSION,
        "param_groups": param_groups,
        "optimizer_state_dict": {
            "state": {0: {} if first is None else {_STEP: writing.number(*first)}},
            # Stage 3 gives group 0's values to all groups.
            "param_groups": [common | {"params": [0]}],
        },
        **trees.model.clipping,
    }


def _model_states(trees: writing.Trees, *, with_tensors: bool) -> dict[str, Any]:
    model = trees.model
    # These are the names of stage 3, where parameters have no elements.
    module = trees.module(empty=(*model.parameters, *(() if with_tensors else model.frozen)))
    frozen = OrderedDict((name, module[name]) for name in model.frozen if with_tensors)
    return common_state(model, dp=1) | {
        "module": module,
        "buffer_names": list(model.buffers),
        "optimizer": None,
        "param_shapes": [trees.shapes(group.names) for group in model.groups],
        "frozen_param_shapes": trees.shapes(model.frozen),
        "frozen_param_fragments": frozen,
        "shared_params": dict(model.ties),
        "ds_config": dict(model.config),
    }
