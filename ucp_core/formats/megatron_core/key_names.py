"""Interprets the keys of a Megatron-core checkpoint, and unstacks layers. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from ucp_core.geometry import Box, TensorEntry, TensorKey

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

_CHAIN = r"(?:chained_\d+\.)?"
_STATE = re.compile(_CHAIN + r"optimizer\.state\.(?P<slot>[^.]+)\.(?P<key>.+)")
_BUCKET = re.compile(
    r"(?P<group>(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+)"
    r"\.gbuf_idx_(?P<buffer>\d+)\.dtype_(?P<dtype>.+)\.bucket_idx_(?P<bucket>\d+)"
    r"\.(?P<slot>[^.]+)"
)
_OPTIMIZER = re.compile(_CHAIN + r"optimizer\..+")
#: Layers of one kind are one tensor, whose dim 0 counts layers; otherwise a number follows.
_STACKED = re.compile(r"(?P<head>(?:.+\.)?layers)\.(?!\d+\.)(?P<rest>.+)")
_OBJECT = re.compile(r"(?P<key>.+)/shard_[\d.]+_[\d.]+")
#: The optimizer's fp32 copy of a parameter, under the names of its kinds.
MASTER_SLOTS = frozenset(("param", "fp32_param", "master_param"))
#: Modules without Transformer Engine are saved under the names of its modules.
_LOCAL_NAMES = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
)


class BucketKey(NamedTuple):
    """A flat buffer of one model-parallel rank: parameters one after the other."""

    group: str
    buffer: int
    bucket: int
    slot: str
    dtype: str


def slot_of(key: str) -> tuple[str, str] | None:
    """Return the slot and the model's key of a tensor of the optimizer, or None."""
    match = _STATE.fullmatch(key)
    if match is None:
        return None
    slot = match["slot"]
    return ("weight" if slot in MASTER_SLOTS else slot), match["key"]


def bucket_of(key: str) -> BucketKey | None:
    """Return the buffer that a tensor is, or None."""
    match = _BUCKET.fullmatch(key)
    if match is None:
        return None
    slot = "weight" if match["slot"] in MASTER_SLOTS else match["slot"]
    return BucketKey(
        match["group"], int(match["buffer"]), int(match["bucket"]), slot, match["dtype"]
    )


def is_optimizer(key: str) -> bool:
    """Return whether a key belongs to the optimizer."""
    return _OPTIMIZER.fullmatch(key) is not None


def object_of(key: str) -> str:
    """Return the key of a sharded object without the number of the shard."""
    match = _OBJECT.fullmatch(key)
    return match["key"] if match else key


def layer_name(key: str, layer: int | None, *, is_local: bool) -> str:
    """Return the module's own name for a key, of one layer of a stack."""
    if layer is not None:
        match = _STACKED.fullmatch(key)
        assert match is not None, key
        key = f"{match['head']}.{layer}.{match['rest']}"
    if is_local:
        for fused, own in _LOCAL_NAMES:
            key = key.replace(f".{fused}", f".{own}")
    return key


def stack_of(key: str, shape: Sequence[int], boxes: Iterable[Box]) -> str | None:
    """Return the name of a tensor that is a stack of layers, or None.

    Every layer of a stack was saved as a box of its own.
    """
    match = _STACKED.fullmatch(key)
    if match is None or not shape:
        return None
    layers: set[int] = set()
    for box in boxes:
        if box.stop[0] - box.start[0] != 1:
            return None
        layers.add(box.start[0])
    return match["head"] if len(layers) == shape[0] else None


def unstacked(entry: TensorEntry, *, is_local: bool) -> Iterator[TensorEntry]:
    """Yield the tensors of the layers that an entry holds; itself if it holds none."""
    key = entry.key.fqn
    if stack_of(key, entry.shape, (f.box for f in entry.fragments)) is None:
        name = TensorKey(layer_name(key, None, is_local=is_local), entry.key.slot)
        yield TensorEntry(key=name, dtype=entry.dtype, shape=entry.shape, fragments=entry.fragments)
        return
    by_layer: dict[int, list[Any]] = {layer: [] for layer in range(entry.shape[0])}
    for fragment in entry.fragments:
        box = Box(fragment.box.start[1:], fragment.box.stop[1:])
        strides = None if fragment.strides is None else fragment.strides[1:]
        by_layer[fragment.box.start[0]].append(fragment._replace(box=box, strides=strides))
    for layer, fragments in by_layer.items():
        yield TensorEntry(
            key=TensorKey(layer_name(key, layer, is_local=is_local), entry.key.slot),
            dtype=entry.dtype,
            shape=entry.shape[1:],
            fragments=tuple(sorted(fragments)),
        )


def split_optimizer(
    states: Sequence[Any],
) -> tuple[list[dict[str, Any]], list[float], dict[str, Any]]:
    """Return the distinct groups in optimizers' states, their steps, and the rest.

    Args:
        states: JSON values; every model-parallel rank may have saved the same groups again.
    """
    groups: list[dict[str, Any]] = []
    steps: list[float] = []
    rest: dict[str, Any] = {}

    def visit(value: Any, path: str) -> None:
        if isinstance(value, dict):
            for key, part in value.items():
                if key == "param_groups" and isinstance(part, list):
                    found = [group for group in part if isinstance(group, dict)]
                    groups.extend(group for group in found if group not in groups)
                elif key == "common_step":
                    steps.extend([part] if isinstance(part, int | float) else [])
                else:
                    visit(part, f"{path}.{key}" if path else str(key))
        elif isinstance(value, list):
            for index, part in enumerate(value):
                visit(part, f"{path}.{index}" if path else str(index))
        elif value is not None:
            rest[path] = value

    for state in states:
        visit(state, "")
    return groups, steps, rest


def assigned(
    groups: Sequence[Mapping[str, Any]], shapes: Mapping[str, Sequence[int]]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the groups with their parameters, and the parameters that do not fit one group.

    Megatron saves groups without names. It groups parameters by expert, weight decay and learning
    rate, and by default decays all but biases and vectors.
    """
    named: list[dict[str, Any]] = [{**group, "params": []} for group in groups]
    decoupled = any(group.get("is_decoupled_lr") for group in groups)
    # Without expert-parallel ranks experts share the groups of all other parameters.
    apart = any(group.get("is_expert_parallel") for group in groups)
    unsure: list[str] = []
    for fqn, shape in shapes.items():
        fits = [
            group
            for group in named
            if len(groups) == 1 or _fits(group, fqn, shape, decoupled=decoupled, apart=apart)
        ]
        if len(fits) == 1:
            fits[0]["params"].append(fqn)
        else:
            unsure.append(fqn)
    return named, unsure


def _fits(
    group: Mapping[str, Any], fqn: str, shape: Sequence[int], *, decoupled: bool, apart: bool
) -> bool:
    is_expert = apart and ".experts." in fqn
    is_plain = fqn.endswith(".bias") or len(shape) == 1
    is_outer = fqn.startswith(("embedding.", "output_layer."))
    return (
        bool(group.get("is_expert_parallel")) == is_expert
        and (group.get("wd_mult", 1.0) == 0.0) == is_plain
        and (not decoupled or bool(group.get("is_decoupled_lr")) == is_outer)
    )
