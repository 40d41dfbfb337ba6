"""Makes small checkpoints in DeepSpeed's form without DeepSpeed, and spoils them.

A folder is held as trees by file name until it is written, so a test can change anything in it.
The form is that of DeepSpeed 0.19.8; ``tests/interop`` has what DeepSpeed itself writes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tests.support.made import tensor_of
from ucp_core.formats import open_source
from ucp_core.geometry import Box, TensorKey
from ucp_core.language import Rules
from ucp_core.native import Checkpoint, load
from ucp_core.storage import LocalStore
from ucp_core.torch_files import Instance, Named, Size, TensorData, write_torch_file

Array = npt.NDArray[Any]

SLOTS = ("exp_avg", "exp_avg_sq")
CLASSES = frozenset(
    (
        "deepspeed.utils.tensor_fragment.fragment_address",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "argparse.Namespace",
        "torch.float16",
    )
)
_DTYPES = {"float32": "F32", "float64": "F64", "float16": "F16", "int64": "I64", "uint8": "U8"}


def tensor(array: Array) -> TensorData:
    """Return an array as a tensor to write."""
    data = np.ascontiguousarray(array)
    return TensorData.of_bytes(_DTYPES[str(data.dtype)], array.shape, data.tobytes())


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter of the model."""

    name: str  #: Its name.
    shape: tuple[int, ...]  #: Shape of the whole.
    #: Dim along which tensor parallel ranks hold it; None: each holds all of it; or a function from
    #: the whole and the number of ranks to the shards.
    cut: int | Callable[[Array, int], list[Array]] | None = None
    group: int = 0  #: Group of the optimizer.
    role: str = "trained"  #: ``trained``, ``frozen`` or ``buffer``.
    stages: tuple[int, ...] = (0,)  #: Pipeline stages that hold it.

    def shards(self, whole: Array, tp: int) -> list[Array]:
        """Return the shards of the tensor parallel ranks."""
        if callable(self.cut):
            return self.cut(whole, tp)
        if self.cut is None:
            return [whole] * tp
        return np.array_split(whole, tp, axis=self.cut)

    def value(self, slot: str) -> Array:
        """Return the whole tensor of a slot, always the same."""
        seed = [*f"{self.name}/{slot}".encode()]
        values = np.random.default_rng(seed).standard_normal(self.shape)
        return np.asarray(values, np.float32)


@dataclass(slots=True)
class Folder:
    """A checkpoint before it is written."""

    trees: dict[str, Any] = field(default_factory=dict)  #: By file name.
    texts: dict[str, str] = field(default_factory=dict)  #: Files that are no torch files.
    #: Whole tensors by fqn and slot.
    expected: dict[tuple[str, str], Array] = field(default_factory=dict)

    def write(self, path: Path) -> Path:
        """Write all files and return ``path``."""
        store = LocalStore()
        path.mkdir(parents=True, exist_ok=True)
        for name, tree in self.trees.items():
            write_torch_file(store, str(path / name), tree, allow=CLASSES, fsync=False)
        for name, text in self.texts.items():
            (path / name).write_text(text)
        return path

    def optim(self, dp: int = 0, mp: int = 0) -> dict[str, Any]:
        """Return the optimizer state of a rank."""
        found: dict[str, Any] = self.trees[optim_name(dp, mp)]["optimizer_state_dict"]
        return found


def optim_name(dp: int, mp: int) -> str:
    return f"zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt"


def native(
    params: Sequence[Param],
    *,
    stage: int = 1,
    dp: int = 2,
    tp: int = 1,
    pp: int = 1,
    step: int = 5,
    info: Mapping[str, Any] | None = None,
    more: Mapping[str, Any] | None = None,
) -> Folder:
    """Return a checkpoint of ``params`` under a layout.

    Args:
        params: The model.
        stage: Stage of ZeRO, 1 to 3.
        dp: Data parallel ranks.
        tp: Tensor parallel ranks.
        pp: Pipeline stages; names then begin with the number of their layer.
        step: When it was saved.
        info: ``universal_checkpoint_info``.
        more: More keys of the model files.
    """
    folder = Folder()
    for param in params:
        slots = ("weight", *SLOTS) if param.role == "trained" else ("weight",)
        folder.expected |= {(param.name, slot): param.value(slot) for slot in slots}
    for mp in range(tp * pp):
        held = [p for p in params if mp // tp in p.stages]
        _add_rank(folder, held, _Layout(stage, dp, tp, pp, step), mp)
        for name, tree in folder.trees.items():
            if name.endswith(f"mp_rank_{mp:02d}_model_states.pt"):
                tree.update(more or {})
                if info is not None:
                    tree["universal_checkpoint_info"] = dict(info)
    return folder


class _Layout(NamedTuple):
    stage: int
    dp: int
    tp: int
    pp: int
    step: int


def _add_rank(folder: Folder, held: Sequence[Param], layout: _Layout, mp: int) -> None:
    stage, dp, tp, pp, step = layout
    local = {
        (p.name, slot): p.shards(p.value(slot), tp)[mp % tp]
        for p in held
        for slot in ("weight", *SLOTS)
    }
    trained = [p for p in held if p.role == "trained"]
    groups = [[p for p in trained if p.group == g] for g in sorted({p.group for p in trained})]
    shapes = [{p.name: Size(local[p.name, "weight"].shape) for p in group} for group in groups]
    module = None if pp > 1 else _module(held, local, stage)
    for rank in range(dp if stage == 3 else 1):
        name = f"mp_rank_{mp:02d}_model_states.pt"
        folder.trees[name if stage < 3 else f"zero_pp_rank_{rank}_{name}"] = {
            "module": module,
            "buffer_names": [p.name for p in held if p.role == "buffer"],
            "optimizer": None,
            "param_shapes": shapes,
            "shared_params": {},
            "lr_scheduler": {"last_epoch": step},
            "global_steps": step,
            "skipped_steps": 0,
            "global_samples": step * 4,
            "dp_world_size": dp,
            "mp_world_size": tp * pp,
            "checkpoint_parallel_dimensions": {"pp_degree": pp, "tp_degree": tp},
            "ds_config": {"zero_optimization": {"stage": stage}},
            "ds_version": "0.19.8",
            **_frozen(held, local, stage, dp, rank),
        }
    if pp > 1:
        _add_layers(folder, held, local, tp, mp)
    pieces = [
        _zero3(group, local, dp) if stage == 3 else _zero12(group, local, dp) for group in groups
    ]
    for rank in range(dp):
        state = _state(pieces, groups, rank, stage, dp, step)
        if stage < 3:
            state["param_slice_mappings"] = [
                {n: _address(*place) for n, place in piece.mappings[rank].items()}
                for piece in pieces
            ]
        folder.trees[optim_name(rank, mp)] = {
            "optimizer_state_dict": state,
            "ds_config": {},
            "ds_version": "0.19.8",
        }


def _address(start: int, numel: int) -> Instance:
    name = "deepspeed.utils.tensor_fragment.fragment_address"
    return Instance(name, (), {"numel": numel, "start": start})


def _module(
    held: Sequence[Param], local: Mapping[tuple[str, str], Array], stage: int
) -> dict[str, Any]:
    module = {}
    for param in held:
        value = local[param.name, "weight"]
        is_placeholder = stage == 3 and param.role != "buffer"
        module[param.name] = tensor(np.zeros(0, np.float32) if is_placeholder else value)
    return module


def _frozen(
    held: Sequence[Param], local: Mapping[tuple[str, str], Array], stage: int, dp: int, rank: int
) -> dict[str, Any]:
    if stage < 3:
        return {"frozen_param_shapes": None, "frozen_param_fragments": None}
    frozen = [p for p in held if p.role == "frozen"]
    shards = {p.name: local[p.name, "weight"] for p in frozen}
    return {
        "frozen_param_shapes": {name: Size(shard.shape) for name, shard in shards.items()},
        "frozen_param_fragments": {
            name: tensor(_pieces(shard, dp)[rank]) for name, shard in shards.items()
        },
    }


def _add_layers(
    folder: Folder,
    held: Sequence[Param],
    local: Mapping[tuple[str, str], Array],
    tp: int,
    mp: int,
) -> None:
    suffix = f"-model_{mp % tp:02d}" if tp > 1 else ""
    for param in held:
        if param.name.startswith("tied_modules."):
            # The layer that a tied module is at is said nowhere; here it is the first.
            number, name = "0", param.name.rsplit(".", 1)[1]
        else:
            number, name = param.name.split(".", 1)
        file = f"layer_{int(number):02d}{suffix}-model_states.pt"
        folder.trees.setdefault(file, {})[name] = tensor(local[param.name, "weight"])


@dataclass(slots=True)
class _Pieces:
    """A group's flat buffers, cut: by slot and rank; and where each parameter is, by rank."""

    flat: dict[str, list[Array]]
    mappings: list[dict[str, tuple[int, int]]]
    paddings: list[int]


def _zero12(group: Sequence[Param], local: Mapping[tuple[str, str], Array], dp: int) -> _Pieces:
    flat: dict[str, list[Array]] = {}
    for slot in ("weight", *SLOTS):
        whole = np.concatenate([local[p.name, slot].ravel() for p in group])
        padding = -whole.size % (2 * dp)
        flat[slot] = np.split(np.append(whole, np.zeros(padding, np.float32)), dp)
    size = flat["weight"][0].size
    total = sum(local[p.name, "weight"].size for p in group)
    mappings: list[dict[str, tuple[int, int]]] = [{} for _ in range(dp)]
    begin = 0
    for param in group:
        end = begin + local[param.name, "weight"].size
        for rank in range(dp):
            first, last = max(begin, rank * size), min(end, (rank + 1) * size)
            if first < last:
                mappings[rank][param.name] = (first - rank * size, last - first)
        begin = end
    paddings = [min(size, max(0, (rank + 1) * size - total)) for rank in range(dp)]
    # Masters are saved without the padding, moments with it.
    flat["weight"] = [w[: size - p] for w, p in zip(flat["weight"], paddings, strict=True)]
    return _Pieces(flat, mappings, paddings)


def _pieces(array: Array, dp: int) -> list[Array]:
    size = -(-array.size // dp)
    return np.split(np.append(array.ravel(), np.zeros(size * dp - array.size, array.dtype)), dp)


def _zero3(group: Sequence[Param], local: Mapping[tuple[str, str], Array], dp: int) -> _Pieces:
    flat = {
        slot: [
            np.concatenate([_pieces(local[p.name, slot], dp)[rank] for p in group])
            for rank in range(dp)
        ]
        for slot in ("weight", *SLOTS)
    }
    return _Pieces(flat, [], [])


def _state(
    pieces: Sequence[_Pieces],
    groups: Sequence[Sequence[Param]],
    rank: int,
    stage: int,
    dp: int,
    step: int,
) -> dict[str, Any]:
    states = {
        index: {
            "step": tensor(np.array(step, np.float32)),
            **{slot: tensor(piece.flat[slot][rank]) for slot in SLOTS},
        }
        for index, piece in enumerate(pieces)
    }
    hyper = [
        {
            "lr": 0.1 / (index + 1),
            "betas": (0.9, 0.95),
            "weight_decay": 0.1 * index,
            "params": [index],
        }
        for index in range(len(groups))
    ]
    common = {
        "zero_stage": Instance("deepspeed.runtime.zero.config.ZeroStageEnum", (stage,)),
        "loss_scaler": Instance(
            "deepspeed.runtime.fp16.loss_scaler.LossScaler", (), {"cur_scale": 1.0}
        ),
        "overflow": False,
    }
    weights = [tensor(piece.flat["weight"][rank]) for piece in pieces]
    if stage == 3:
        return {
            **common,
            "partition_count": dp,
            "optimizer_state_dict": {"state": states, "param_groups": hyper},
            "fp32_flat_groups": weights,
        }
    return {
        **common,
        "base_optimizer_state": {"state": states, "param_groups": hyper},
        "single_partition_of_fp32_groups": weights,
        "group_paddings": [piece.paddings[rank] for piece in pieces],
        "partition_count": [dp] * len(pieces),
        "ds_version": "0.19.8",
    }


def namespace(**values: Any) -> Instance:
    """Return an ``argparse.Namespace``, as Megatron saves its arguments."""
    return Instance("argparse.Namespace", (), values)


def dtype(name: str) -> Named:
    """Return a dtype of torch."""
    return Named(f"torch.{name}")


def read(path: Path, *, rules: Rules | None = None, tag: str | None = None) -> Checkpoint:
    """Open the checkpoint of a path."""
    return open_source(LocalStore(), str(path), rules=rules, tag=tag)


def loaded(checkpoint: Checkpoint) -> dict[tuple[str, str], Array]:
    """Return all whole tensors of a checkpoint, besides step counts."""
    dtypes = {"F32": np.float32, "F16": np.float16, "F64": np.float64, "I64": np.int64}
    arrays: dict[TensorKey, Array] = {
        key: np.zeros(entry.shape, dtypes[entry.dtype])
        for key, entry in checkpoint.state_map.entries.items()
    }
    need = [
        tensor_of(
            key.fqn,
            entry.shape,
            memoryview(arrays[key].reshape(-1)).cast("B"),  # type: ignore[arg-type]
            slot=key.slot,
            dtype=entry.dtype,
        )
        for key, entry in checkpoint.state_map.entries.items()
        if entry.num_bytes
    ]
    load(checkpoint, need)
    return {(key.fqn, key.slot): array for key, array in arrays.items() if key.slot != "step"}


def assert_equal(found: Mapping[tuple[str, str], Array], expected: Mapping[Any, Array]) -> None:
    """Raise unless both have the same tensors, bit for bit."""
    assert sorted(found) == sorted(expected)
    for key, array in expected.items():
        assert found[key].shape == array.shape, key
        assert found[key].tobytes() == array.tobytes(), key


UNIVERSAL_MODEL = [
    Param("embed.weight", (5, 3)),
    Param("up.weight", (4, 3)),
    Param("up.bias", (4,), group=1),
    Param("frozen.weight", (2, 3), role="frozen"),
    Param("scale", (3,), role="buffer"),
]


def universal(*, stage: int = 1, beside: bool = True) -> Folder:
    """Return what DeepSpeed makes of ``UNIVERSAL_MODEL``; ``beside``: with the model files."""
    source = native(UNIVERSAL_MODEL, stage=stage, dp=2)
    folder = Folder(expected=source.expected)
    is_bare = stage == 3
    for param in UNIVERSAL_MODEL:
        path = f"zero/{param.name}"
        if param.role != "trained":
            # Only stages 1 and 2 have these, upcast.
            if not is_bare:
                folder.trees[f"{path}/fp32.pt"] = {"param": tensor(param.value("weight"))}
            continue
        for slot in ("weight", *SLOTS):
            value = param.value(slot)
            tree: Any = tensor(value.ravel()) if is_bare else {"param": tensor(value), "cat_dim": 0}
            folder.trees[f"{path}/{'fp32' if slot == 'weight' else slot}.pt"] = tree
        if not is_bare:
            folder.trees[f"{path}/step.pt"] = tensor(np.array(5, np.float32))
    state = source.optim()
    inner = state["optimizer_state_dict" if is_bare else "base_optimizer_state"]
    dropped = {"base_optimizer_state", "single_partition_of_fp32_groups", "param_slice_mappings"}
    folder.trees["zero/optimizer_state.pt"] = {
        **{key: value for key, value in state.items() if key not in dropped},
        "param_groups": inner["param_groups"],
    }
    if beside:
        names = [name for name in source.trees if name.endswith("model_states.pt")]
        folder.trees |= {name: source.trees[name] for name in names}
    return folder


def with_shapes(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> Checkpoint:
    """Return the checkpoint with flat tensors in the shapes that their model has."""
    entries = dict(checkpoint.state_map.entries)
    for key, entry in entries.items():
        shape = shapes.get(key.fqn, ())
        if len(entry.shape) == 1 and len(shape) > 1:
            whole = tuple(f._replace(box=Box.full(shape)) for f in entry.fragments)
            entries[key] = replace(entry, shape=shape, fragments=whole)
    state_map = replace(checkpoint.state_map, entries=entries)
    return replace(checkpoint, manifest=replace(checkpoint.manifest, state_map=state_map))
