"""Takes the content of a DeepSpeed checkpoint from any checkpoint, and checks it.

The writers of both forms use it before they write anything.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ucp_core.errors import UcpError
from ucp_core.formats.deepspeed import keys
from ucp_core.formats.deepspeed.writing.streams import Source, read_scalars, whole
from ucp_core.formats.shared import restored, tensors_of, weights_of
from ucp_core.geometry import DTYPE_BYTES, TensorEntry, TensorKey
from ucp_core.language import Placement
from ucp_core.native import Checkpoint
from ucp_core.numerics import FLOATS

#: The keys that DeepSpeed itself writes at the top level of a model_states file.
_RESERVED = {*keys.MODEL, *keys.COUNTERS, *keys.STATES, "ds_config"}
WEIGHT = "weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A group of the optimizer."""

    names: tuple[str, ...]  #: Its parameters, in the order in which DeepSpeed flattens them.
    hyper: Mapping[str, Any]
    flat: Mapping[str, str]  #: Slots with as many elements as their parameter: name and dtype.
    #: Slots that are one number for the whole group: name to dtype and bytes.
    scalars: Mapping[str, tuple[str, bytes]]

    @property
    def is_expert(self) -> bool:
        """Return whether DeepSpeed cuts the group over the ranks that hold the same experts."""
        return bool(self.hyper.get("moe"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A training state in DeepSpeed's terms."""

    tensors: Mapping[TensorKey, Source]
    groups: tuple[Group, ...]  #: The optimizer's groups; empty without an optimizer.
    trained: tuple[str, ...]  #: Without an optimizer, the parameters that no role names.
    frozen: tuple[str, ...]  #: Parameters that are not trained, and those without elements.
    buffers: tuple[str, ...]
    ties: Mapping[str, str]  #: Alias to owner.
    #: ``global_steps``, and ``skipped_steps`` and ``global_samples`` if known.
    counters: Mapping[str, int]
    #: States of ``lr_scheduler``, ``data_sampler`` and ``random_ltd``, or None.
    kept: Mapping[str, Any]
    scaler: Mapping[str, Any] | None  #: The loss scaler's class and state, or None.
    clip_grad: float | None  #: The limit of the gradient's norm, or None if unknown.
    precision: str  #: The dtype that the source was trained in: ``fp32``, ``bf16`` or ``fp16``.
    config: Mapping[str, Any]  #: The source's configuration of DeepSpeed, or empty.
    client_state: Mapping[str, Any]  #: Everything else, by name.

    @property
    def parameters(self) -> tuple[str, ...]:
        """Return every trained parameter, group by group."""
        return (*(name for group in self.groups for name in group.names), *self.trained)

    @property
    def weights(self) -> tuple[str, ...]:
        """Return every parameter and buffer."""
        return (*self.parameters, *self.frozen, *self.buffers)

    def weight(self, name: str) -> Source:
        """Return the values of a parameter or buffer."""
        return self.tensors[TensorKey(name, WEIGHT)]


def sharded(model: Model, placements: Mapping[str, Placement], rank: int) -> Model:
    """Return the model of a tensor-parallel rank; a slot is sharded like its parameter."""
    tensors: dict[TensorKey, Source] = {}
    for key, held in model.tensors.items():
        placement = placements[key.fqn]
        tensors[key] = Source(held.entry, placement.shards[rank], placement.pieces[rank])
    return replace(model, tensors=tensors)


def part_of(
    model: Model,
    names_of: Callable[[str], Collection[str]],
    tensors: Mapping[TensorKey, Source] | None = None,
) -> Model:
    """Return a model with other names: ``names_of`` gives those of each tensor, perhaps none.

    It lacks groups of the optimizer that have no parameter there. ``tensors`` are its own, if a
    tensor becomes several.
    """

    def named(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(new for name in names for new in names_of(name))

    if tensors is None:
        items = model.tensors.items()
        tensors = {TensorKey(n, key.slot): held for key, held in items for n in names_of(key.fqn)}
    groups = [replace(group, names=named(group.names)) for group in model.groups]
    return replace(
        model,
        tensors=tensors,
        groups=tuple(group for group in groups if group.names),
        trained=named(model.trained),
        frozen=named(model.frozen),
        buffers=named(model.buffers),
        ties={
            new: owned
            for alias, owner in model.ties.items()
            if len(names_of(alias)) == len(names_of(owner))
            for new, owned in zip(names_of(alias), names_of(owner), strict=True)
        },
    )


def require_groups(model: Model, who: str) -> None:
    """Raise an error if the model has no optimizer."""
    if not model.groups:
        raise UcpError(
            f"the source has no optimizer groups (it may have only weights), and {who} needs them: "
            "give the native form at stage 0 (--format deepspeed --stage 0), and load it with "
            "load_optimizer_states=False"
        )


def describe(checkpoint: Checkpoint) -> Model:
    """Return the state of ``checkpoint``; check first that DeepSpeed can hold it.

    Tensors with the role ``extra`` are not part of the model and are skipped. A slot that a
    parameter lacks is zeros, as DeepSpeed has it for a parameter that never had a gradient.
    """
    manifest, roles = checkpoint.manifest, checkpoint.manifest.roles
    checkpoint.state_map.prove_coverage()
    # The loading module would refuse an unknown name.
    entries, weights = tensors_of(checkpoint), weights_of(checkpoint)
    shapes = {name: entry.shape for name, entry in weights.items()}
    named = [_names(group, checkpoint) for group in manifest.param_groups]
    grouped = {name for names in named for name in names}
    named_ones = {key.fqn for key in entries} | grouped | {*manifest.ties.values()}
    if strange := named_ones - shapes.keys():
        raise UcpError(f"{min(strange)}: the checkpoint has no weight of that name")
    rest = [name for name in weights if name not in grouped and name not in roles]
    if grouped and rest:
        raise UcpError(
            f"{rest[0]} is in no group of the optimizer and is neither frozen nor a buffer: "
            "DeepSpeed would not restore it"
        )
    # No optimizer trains integers, so without one these are buffers.
    counts = {name for name in rest if weights[name].dtype not in FLOATS}
    empty = {name for name in grouped if 0 in shapes[name]}
    scalar_slots = _scalar_slots(entries, shapes)
    groups = []
    for names, group in zip(named, manifest.param_groups, strict=True):
        kept = tuple(name for name in names if name not in empty)
        hyper = {key: value for key, value in group.items() if key != "params"}
        groups.append(_group(checkpoint, kept, hyper, scalar_slots))
    frozen = [name for name in weights if roles.get(name) == "frozen" or name in empty]
    return Model(
        tensors={key: whole(entry) for key, entry in entries.items()},
        groups=tuple(groups) if grouped else (),
        trained=tuple(name for name in rest if name not in counts),
        frozen=tuple(frozen),
        buffers=tuple(n for n in weights if roles.get(n) == "buffer" or n in counts),
        ties=dict(sorted(manifest.ties.items())),
        **_small_values(checkpoint),
    )


def _names(group: Mapping[str, Any], checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the parameters that a group trains, each by its owner's name."""
    ties, roles = checkpoint.manifest.ties, checkpoint.manifest.roles
    owners = dict.fromkeys(ties.get(name, name) for name in group.get("params", ()))
    return tuple(name for name in owners if name not in roles)


def _scalar_slots(
    entries: Mapping[TensorKey, TensorEntry], shapes: Mapping[str, tuple[int, ...]]
) -> frozenset[str]:
    """Return the slots that are one number although a parameter of the group has more elements."""
    found: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    for key, entry in entries.items():
        if key.slot != WEIGHT:
            found.setdefault(key.slot, []).append((entry.shape, shapes[key.fqn]))
    return frozenset(
        slot
        for slot, pairs in found.items()
        if all(shape == () for shape, _ in pairs)
        and (slot == "step" or any(prod(whole) > 1 for _, whole in pairs))
    )


def _group(
    checkpoint: Checkpoint,
    names: tuple[str, ...],
    hyper: Mapping[str, Any],
    scalar_slots: frozenset[str],
) -> Group:
    entries = checkpoint.state_map.entries
    by_slot: dict[str, list[TensorEntry]] = {}
    members = set(names)
    for key in sorted(entries):
        if key.fqn in members and key.slot != WEIGHT:
            by_slot.setdefault(key.slot, []).append(entries[key])
    flat: dict[str, str] = {}
    scalars: dict[str, tuple[str, bytes]] = {}
    for slot, held in by_slot.items():
        # The widest of them holds every value.
        flat[slot] = max((entry.dtype for entry in held), key=lambda dtype: DTYPE_BYTES[dtype])
        if slot in scalar_slots:
            values = read_scalars(checkpoint, held)
            scalars[slot] = flat.pop(slot), values[0]
            kinds = {(entry.dtype, value) for entry, value in zip(held, values, strict=True)}
            if len(kinds) > 1:
                raise UcpError(
                    f"{held[0].key} differs from others: DeepSpeed keeps one number for the whole "
                    "group of the optimizer; put the parameters into groups of their own"
                )
            continue
        for entry in held:
            shape = entries[TensorKey(entry.key.fqn, WEIGHT)].shape
            if entry.shape != shape:
                raise UcpError(
                    f"{entry.key} has the shape {list(entry.shape)}, its parameter {list(shape)}: "
                    "DeepSpeed flattens a slot like its parameter and cannot hold this one"
                )
    return Group(names=names, hyper=hyper, flat=flat, scalars=scalars)


def _small_values(checkpoint: Checkpoint) -> dict[str, Any]:
    extra = checkpoint.extra
    config = _dict(extra.pop("ds_config", None))
    nested = _dict(extra.pop("counters", None))
    counters: dict[str, int] = {"global_steps": checkpoint.step}
    for name in keys.COUNTERS:
        value = extra.pop(name, nested.get(name))
        if isinstance(value, int):
            counters[name] = value
    clip_grad = _dict(extra.pop("optimizer", None)).get("clip_grad")
    kept = {name: restored(extra.pop(name, None)) for name in keys.STATES}
    scaler = _dict(extra.pop("loss_scaler", None))
    values: dict[str, Any] = {
        "counters": counters,
        "kept": kept,
        "precision": _precision(checkpoint, config),
        "config": config,
        # As the reader keeps it: ``{class, state}``.
        "scaler": scaler if "class" in scaler and isinstance(scaler.get("state"), dict) else None,
        "clip_grad": clip_grad if isinstance(clip_grad, int | float) else None,
    }
    merged = extra | _dict(extra.pop("client_state", None))
    client = {k: restored(v) for k, v in sorted(merged.items()) if k not in _RESERVED}
    return values | {"client_state": client}


def _precision(checkpoint: Checkpoint, config: Mapping[str, Any]) -> str:
    for name, sections in {"bf16": ("bf16", "bfloat16"), "fp16": ("fp16",)}.items():
        if any(_dict(config.get(key)).get("enabled") is True for key in sections):
            return name
    entries = checkpoint.state_map.entries.values()
    dtypes = {entry.dtype for entry in entries if entry.key.slot == WEIGHT}
    by_dtypes = {frozenset({"BF16"}): "bf16", frozenset({"F16"}): "fp16"}
    return by_dtypes.get(frozenset(dtypes), "fp32")


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
