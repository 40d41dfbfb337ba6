"""Writes a native checkpoint of DeepSpeed for a chosen stage, dp and tp.

``load_checkpoint`` needs no option, and each rank reads only its own files. So it restores what
DeepSpeed's universal load loses: frozen parameters, buffers, and hyper-parameters by group.
``ucp_core.formats.deepspeed.universal_writer`` writes the universal folder.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, TypeAlias

from ucp_core.errors import UcpError
from ucp_core.formats.deepspeed import writing
from ucp_core.language import Placement, Rules, split
from ucp_core.native import Checkpoint, check_memory
from ucp_core.storage import Store

#: Names of dtypes as DeepSpeed's configuration has them.
DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
#: Sections of a configuration about precision and layout.
_LAYOUT_KEYS = frozenset({"bf16", "bfloat16", "fp16", "tensor_parallel"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The run that is to load the checkpoint."""

    stage: int = 1  #: ZeRO's stage, 0 to 3.
    dp: int = 1  #: Data-parallel ranks (times sequence-parallel ranks).
    tp: int = 1  #: Tensor-parallel ranks.
    #: Expert-parallel ranks, which share the experts of every layer equally. Must divide ``dp``.
    ep: int = 1
    dtype: str | None = None  #: The model's dtype, a key of ``DTYPES``. None: the source's.
    sub_group_size: int = 1_000_000_000  #: Stage 3's setting; the default is DeepSpeed's.
    #: The first layer of every stage of a ``PipelineModule``. Empty: no pipeline.
    stages: Sequence[int] = ()
    #: All layers of each tied module, by its key.
    tied_layers: Mapping[str, Sequence[int]] = field(default_factory=dict)
    #: Name of the folder; default: DeepSpeed's, ``global_step`` and the step.
    tag: str | None = None

    def check(self) -> None:
        """Check the numbers, and raise an ``UcpError`` that names a wrong one."""
        for name in ("dp", "tp", "ep", "sub_group_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise UcpError(f"{name}={value!r} must be at least 1")
        wrong = {
            f"stage={self.stage!r}: ZeRO has stages 0 to 3": self.stage not in {0, 1, 2, 3},
            f"dtype={self.dtype!r}: give one of {', '.join(DTYPES)}": self.dtype
            not in {None, *DTYPES},
            f"ep={self.ep} must divide dp={self.dp}: experts are spread over it": self.dp % self.ep,
            f"the form that stage 0 has in {self.dtype} cannot be written: give stage 1, or fp32": (
                self.stage == 0 and self.dtype not in {None, "fp32"}
            ),
            f"stage={self.stage}: a PipelineModule runs with ZeRO stage 0 or 1 only": (
                self.stages and self.stage not in {0, 1}
            ),
        }
        for message, is_so in wrong.items():
            if is_so:
                raise UcpError(message)


def write(
    checkpoint: Checkpoint,
    store: Store,
    directory: str,
    *,
    memory_bytes: int,
    progress: Callable[[int, int], None] | None = None,
    rules: Rules | None = None,
    fsync: bool = True,
    **target: Any,
) -> None:
    """Write ``directory/TAG`` and, last, ``directory/latest``, which commits it.

    ``directory`` is the argument of ``load_checkpoint``. See ``export`` for the other arguments and
    the errors.

    Args:
        rules: How tensors are sharded over tensor-parallel ranks; required if ``tp`` is above 1.
        **target: The attributes of ``Target``.
    """
    wanted = Target(**target)
    wanted.check()
    check_memory(memory_bytes)
    model = writing.with_single_experts(writing.describe(checkpoint), wanted.ep)
    if wanted.dtype is None:
        wanted = replace(wanted, dtype=model.precision if wanted.stage else "fp32")
    _check_groups(model, wanted)
    placements = _placements(model, wanted, rules)
    tag = wanted.tag or f"global_step{model.counters['global_steps']}"
    stages, files_apart, info = _spread(model, wanted, placements)
    reader = writing.FlatReader(checkpoint, memory_bytes)

    def held(part: writing.Model, rank: int) -> writing.Trees:
        return writing.Trees(
            model=writing.sharded(part, placements, rank) if placements else part,
            reader=reader,
            dtype=DTYPES[wanted.dtype or model.precision],
            dp=wanted.dp,
            ep=wanted.ep,
            stage=wanted.stage,
            sub_group_size=wanted.sub_group_size,
        )

    def files() -> Iterator[tuple[str, Any]]:
        for mp_rank, (models, rank) in enumerate(product(stages, range(wanted.tp))):
            yield from _files([held(part, rank) for part in models], wanted, mp_rank, info)
        for rank in range(wanted.tp):
            module = held(model, rank).module()
            axis = f"-model_{rank:02d}" if wanted.tp > 1 else ""
            for file, own in files_apart(module, axis).items():
                tree = OrderedDict((local, module[name]) for local, name in own.items())
                yield f"{file}_states.pt", tree

    writing.write_files(
        store, directory, tag, files, latest="latest", progress=progress, fsync=fsync
    )


#: Returns the content of the files of layers and experts: the model's name by the name in the file.
_Apart: TypeAlias = Callable[[Iterable[str], str], dict[str, dict[str, str]]]


def _spread(
    model: writing.Model, target: Target, placements: Mapping[str, Placement] | None
) -> tuple[list[list[writing.Model]], _Apart, dict[str, Any]]:
    """Return the models of every stage's expert-parallel ranks, files apart, and the layout."""
    info: dict[str, Any] = {}
    pipeline = writing.Pipeline(target.stages, target.tied_layers) if target.stages else None
    parts = [model] if pipeline is None else pipeline.models(model)
    if pipeline is not None or placements is not None:
        tied = pipeline.tied(model) if pipeline is not None else ()
        told = writing.universal_info(model.weights, placements, tied=tied)
        info["universal_checkpoint_info"] = told
    experts = writing.ExpertShares(model, target.ep, apart=target.stage > 0)
    if not experts.counts:
        files = (lambda _names, _axis: {}) if pipeline is None else pipeline.files
        return [[part] for part in parts], files, info
    if target.stage == writing.ZERO3 or target.tp > 1 or target.stages:
        raise UcpError(
            "experts of DeepSpeed's MoE are written for stages 0 to 2 without tensor-parallel "
            "ranks and pipeline: DeepSpeed has no stage 3 for them, and names experts "
            "differently in the other layouts"
        )
    info["num_experts"] = experts.counts
    return [[experts.rank(ep) for ep in range(target.ep)]], experts.files, info


def _check_groups(model: writing.Model, wanted: Target) -> None:
    """Raise an error unless the stage can hold the optimizer's groups."""
    if wanted.stage > 0:
        writing.require_groups(model, f"DeepSpeed at stage {wanted.stage}")
    if wanted.stage in {1, 2} and any(g.hyper.get("use_muon") for g in model.groups):
        raise UcpError(
            f"stage {wanted.stage} keeps Muon's momentum as whole parameters, not cut like the "
            "masters, and this cannot be written: give stage 3"
        )


def _placements(
    model: writing.Model, target: Target, rules: Rules | None
) -> Mapping[str, Placement] | None:
    """Return how every tensor is sharded over tensor-parallel ranks; None with one rank."""
    tp = target.tp
    if tp == 1:
        return None
    placements: dict[str, Placement] = {}
    for name in model.weights:
        pattern = rules.match(name) if rules is not None else None
        if pattern is None:
            raise UcpError(
                f"no rule says how {name} is spread over {tp} tensor-parallel ranks: give one "
                "with --rules"
            )
        placements[name] = split(pattern, model.weight(name).shape, tp, name=name)
    for name in model.parameters if target.stage > 0 else ():
        # DeepSpeed 0.19.8 (``is_optimized_parameter``) treats a parameter without elements as
        # frozen on that rank; older versions keep it in the optimizer's groups and lose its shape.
        # No file works with both.
        for rank, shard in enumerate(placements[name].shards):
            if 0 in shard:
                raise UcpError(
                    f"{name}: the rules cut dim {shard.index(0)} of "
                    f"{list(model.weight(name).shape)} over tp={tp} ranks and leave rank {rank} "
                    "without a part, so DeepSpeed would not train it there; give other widths or "
                    "another cut for it with --rules, or a smaller tp",
                    fqn=name,
                    dim=shard.index(0),
                    tp=tp,
                    rank=rank,
                )
    return placements


def _files(
    by_rank: Sequence[writing.Trees], target: Target, mp_rank: int, info: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Yield one model-parallel rank's files; ``by_rank`` has one for each expert-parallel rank."""
    stage, mp, trees = target.stage, f"mp_rank_{mp_rank:02d}", by_rank[0]
    if stage > 0:
        prefix = "bf16_" if target.dtype == "bf16" else ""
        for dp_rank in range(target.dp):
            # A rank's number among the holders of its experts, and its expert-parallel rank.
            expert_rank, ep_rank = divmod(dp_rank, target.ep)
            if trees.model.config.get("use_data_before_expert_parallelism"):
                ep_rank, expert_rank = divmod(dp_rank, target.dp // target.ep)
            held = by_rank[ep_rank if len(by_rank) > 1 else 0]
            tree = {
                "optimizer_state_dict": held.optimizer(dp_rank, expert_rank),
                "ds_config": _config(trees.model, target),
                "ds_version": writing.DS_VERSION,
            }
            yield f"{prefix}zero_pp_rank_{dp_rank}_{mp}_optim_states.pt", tree
    elif "num_experts" in info:
        for ep_rank, mine in enumerate(by_rank):
            name = f"expp_rank_{ep_rank}_{mp}_optim_states.pt"
            yield name, {"optimizer": mine.plain_optimizer()}
    for dp_rank in range(target.dp if stage == writing.ZERO3 else 1):
        zero = f"zero_pp_rank_{dp_rank}_" if stage == writing.ZERO3 else ""
        common = common_state(
            trees.model, dp=target.dp, tp=target.tp, pp=max(1, len(target.stages))
        )
        common["ds_config"] = _config(trees.model, target)
        tree = {**_model_states(trees, target, dp_rank), **common, **info}
        yield f"{zero}{mp}_model_states.pt", tree


def _model_states(trees: writing.Trees, target: Target, dp_rank: int) -> dict[str, Any]:
    """Return the content of a model file; up to stage 2 it is equal on all dp ranks."""
    model, is_zero3 = trees.model, target.stage == writing.ZERO3
    module = trees.module(empty=(*model.parameters, *model.frozen) if is_zero3 else ())
    fragments = sizes = None
    shapes = [trees.shapes(names) for _, names in trees.sub_groups()]
    if is_zero3:
        fragments = trees.frozen_fragments(dp_rank)
    elif target.stage == 2 or model.frozen:  # noqa: PLR2004 - ZeRO's
        # These are the module's tensors, so they are stored once. DeepSpeed omits them at stages 0
        # and 1, and its zero_to_fp32 then loses them.
        fragments = OrderedDict((name, module[name]) for name in model.frozen)
    if fragments is not None:
        sizes = trees.shapes(model.frozen)
    # DeepSpeed fills it on rank 0 only.
    shared = dict(model.ties) if dp_rank == 0 else {}
    # Tensors of a pipeline and of experts have their own files.
    held = OrderedDict((name, data) for name, data in module.items() if not writing.is_expert(name))
    return {
        "module": None if target.stages else held,
        "buffer_names": list(model.buffers),
        "optimizer": trees.plain_optimizer() if target.stage == 0 else None,
        # DeepSpeed omits shapes at stage 0, where nothing else names the numbered parameters.
        "param_shapes": shapes or None,
        "shared_params": shared if target.stage > 0 else None,
        "frozen_param_shapes": sizes,
        "frozen_param_fragments": fragments,
    }


def common_state(model: writing.Model, *, dp: int, tp: int = 1, pp: int = 1) -> dict[str, Any]:
    """Return the values of every model_states file besides tensors."""
    return {
        **model.kept,
        "skipped_steps": 0,
        **model.counters,
        "dp_world_size": dp,
        "mp_world_size": tp * pp,
        "checkpoint_parallel_dimensions": {"pp_degree": pp, "tp_degree": tp},
        "ds_version": writing.DS_VERSION,
        **model.client_state,
    }


def _config(model: writing.Model, target: Target) -> dict[str, Any]:
    """Return the source's configuration with the target's changes."""
    config = {key: value for key, value in model.config.items() if key not in _LAYOUT_KEYS}
    zero = config.get("zero_optimization")
    config["zero_optimization"] = (zero if isinstance(zero, dict) else {}) | {"stage": target.stage}
    if target.dtype in {"bf16", "fp16"}:
        kept = model.config.get(target.dtype)
        config[target.dtype] = (kept if isinstance(kept, dict) else {}) | {"enabled": True}
    return config
