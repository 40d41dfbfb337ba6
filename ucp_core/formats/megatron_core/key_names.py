"""Interprets the keys of a Megatron-core checkpoint, and unstacks layers. Pure."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ucp_core.errors import UcpError
from ucp_core.formats.megatron import is_plain
from ucp_core.geometry import Box, TensorEntry, TensorKey

_CHAIN = r"(?:chained_\d+\.)?"
_STATE = re.compile(_CHAIN + r"optimizer\.state\.(?P<slot>[^.]+)\.(?P<key>.+)")
_BUCKET = re.compile(
    r"(?P<group>(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+)"
    r"\.gbuf_idx_(?P<buffer>\d+)\.dtype_(?P<dtype>.+)\.bucket_idx_(?P<bucket>\d+)"
    r"\.(?P<slot>[^.]+)"
)
_OPTIMIZER = re.compile(_CHAIN + r"optimizer\..+")
#: Equal layers are one tensor, whose dim 0 counts layers; otherwise a number follows.
_STACKED = re.compile(r"(?P<head>(?:.+\.)?layers)\.(?!\d+\.)(?P<rest>.+)")
_OBJECT = re.compile(r"(?P<key>.+)/shard_[\d.]+_[\d.]+")
_SHARD = re.compile(r"shard_[\d.]+_[\d.]+")
#: The number of a layer, and the rest of the name.
_LAYER = re.compile(r"(?P<head>(?:.+\.)?layers)\.(?P<layer>\d+)\.(?P<rest>.+)")
#: Modules of GPTModel; layers that predict further tokens are never stacked.
_MODULES = ("embedding.", "decoder.", "output_layer.", "mtp.")
_UNSTACKED = "mtp."
#: Modules with a state of their own, which is None without Transformer Engine.
_STATEFUL = re.compile(r"(?P<module>.+\.(?:linear_\w+|\w*layernorm))\.weight")
#: Part of the names of experts that are spread over ranks.
_EXPERTS = ".experts."
#: Values that distinguish Megatron's groups, as a plain group has them.
_IDENTIFIERS = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False}
_IDENTIFIERS |= {"is_decoupled_lr": False}
#: The optimizer's fp32 copy of a parameter, under the names of its kinds.
MASTER_SLOTS = frozenset(("param", "fp32_param", "master_param"))
#: Modules without Transformer Engine are saved under the names of its modules.
_LOCAL_NAMES = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
)
#: Parts of the names of modules that Megatron saves under other names.
_LOCAL_PARTS = (".input_layernorm.", ".self_attention.linear_qkv.")


class SavedKey(NamedTuple):
    """The key of a parameter, its layer in the key's tensor, and the number of layers."""

    key: str
    layer: tuple[int, int] | None


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
    """Return the buffer that a tensor's key names, or None."""
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

    Megatron saves every layer of a stack as a box of its own.
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
    """Yield the tensors of the layers in an entry, or the entry itself if it is not a stack."""
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


def saved(kinds: Mapping[str, object]) -> dict[str, SavedKey]:
    """Return the key of each parameter, as ``unstacked`` inverts it.

    Layers that have the same parameters of the same kinds are one tensor; otherwise each layer has
    keys of its own.

    Args:
        kinds: Everything that must be equal in every layer of a stack, by the parameter's name.
    """
    stacks: dict[str, dict[int, dict[str, object]]] = {}
    for fqn, kind in kinds.items():
        if not fqn.startswith(_MODULES):
            raise UcpError(
                f"{fqn} is not a name of Megatron-core's GPTModel, which begin with "
                f"{', '.join(_MODULES)}, or of Hugging Face's Llama: rename it (--rename)"
            )
        match = _LAYER.fullmatch(fqn)
        if match is not None and not fqn.startswith(_UNSTACKED):
            layers = stacks.setdefault(match["head"], {})
            layers.setdefault(int(match["layer"]), {})[match["rest"]] = kind
    counts = {
        head: len(layers)
        for head, layers in stacks.items()
        if set(layers) == {*range(len(layers))} and all(one == layers[0] for one in layers.values())
    }
    is_local = all(any(part in fqn for fqn in kinds) for part in _LOCAL_PARTS)
    found: dict[str, SavedKey] = {}
    for fqn in kinds:
        key, layer = fqn, None
        match = _LAYER.fullmatch(fqn)
        if match is not None and match["head"] in counts:
            key = f"{match['head']}.{match['rest']}"
            layer = int(match["layer"]), counts[match["head"]]
        for fused, own in _LOCAL_NAMES if is_local else ():
            key = key.replace(f".{own}", f".{fused}")
        found[fqn] = SavedKey(key, layer)
    return found


def module_states(key: str, layer: tuple[int, int] | None, shape: Sequence[int]) -> Iterator[str]:
    """Yield the keys of the extra states of a weight's module and of the modules beside it."""
    match = _STATEFUL.fullmatch(key)
    if match is None:
        return
    places = [] if layer is None else [layer]
    if has_experts(key):
        shards = [[*places, (expert, shape[0])] for expert in range(shape[0])]
    else:
        shards = [places or [(0, 1)]]
    modules = [match["module"]]
    if key.endswith(".linear_proj.weight"):
        modules.append(match["module"].replace(".linear_proj", ".core_attention"))
    for module in modules:
        for shard in shards:
            index, count = (".".join(map(str, numbers)) for numbers in zip(*shard, strict=True))
            yield f"{module}._extra_state/shard_{index}_{count}"


def has_experts(key: str) -> bool:
    """Return whether dim 0 of a layer's parameter counts experts."""
    return ".experts.experts." in key


def is_object(key: str, value: Any) -> bool:
    """Return whether a value of ``extra`` is a sharded object that is not the optimizer's."""
    is_sharded = isinstance(value, dict) and all(map(_SHARD.fullmatch, value)) and bool(value)
    return is_sharded and not is_optimizer(key)


def split_optimizer(
    states: Sequence[Any],
) -> tuple[list[dict[str, Any]], list[float], dict[str, Any]]:
    """Return the distinct groups in optimizers' states, their steps, and all other values."""
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


def grouped(
    groups: Sequence[Mapping[str, Any]],
    shapes: Mapping[str, Sequence[int]],
    *,
    experts_apart: bool,
) -> list[dict[str, Any]]:
    """Return the groups as a target makes them, with ``params``.

    Megatron's own groups keep their multipliers. Other groups are cut by Megatron's default:
    parameters that decay, and parameters that do not.

    Args:
        shapes: Shapes of the parameters, by name.
        experts_apart: Whether experts have groups of their own, for an optimizer of their own.
    """
    made: dict[tuple[Any, ...], dict[str, Any]] = {}
    for group in groups:
        own = {k: v for k, v in group.items() if k not in {"params", "param_names", "step"}}
        own |= {k: own.get(k, own.get(f"pre_{k}", v)) for k, v in _IDENTIFIERS.items()}
        is_megatrons = not {"wd_mult", "pre_wd_mult"}.isdisjoint(group)
        for fqn in (fqn for fqn in group["params"] if fqn in shapes):
            values = {**own, "is_expert_parallel": experts_apart and _EXPERTS in fqn}
            one: dict[str, Any] = {}
            if not is_megatrons:
                values["wd_mult"] = 0.0 if is_plain(fqn, shapes[fqn]) else 1.0
                # Since 0.19 Megatron also finds a group by its highest rate.
                one["max_lr"] = own.get("initial_lr", own.get("lr"))
            kind = tuple(values[name] for name in _IDENTIFIERS)
            one = made.setdefault(kind, {**one, **values, "params": []})
            wrong = [name for name in values if values[name] != one.get(name)]
            if wrong:
                raise UcpError(
                    f"{one['params'][0]} and {fqn} differ in {', '.join(wrong)} of the optimizer: "
                    f"Megatron has one group for all {'vectors' if kind[0] == 0 else 'matrices'}"
                )
            one["params"].append(fqn)
    return list(made.values())
