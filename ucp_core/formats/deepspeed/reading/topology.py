"""Opens the files that belong to a native DeepSpeed checkpoint, and no others.

The file of the first model-parallel rank says how many ranks there were. A missing file is an
error. Files of further ranks are left from another run, so the reader skips and reports them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ucp_core.errors import CheckpointCorruptError, MemoryBudgetError, UcpError
from ucp_core.formats.deepspeed.recognition import Names
from ucp_core.formats.shared import Files, Rank
from ucp_core.manifest import Item
from ucp_core.torch_files import Opaque, read_torch_file

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ucp_core.storage import Store

_LEFTOVER = "left from another run: this checkpoint had no such rank"


@dataclass(slots=True)
class Native:
    """A native checkpoint with all files open."""

    files: Files
    stage: int  #: ZeRO's stage; 0 if the optimizer is not sharded.
    dp: int  #: Ranks over which ZeRO shards, including sequence-parallel ranks.
    tp: int  #: Tensor parallel ranks.
    pp: int  #: Pipeline stages.
    #: Names of the model files by ``(dp, mp)``. Up to stage 2 only dp 0 has a file.
    model: dict[tuple[int, int], str]
    optim: dict[tuple[int, int], str]  #: Names of ZeRO's files by ``(dp, mp)``.
    layers: dict[tuple[int, int], str]  #: Names of a pipeline's layer files by ``(layer, tp)``.
    experts: dict[tuple[int, int, int], str]  #: Names by ``(moe layer, expert, mp)``.
    expert_optim: dict[tuple[int, int], str]  #: Names by ``(ep, mp)``.
    items: dict[str, Item]  #: Files that are ignored, and why.

    @property
    def first(self) -> Mapping[str, Any]:
        """Return the model file of the first rank."""
        tree: Mapping[str, Any] = self.files.trees[self.model[0, 0]]
        return tree

    @property
    def version(self) -> str:
        """Return the version of DeepSpeed that saved the checkpoint, if any file names it."""
        names = (self.model[0, 0], *self.optim.values())
        found = (self.files.trees[name].get("ds_version") for name in names)
        return str(next((version for version in found if version), ""))

    def rank(self, mp: int) -> Rank:
        """Return stage and tensor parallel rank of a model-parallel rank."""
        return Rank(mp // self.tp, mp % self.tp)


def open_native(store: Store, directory: str, names: Names, *, with_optim: bool = True) -> Native:
    """Open all files of the checkpoint, or only the model files of a universal one."""
    files = Files(store, directory)
    items = {name: Item("drop", "not a file of the checkpoint") for name in names.others}
    found, is_zero3 = _model_names(names, directory)
    if (0, 0) not in found:
        raise _missing(directory, [_model_name(0, 0, is_zero3=is_zero3)])
    files.open([found[0, 0]])
    first = files.trees[found[0, 0]]
    dp, tp, pp = _degrees(first, names, files.path(found[0, 0]))
    model_ranks = [(d, m) for m in range(tp * pp) for d in range(dp if is_zero3 else 1)]
    model = _select(
        found, model_ranks, directory, lambda d, m: _model_name(d, m, is_zero3=is_zero3)
    )
    _refuse_more_ranks(files, found, model, first)
    optim = _optim_files(names, first, dp, tp * pp, directory, items) if with_optim else {}
    layers = _layer_files(names, tp, items, directory)
    experts = {key: name for key, name in names.experts.items() if key[2] < tp * pp}
    expert_optim = {key: name for key, name in names.expert_optim.items() if key[1] < tp * pp}
    used = [*model.values(), *optim.values(), *layers.values(), *experts.values()]
    files.open([*used, *expert_optim.values()])
    listed: tuple[dict[Any, str], ...] = (
        names.model,
        names.model_zero3,
        *names.optim.values(),
        names.experts,
    )
    for name in (name for group in listed for name in group.values()):
        if name not in files.trees:
            items[name] = Item("drop", _LEFTOVER)
    native = Native(
        files=files,
        stage=0,
        dp=dp,
        tp=tp,
        pp=pp,
        model=model,
        optim=optim,
        layers=layers,
        experts=experts,
        expert_optim=expert_optim,
        items=items,
    )
    _check_agreement(native)
    native.stage = _stage(native)
    return native


def _model_names(names: Names, directory: str) -> tuple[dict[tuple[int, int], str], bool]:
    """Return the model files by ``(dp, mp)``, and whether stage 3 wrote them."""
    if names.model and names.model_zero3:
        one, other = next(iter(names.model.values())), next(iter(names.model_zero3.values()))
        raise CheckpointCorruptError(
            f"{directory} holds {one} from ZeRO stage 0 to 2 and {other} from stage 3: one "
            "kind is left from another run; remove it",
            path=directory,
            files=[one, other],
        )
    if names.model_zero3:
        return dict(names.model_zero3), True
    return {(0, mp): name for mp, name in names.model.items()}, False


def _model_name(dp: int, mp: int, *, is_zero3: bool) -> str:
    zero = f"zero_pp_rank_{dp}_" if is_zero3 else ""
    return f"{zero}mp_rank_{mp:02d}_model_states.pt"


def _select(
    found: Mapping[tuple[int, int], str],
    ranks: Sequence[tuple[int, int]],
    directory: str,
    name_of: Any,
) -> dict[tuple[int, int], str]:
    missing = [name_of(*rank) for rank in ranks if rank not in found]
    if missing:
        raise _missing(directory, missing)
    return {rank: found[rank] for rank in ranks}


def _missing(directory: str, names: Sequence[str]) -> CheckpointCorruptError:
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")  # noqa: PLR2004
    return CheckpointCorruptError(
        f"{directory} lacks {shown}: the checkpoint was not copied or saved completely; use "
        "another one",
        path=directory,
        missing=tuple(names),
    )


def _count(tree: Mapping[str, Any], key: str, where: str) -> int:
    value = tree.get(key)
    if not isinstance(value, int) or value < 1:
        raise CheckpointCorruptError(
            f"{where}: {key} is {value!r}, should be a number of ranks", path=where
        )
    return value


def _degrees(first: Mapping[str, Any], names: Names, where: str) -> tuple[int, int, int]:
    """Return the degrees dp, tp and pp."""
    dp, mp = _count(first, "dp_world_size", where), _count(first, "mp_world_size", where)
    degrees = first.get("checkpoint_parallel_dimensions")
    if isinstance(degrees, dict):
        tp, pp = _count(degrees, "tp_degree", where), _count(degrees, "pp_degree", where)
        if mp == pp == 1:
            # These are DeepSpeed's sequence-parallel ranks, which dp_world_size counts already:
            # only ZeRO shards over them.
            tp = 1
    elif first.get("module", ()) is None:
        # Before DeepSpeed 0.19 only layer files show how a stage is sharded.
        tp = max((-1 if tp is None else tp for _, tp in names.layers), default=0) + 1 or 1
        pp = mp // tp
    else:
        tp, pp = mp, 1
    if tp * pp != mp:
        raise CheckpointCorruptError(
            f"{where}: {mp} model-parallel ranks do not fit {tp} tensor parallel ranks in each of "
            f"{pp} pipeline stage(s)",
            path=where,
        )
    return dp, tp, pp


def _refuse_more_ranks(
    files: Files,
    found: Mapping[tuple[int, int], str],
    model: Mapping[tuple[int, int], str],
    first: Mapping[str, Any],
) -> None:
    """Raise an error if the same save has model files of more ranks than its first file says."""
    for rank in sorted(set(found) - set(model)):
        try:
            other = read_torch_file(files.store, files.directory, found[rank]).tree
        except MemoryBudgetError:
            raise
        except UcpError:
            continue
        keys = ("global_steps", "mp_world_size", "dp_world_size")
        if isinstance(other, dict) and all(other.get(key) == first.get(key) for key in keys):
            raise CheckpointCorruptError(
                f"{files.path(found[rank])} is from the same step as {model[0, 0]}, which "
                f"counts {first.get('mp_world_size')} model-parallel and "
                f"{first.get('dp_world_size')} data-parallel ranks: there are files of more "
                "ranks",
                path=files.path(found[rank]),
            )


def _optim_files(
    names: Names,
    first: Mapping[str, Any],
    dp: int,
    mp: int,
    directory: str,
    items: dict[str, Item],
) -> dict[tuple[int, int], str]:
    """Return ZeRO's files, or none if the optimizer is in the model files."""
    if not _has_zero_files(first, names):
        for name in (name for group in names.optim.values() for name in group.values()):
            items[name] = Item("drop", "left from another run: this one used no ZeRO")
        return {}
    prefix = _prefix(names, first, directory)
    ranks = [(d, m) for m in range(mp) for d in range(dp)]
    return _select(
        names.optim.get(prefix, {}),
        ranks,
        directory,
        lambda d, m: f"{prefix}zero_pp_rank_{d}_mp_rank_{m:02d}_optim_states.pt",
    )


def _has_zero_files(first: Mapping[str, Any], names: Names) -> bool:
    optimizer = first.get("optimizer")
    if isinstance(optimizer, dict):
        # BF16_Optimizer without ZeRO also shards its masters, and saves them as ZeRO does.
        return "single_partition_of_fp32_groups" in optimizer
    if "param_shapes" not in first:
        # Before DeepSpeed 0.19 models with experts were saved without param_shapes.
        return bool(names.optim)
    return first["param_shapes"] is not None


def _prefix(names: Names, first: Mapping[str, Any], directory: str) -> str:
    if len(names.optim) <= 1:
        return next(iter(names.optim), "")
    config = first.get("ds_config")
    settings = config if isinstance(config, dict) else {}
    bf16 = settings.get("bf16") or settings.get("bfloat16")
    prefix = "bf16_" if isinstance(bf16, dict) and bf16.get("enabled") else ""
    others = [p for p in names.optim if p != prefix]
    if prefix in names.optim and len(others) == 1 and "bf16_" in names.optim:
        return prefix
    shown = [next(iter(group.values())) for group in names.optim.values()]
    raise CheckpointCorruptError(
        f"{directory} holds both {shown[0]} and {shown[1]}: one kind is left from another run; "
        "remove it",
        path=directory,
        files=shown,
    )


def _layer_files(
    names: Names, tp: int, items: dict[str, Item], directory: str
) -> dict[tuple[int, int], str]:
    """Return the layer files of a pipeline by ``(layer, tp)``; with one rank names may lack tp."""
    by_axis: dict[bool, dict[tuple[int, int], str]] = {True: {}, False: {}}
    for (layer, rank), name in names.layers.items():
        by_axis[rank is not None][layer, rank or 0] = name
    named, plain = by_axis[True], by_axis[False]
    if named and plain:
        one, other = next(iter(named.values())), next(iter(plain.values()))
        raise CheckpointCorruptError(
            f"{directory} holds {one} and {other}: one kind is left from another run; remove it",
            path=directory,
            files=[one, other],
        )
    found = named or plain
    kept = {key: name for key, name in found.items() if key[1] < tp}
    for key in set(found) - set(kept):
        items[found[key]] = Item("drop", _LEFTOVER)
    missing = [
        f"layer_{layer:02d}-model_{rank:02d}-model_states.pt"
        for layer in sorted({layer for layer, _ in kept})
        for rank in range(tp)
        if (layer, rank) not in kept
    ]
    if missing:
        raise _missing(directory, missing)
    return kept


def _check_agreement(native: Native) -> None:
    """Raise an error if the files come from different saves."""
    files, first_name = native.files, native.model[0, 0]
    first = native.first
    for name in native.model.values():
        tree = files.trees[name]
        for key in ("global_steps", "ds_version", "dp_world_size", "mp_world_size"):
            if tree.get(key) != first.get(key):
                raise CheckpointCorruptError(
                    f"{files.path(name)} has {key} {tree.get(key)!r}, {first_name} has "
                    f"{first.get(key)!r}: the folder mixes two saves",
                    path=files.path(name),
                    key=key,
                )
    for name in native.optim.values():
        tree = files.trees[name]
        version = tree.get("ds_version")
        known = native.version or None
        if None not in (version, known) and version != known:
            raise CheckpointCorruptError(
                f"{files.path(name)} comes from DeepSpeed {version}, {first_name} from "
                f"{known}: the folder mixes two saves",
                path=files.path(name),
            )


def _stage(native: Native) -> int:
    """Return ZeRO's stage."""
    if native.model[0, 0].startswith("zero"):
        return 3
    if not native.optim:
        return 0
    state = native.files.trees[native.optim[0, 0]].get("optimizer_state_dict")
    stage = state.get("zero_stage") if isinstance(state, dict) else None
    value = stage.args[0] if isinstance(stage, Opaque) and stage.args else stage
    return value if isinstance(value, int) else 1
