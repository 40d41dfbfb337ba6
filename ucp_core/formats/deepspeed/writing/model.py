"""Takes the content of a DeepSpeed checkpoint from any checkpoint, checks it, and reads it.

The writers of both forms use it before they write anything. Elements come as streams in any order:
whole tensors, flat ranges, one rank's shards. A stream needs two buffers of ``SLAB_BYTES_MAX``,
independent of its ranges.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from operator import add, sub
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ucp_core.errors import UcpError
from ucp_core.formats.deepspeed import keys
from ucp_core.formats.shared import restored, tensors_of, weights_of
from ucp_core.geometry import DTYPE_BYTES, Box, TensorEntry, TensorKey, flat_range, slabs
from ucp_core.language import Placement, ShardPiece
from ucp_core.native import Checkpoint, Slab, SlabReader, TensorBox
from ucp_core.numerics import FLOATS, cast, grouped

#: Reads and writes of this size are as fast as larger ones; casting more at once only costs memory.
SLAB_BYTES_MAX = 8 << 20
#: A slab, its scratch buffer, the gathered elements and the result of casting.
_BUFFERS = 8


class Source(NamedTuple):
    """A tensor of the source, or the part of it that a tensor of the target holds."""

    entry: TensorEntry
    shape: tuple[int, ...]
    #: Boxes of the part and their places in the whole tensor, which may have more dims in front;
    #: all other elements are zero.
    pieces: tuple[ShardPiece, ...]

    @property
    def dtype(self) -> str:
        """Return the dtype in the source."""
        return self.entry.dtype


#: Elements ``start <= i < stop`` of a flattened tensor, or as many zeros.
Range: TypeAlias = tuple[Source | None, int, int]


def whole(entry: TensorEntry) -> Source:
    """Return all elements of a tensor."""
    return Source(entry, entry.shape, (ShardPiece(Box.full(entry.shape), (0,) * len(entry.shape)),))


class _Box(NamedTuple):
    """The next box of a shard: its shape, and pieces with their places in it."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[tuple[TensorBox, Box], ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


class FlatReader:
    """Reads one checkpoint as streams of elements, each within ``memory_bytes``."""

    def __init__(self, checkpoint: Checkpoint, memory_bytes: int) -> None:
        self._slab_bytes = min(SLAB_BYTES_MAX, memory_bytes // _BUFFERS)
        self._reader = SlabReader(checkpoint, self._slab_bytes)

    def stream(self, ranges: Iterable[Range], dtype: str) -> Iterator[memoryview]:
        """Yield the elements of all ranges as ``dtype``; a chunk is valid until the next one."""
        runs = _runs(ranges, dtype, self._slab_bytes)
        for group in grouped(runs, lambda run: run.num_bytes, self._slab_bytes):
            slabs = iter(self._reader.read([piece for run in group for piece, _ in run.pieces]))
            for run in group:
                yield _elements(run, slabs, dtype)


def _runs(ranges: Iterable[Range], dtype: str, slab_bytes: int) -> Iterator[_Box]:
    for source, start, stop in ranges:
        if source is None:
            bound = max(1, slab_bytes // DTYPE_BYTES[dtype])
            for low in range(start, stop, bound):
                yield _Box(dtype, (min(bound, stop - low),), ())
            continue
        if source.dtype != dtype and not {source.dtype, dtype} <= set(FLOATS):
            raise UcpError(f"{source.entry.key}: {source.dtype} cannot be written as {dtype}")
        bound = max(1, slab_bytes // max(DTYPE_BYTES[source.dtype], DTYPE_BYTES[dtype]))
        for outer in flat_range(source.shape, start, stop):
            for box in slabs(outer, bound):
                yield _Box(source.dtype, box.shape, tuple(_pieces(source, box)))


def _pieces(source: Source, box: Box) -> Iterator[tuple[TensorBox, Box]]:
    """Yield the boxes of the whole tensor that lie in ``box`` of the part, with their places."""
    for piece in source.pieces:
        inner = box.intersect(piece.local)
        if inner is not None:
            lead = piece.start[: len(piece.start) - len(inner.start)]
            start = (
                *lead,
                *map(add, piece.start[len(lead) :], map(sub, inner.start, piece.local.start)),
            )
            extents = *(1 for _ in lead), *inner.shape
            moved = Box(start, tuple(map(add, start, extents)))
            yield TensorBox(source.entry, moved), inner.relative_to(box)


def _elements(run: _Box, slabs: Iterator[Slab], dtype: str) -> memoryview:
    if not run.pieces:
        return memoryview(bytes(prod(run.shape) * DTYPE_BYTES[dtype]))
    if len(run.pieces) == 1 and run.pieces[0][1].shape == run.shape:
        return cast(next(slabs).data, run.dtype, dtype)
    unit = np.dtype(f"V{DTYPE_BYTES[run.dtype]}")
    gathered = np.zeros(run.shape, unit)
    for _, inner in run.pieces:
        place = tuple(slice(a, b) for a, b in zip(inner.start, inner.stop, strict=True))
        gathered[place] = np.frombuffer(next(slabs).data, unit).reshape(inner.shape)
    return cast(memoryview(gathered.reshape(-1).view(np.uint8).data), run.dtype, dtype)


def read_scalars(checkpoint: Checkpoint, entries: Sequence[TensorEntry]) -> list[bytes]:
    """Return the bytes of 0-d tensors, all read together."""
    reader = SlabReader(checkpoint, SLAB_BYTES_MAX)
    pieces = [TensorBox(entry, Box.full(entry.shape)) for entry in entries]
    return [bytes(slab.data) for slab in reader.read(pieces)]


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
    clipping: Mapping[str, float]  #: The limit of the gradient's norm, if it is known.
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
    placed = {key: placements[key.fqn] for key in model.tensors}
    tensors = {
        key: Source(held.entry, placed[key].shards[rank], placed[key].pieces[rank])
        for key, held in model.tensors.items()
    }
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
    named: list[tuple[str, ...]] = []
    for group in manifest.param_groups:
        owners = dict.fromkeys(manifest.ties.get(name, name) for name in group.get("params", ()))
        named.append(tuple(name for name in owners if name not in roles))
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
    # A slot may be one number although its parameter has more elements.
    flat = {key.slot for key, entry in entries.items() if entry.shape}
    scalars = {k.slot for k in entries if k.slot == "step" or prod(shapes[k.fqn]) > 1} - flat
    groups = []
    for names, group in zip(named, manifest.param_groups, strict=True):
        kept = tuple(name for name in names if name not in empty)
        hyper = {key: value for key, value in group.items() if key != "params"}
        groups.append(_group(checkpoint, kept, hyper, scalars - {WEIGHT}))
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


def _group(
    checkpoint: Checkpoint,
    names: tuple[str, ...],
    hyper: Mapping[str, Any],
    scalar_slots: Collection[str],
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
    client = extra | _dict(extra.pop("client_state", None))
    return {
        "counters": counters,
        "kept": kept,
        "precision": _precision(checkpoint, config),
        "config": config,
        # As the reader keeps it: ``{class, state}``.
        "scaler": scaler if "class" in scaler and isinstance(scaler.get("state"), dict) else None,
        "clipping": {"clip_grad": clip_grad} if isinstance(clip_grad, int | float) else {},
        "client_state": {k: restored(v) for k, v in sorted(client.items()) if k not in _RESERVED},
    }


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
