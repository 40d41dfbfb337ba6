"""Opens the files that belong to a native DeepSpeed checkpoint, and no others.

The file of the first model-parallel rank says how many ranks there were. A missing file is an
error. Files of further ranks are left from another run, so the reader skips and reports them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ucp_core.formats.refusals import corrupt, missing, two_saves
from ucp_core.formats.shared import Files, Rank
from ucp_core.manifest import Item
from ucp_core.storage import Store
from ucp_core.torch_files import Opaque

_Listed = Mapping[str, dict[tuple[Any, ...], str]]

#: Keys that all files of one save have in common.
_SAVE = ("global_steps", "ds_version", "dp_world_size", "mp_world_size")
_MODEL = "mp_rank_{1:02d}_model_states.pt"
_ZERO = "zero_pp_rank_{}_mp_rank_{:02d}_"


@dataclass(slots=True)
class Native:
    """A native checkpoint with all files open."""

    files: Files
    is_zero3: bool
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

    @property
    def stage(self) -> int:
        """Return ZeRO's stage; 0 if the optimizer is not sharded."""
        if self.is_zero3 or not self.optim:
            return 3 if self.is_zero3 else 0
        state = self.files.trees[self.optim[0, 0]].get("optimizer_state_dict")
        stage = state.get("zero_stage") if isinstance(state, dict) else None
        value = stage.args[0] if isinstance(stage, Opaque) and stage.args else stage
        return value if isinstance(value, int) else 1

    def rank(self, mp: int) -> Rank:
        """Return the stage and the tensor-parallel rank of a model-parallel rank."""
        return Rank(mp // self.tp, mp % self.tp)


def open_native(store: Store, directory: str, names: _Listed, *, with_optim: bool = True) -> Native:
    """Open all files of the checkpoint, or only the model files of a universal one."""
    files = Files(store, directory)
    is_zero3 = bool(names["model_zero3"])
    found = names["model_zero3"] or {(0, mp): name for (mp,), name in names["model"].items()}
    _refuse_two_kinds(directory, names["model"], names["model_zero3"])
    form = f"{_ZERO}model_states.pt" if is_zero3 else _MODEL
    files.open(_taken(directory, found, [(0, 0)], form).values())
    first = files.trees[found[0, 0]]
    # With one tensor-parallel rank the names of layer files lack it.
    layers = {(layer, max(0, tp)): name for (layer, tp), name in names["layer"].items()}
    dp, tp, pp = _degrees(first, layers, files.path(found[0, 0]))
    ranks = [(d, m) for m in range(tp * pp) for d in range(dp)]
    model = _taken(directory, found, [r for r in ranks if is_zero3 or r[0] == 0], form)
    native = Native(
        files=files,
        is_zero3=is_zero3,
        dp=dp,
        tp=tp,
        pp=pp,
        model=model,
        optim=_optim(directory, names["optim"], first, ranks) if with_optim else {},
        layers=_taken(
            directory,
            layers,
            [
                (layer, rank)
                for layer in sorted({layer for layer, _ in layers})
                for rank in range(tp)
            ],
            "layer_{:02d}-model_{:02d}-model_states.pt",
        ),
        experts={key: name for key, name in names["expert"].items() if key[2] < tp * pp},
        expert_optim={key: n for key, n in names["expert_optim"].items() if key[1] < tp * pp},
        items={},
    )
    used = (native.model, native.optim, native.layers, native.experts, native.expert_optim)
    files.open(name for group in used for name in group.values())
    for kind, listed in names.items():
        why = "left from another run: this checkpoint had no such rank"
        why = "not a file of the checkpoint" if kind == "other" else why
        unused = (name for name in listed.values() if name not in files.trees)
        native.items |= dict.fromkeys(unused, Item("drop", why))
    _check_one_save(native)
    return native


def _taken(
    directory: str, found: Mapping[Any, str], ranks: Iterable[tuple[int, ...]], form: str
) -> dict[Any, str]:
    """Return the files of some ranks; raise an error that names those that are missing."""
    wanted = list(ranks)
    if lacking := [form.format(*rank) for rank in wanted if rank not in found]:
        raise missing(directory, lacking)
    return {rank: found[rank] for rank in wanted}


def _refuse_two_kinds(directory: str, one: Mapping[Any, str], other: Mapping[Any, str]) -> None:
    """Raise an error if a folder has files of two kinds, of which a save has only one."""
    if one and other:
        names = f"{next(iter(one.values()))} and {next(iter(other.values()))}"
        raise corrupt(directory, f"of {names} one kind is left from another run; remove it")


def _count(tree: Mapping[str, Any], key: str, where: str) -> int:
    value = tree.get(key)
    if not isinstance(value, int) or value < 1:
        raise corrupt(where, f"{key} is {value!r}, should be a number of ranks")
    return value


def _degrees(
    first: Mapping[str, Any], layers: Iterable[tuple[int, int]], where: str
) -> tuple[int, int, int]:
    """Return the degrees dp, tp and pp."""
    dp, mp = _count(first, "dp_world_size", where), _count(first, "mp_world_size", where)
    degrees = first.get("checkpoint_parallel_dimensions")
    tp, pp = mp, 1
    if isinstance(degrees, dict):
        tp, pp = _count(degrees, "tp_degree", where), _count(degrees, "pp_degree", where)
        if mp == pp == 1:
            # These are DeepSpeed's sequence-parallel ranks, which dp_world_size counts already:
            # only ZeRO shards over them.
            tp = 1
    elif first.get("module", ()) is None:
        # Before DeepSpeed 0.19 only layer files show how a stage is sharded.
        tp = max((rank for _, rank in layers), default=0) + 1
        pp = mp // tp
    if tp * pp != mp:
        raise corrupt(
            where,
            f"{mp} model-parallel ranks do not fit {tp} tensor parallel ranks in each of {pp} "
            "pipeline stage(s)",
        )
    return dp, tp, pp


def _optim(
    directory: str,
    listed: Mapping[tuple[str, int, int], str],
    first: Mapping[str, Any],
    ranks: Iterable[tuple[int, int]],
) -> dict[tuple[int, int], str]:
    """Return ZeRO's files, or none if the optimizer is in the model files."""
    optimizer = first.get("optimizer")
    # BF16_Optimizer without ZeRO also shards its masters, and saves them as ZeRO does. Before
    # DeepSpeed 0.19 models with experts were saved without param_shapes.
    if isinstance(optimizer, dict):
        has_files = "single_partition_of_fp32_groups" in optimizer
    else:
        has_files = first.get("param_shapes", listed or None) is not None
    if not has_files:
        return {}
    kinds = {prefix: name for (prefix, _, _), name in listed.items()}
    prefix = next(iter(kinds), "")
    shown = sorted(kinds.items())
    _refuse_two_kinds(directory, dict(shown[:1]), dict(shown[1:]))
    found = {(dp, mp): name for (kind, dp, mp), name in listed.items() if kind == prefix}
    return _taken(directory, found, ranks, f"{prefix}{_ZERO}optim_states.pt")


def _check_one_save(native: Native) -> None:
    """Raise an error if the files come from different saves; some may lack a key."""
    trees, first = native.files.trees, native.model[0, 0]
    for name in (*native.model.values(), *native.optim.values()):
        for key in _SAVE:
            value, known = trees[name].get(key), trees[first].get(key)
            if None not in (value, known) and value != known:
                raise two_saves(
                    native.files.path(name), f"{key} is {value!r}, in {first} {known!r}"
                )
