"""Reads checkpoints of torch DCP: FSDP, FSDP2, HSDP, tensor parallelism, single processes.

A chunk becomes a fragment; nothing is copied. Torch overwrites data and metadata in place, the
metadata last. After a crash in between, old metadata may describe new data. The reader notices this
if sizes, shapes, dtypes or torch's checksums differ. It cannot notice a save of the same layout
that ended between two files.
"""

import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from math import prod
from typing import Any

from ucp_core.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    ForeignClassError,
    UcpError,
    UnsupportedVersionError,
)
from ucp_core.formats.dcp.container import Container
from ucp_core.formats.dcp.directory import read_container, sharded_container
from ucp_core.formats.dcp.key_names import KeyNames, classify
from ucp_core.formats.dcp.recognition import NAME, metadata_names, parts_of
from ucp_core.formats.refusals import corrupt
from ucp_core.formats.shared import NUMBER_DTYPES, Assembly, assign
from ucp_core.geometry import TensorEntry, TensorKey, packed_strides
from ucp_core.language import Rules
from ucp_core.manifest import Item
from ucp_core.native import Checkpoint
from ucp_core.numerics import crc32
from ucp_core.storage import Store, join
from ucp_core.torch_files import TensorRef

#: A random generator's state has 5 KB; anything larger belongs to the model.
_SMALL_BYTES = 64 << 10
_STEPS = ("step", "global_step", "global_steps", "iteration", "steps", "num_steps", "steps_run")
_RANDOM = re.compile(r".*(?:rng|random|generator).*", re.IGNORECASE)
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_BUFFERS = (
    *_STATISTICS,
    "inv_freq",
    "freqs_cis",
    "_extra_state",
)
#: Last part of a flat parameter's key: since torch 1.13, and before.
_FLAT = ("_flat_param", "flat_param")
_INTEGERS = frozenset(("BOOL", "U8", "I8", "I16", "U16", "I32", "U32", "I64", "U64"))


def state_of(container: Container) -> Assembly:
    """Return the training state in a container."""
    shapes = {key: item.shape for key, item in container.tensors.items()}
    _refuse_flat(container)
    names = classify(shapes, container.blobs, container.paths)
    _name_numbers(container, names)
    found = Assembly(container.store, container.directory)
    keys = {key: TensorKey(fqn, "weight") for key, fqn in names.weights.items()}
    keys |= {
        key: TensorKey(fqn, slot) for key, (fqn, slot) in names.states.items() if key in shapes
    }
    small = [key for key in names.others if key in shapes and _is_small(container, key)]
    loose = [key for key in names.others if key in shapes and not _is_small(container, key)]
    keys |= {key: TensorKey(key, "weight") for key in loose}
    found.entries, found.extents = container.entries(keys)
    _add_values(found, container, names)
    _add_groups(found, container, names)
    _add_others(found, container, names, small, loose)
    _add_roles(found, names)
    _add_items(found, container, names)
    found.step = _step(found)
    _add_ties(found)
    return found


def _refuse_flat(container: Container) -> None:
    """Refuse FSDP1's ``LOCAL_STATE_DICT``, which lost the shapes, order and padding."""
    flat = [key for key in container.tensors if key.rpartition(".")[2] in _FLAT]
    if flat:
        raise UnsupportedVersionError(
            f"{container.where}: {flat[0]} is a flat parameter of FSDP1, saved with "
            "LOCAL_STATE_DICT: nothing shows which parameter each of its elements belongs to; "
            "save with StateDictType.SHARDED_STATE_DICT",
            key=flat[0],
            path=container.where,
        )


def _is_small(container: Container, key: str) -> bool:
    item = container.tensors[key]
    if item.dtype not in NUMBER_DTYPES or len(item.chunks) != 1:
        return False
    return not item.shape or (item.dtype == "U8" and prod(item.shape) <= _SMALL_BYTES)


def _number(container: Container, key: str, *, exact: bool = False) -> Any:
    """Return a small tensor as a number, or with the base64 of its bytes."""
    name = TensorKey(key, "weight")
    entry = container.entries({key: name})[0][name]
    (fragment,) = entry.fragments
    strides = packed_strides(entry.shape, 1)
    ref = TensorRef(entry.dtype, entry.shape, strides, fragment.file, fragment.offset_bytes, None)
    return container.as_json(ref, key, exact=exact)


def _name_numbers(container: Container, names: KeyNames) -> None:
    """Name the parameters that the optimizer's state knows only by number."""
    fqns = {fqn for fqn, _ in names.states.values()}
    is_numbered = all(fqn.isdecimal() for fqn in fqns)
    if not is_numbered or fqns <= set(names.weights.values()):
        return
    shapes: dict[int, tuple[int, ...]] = {}
    for key, (fqn, _) in names.states.items():
        shape = container.tensors[key].shape if key in container.tensors else ()
        if prod(shape) > prod(shapes.get(int(fqn), ())) or (shape and int(fqn) not in shapes):
            shapes[int(fqn)] = shape
    groups = _numbers_by_group(container, names) or [sorted(map(int, fqns))]
    wanted = [[shapes.get(number) for number in group] for group in groups]
    try:
        found = assign(wanted, list(_in_model_order(container, names).items()), container.where)
    except UcpError as error:
        raise _numbered(container, error.facts.get("why", str(error))) from error
    pairs = (zip(group, fqns, strict=True) for group, fqns in zip(groups, found, strict=True))
    named = {number: fqn for pair in pairs for number, fqn in pair}
    names.states = {key: (named[int(fqn)], slot) for key, (fqn, slot) in names.states.items()}
    names.numbers = named


def _numbered(container: Container, why: str) -> CheckpointCorruptError:
    return corrupt(
        container.where,
        f"the optimizer's state is saved by number and not by name, and {why}: save it with "
        "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict",
    )


def _numbers_by_group(container: Container, names: KeyNames) -> list[list[int]]:
    """Return the numbers of each group's parameters; empty if the groups lack them."""
    keys = {
        key: group
        for key, (_, group, name) in names.groups.items()
        if name == "params" and isinstance(group, int) and key in container.blobs
    }
    values = sorted((keys[key], value) for key, value in container.values(keys))
    known = {int(fqn) for fqn, _ in names.states.values()}
    numbers = [number for _, value in values if isinstance(value, list) for number in value]
    if any(type(number) is not int for number in numbers) or not known <= set(numbers):
        return []
    return [value for _, value in values]


def _in_model_order(container: Container, names: KeyNames) -> dict[str, tuple[int, ...]]:
    """Return the shapes of trainable tensors by fqn, in the model's order.

    Ranks share the work of writing, so the files do not have the model's order. The nested state
    does.
    """
    told = [key for key in container.paths if key in names.weights]
    rest = [key for key in names.weights if key not in container.paths]
    if rest and len({c.blob.file for key in rest for c in container.tensors[key].chunks}) > 1:
        raise _numbered(
            container, f"nothing shows in which order the model has {rest[0]} and others"
        )
    shapes = {names.weights[key]: container.tensors[key].shape for key in (*told, *rest)}
    return {fqn: shape for fqn, shape in shapes.items() if not _is_statistic(fqn, shapes)}


def _is_statistic(fqn: str, known: Collection[str]) -> bool:
    """Return whether this is one of the three buffers of torch's batch normalisation."""
    layer, _, name = fqn.rpartition(".")
    prefix = f"{layer}." if layer else ""
    return name in _STATISTICS and all(f"{prefix}{other}" in known for other in _STATISTICS)


def _add_values(found: Assembly, container: Container, names: KeyNames) -> None:
    """Add the optimizer's values that are not tensors."""
    others: dict[str, dict[str, Any]] = defaultdict(dict)
    for key, value in container.values(key for key in names.states if key in container.blobs):
        fqn, slot = names.states[key]
        if isinstance(value, int | float) and not isinstance(value, bool):
            found.put_number(TensorKey(fqn, slot), value)
        else:
            others[fqn][slot] = container.as_json(value, key)
    if others:
        found.extra["optimizer_state"] = dict(others)


def _add_groups(found: Assembly, container: Container, names: KeyNames) -> None:
    """Assemble the optimizer's groups, which have a key for each hyper-parameter."""
    groups: dict[tuple[str, int | str], dict[str, Any]] = defaultdict(dict)
    values = dict(container.values(key for key in names.groups if key in container.blobs))
    for key, (root, group, name) in names.groups.items():
        value = container.as_json(values[key], key) if key in values else _number(container, key)
        groups[root, group][name] = value
    merged: dict[str, dict[str, Any]] = {}
    for (root, group), fields in groups.items():
        if isinstance(group, int):
            params = [names.numbers.get(p, p) for p in fields.get("params", ())]
            found.groups.append({**fields, "params": [str(p) for p in params]})
            continue
        # Flattened: each parameter of a group repeats the same values.
        identity = json.dumps([root, fields], sort_keys=True)
        merged.setdefault(identity, {**fields, "params": []})["params"].append(group)
    found.groups += merged.values()


def _add_others(
    found: Assembly,
    container: Container,
    names: KeyNames,
    small: Iterable[str],
    loose: Iterable[str],
) -> None:
    """Keep everything besides model and optimizer: schedule, cursor, random state, counters."""
    for key in small:
        _put(found, container, key, _number(container, key, exact=True))
    for key in loose:
        if len(container.paths.get(key, ())) > 1:
            # Its place among the small values, such as a list of both.
            _put(found, container, key, {"tensor": key})
        found.roles[key] = "extra"
        found.items[key] = Item("reshard", "outside the model: kept under its own key")
    for key in names.others:
        blobs = container.blobs.get(key)
        if blobs is None:
            continue
        try:
            values = [
                container.as_json(container.value(blob, key), key, exact=True) for blob in blobs
            ]
        except ForeignClassError as error:
            found.items[key] = Item("drop", f"its value has an unknown class: {error}")
            continue
        same = all(value == values[0] for value in values)
        _put(found, container, key, values[0] if same else {"by_rank": values})
    found.extra = {str(name): _with_lists(value) for name, value in found.extra.items()}


def _put(found: Assembly, container: Container, key: str, value: Any) -> None:
    """Put a value into ``extra`` at its place in the nested state."""
    path = list(container.paths.get(key, (key,)))
    target: Any = found.extra
    for part in path[:-1]:
        target = target.setdefault(part, {}) if isinstance(target, dict) else None
    if not isinstance(target, dict) or path[-1] in target:
        target, path = found.extra, [key]
    target[path[-1]] = value
    if _RANDOM.fullmatch(key):
        note = "kept in extra; on another number of ranks, each rank must derive its own"
        found.items[key] = Item("reseed", note)
    else:
        found.items[key] = Item("replicate", "kept in extra")


def _with_lists(value: Any) -> Any:
    """Return a nested value, with dicts that DCP made of lists as lists again."""
    if not isinstance(value, dict):
        return value
    inner = {key: _with_lists(item) for key, item in value.items()}
    if inner and all(type(key) is int for key in inner) and max(inner) + 1 == len(inner):
        return [inner[number] for number in range(len(inner))]
    return {str(key): item for key, item in inner.items()}


def _add_roles(found: Assembly, names: KeyNames) -> None:
    """Set the roles of the tensors that the optimizer does not train."""
    trained = {fqn for fqn, _ in names.states.values()}
    trained |= {fqn for group in found.groups for fqn in group["params"]}
    if not trained:
        return
    for fqn in names.weights.values():
        if fqn not in trained:
            is_buffer = fqn.endswith(_BUFFERS)
            dtype = found.entries[TensorKey(fqn, "weight")].dtype
            found.roles[fqn] = "buffer" if is_buffer or dtype in _INTEGERS else "frozen"


def _add_items(found: Assembly, container: Container, names: KeyNames) -> None:
    if names.weights:
        found.items["model"] = Item("reshard", f"{len(names.weights)} tensors")
    if names.states:
        found.items["optimizer.state"] = Item("reshard", f"{len(names.states)} tensors and values")
    if names.groups:
        note = f"{len(found.groups)} groups"
        found.items["optimizer.param_groups"] = Item("replicate", note)
    found.items |= container.leftovers()
    found.layout = {
        "files": len({f.file for e in found.entries.values() for f in e.fragments}),
        "chunks": sum(len(entry.fragments) for entry in found.entries.values()),
        "metadata_files": len(container.metadata_names),
    }


def _step(found: Assembly) -> int:
    """Return the step of the save: the program's own counter, or the optimizer's."""
    places = [found.extra, *(v for v in found.extra.values() if isinstance(v, dict))]
    for name in _STEPS:
        for place in places:
            value = place.get(name)
            if isinstance(value, dict):
                value = value.get("value")
            if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
                return value
    return found.counted_step()


def _add_ties(found: Assembly) -> None:
    """Find tensors that are a second name of another tensor, and record them as ties.

    DCP saves tied parameters once under each name, and their optimizer state under one. Torch's own
    checksums of every chunk prove a tie. Tensors of fewer than two dims, and tensors that begin
    with zeros, prove nothing. Two frozen tensors can be equal without being tied, so they are tied
    only if their keys lead to the same bytes.
    """
    frozen = [fqn for fqn, role in found.roles.items() if role == "frozen"]
    if not frozen:
        return
    crcs = {
        (file, extent.offset_bytes, extent.num_bytes): extent.crc32
        for file, extents in found.extents.items()
        for extent in extents
    }
    owners: dict[Any, str] = {}
    for key, entry in found.entries.items():
        if key.slot == "weight" and key.fqn not in found.roles:
            identity = _identity(entry, crcs)
            if identity is not None:
                owners.setdefault(identity, key.fqn)
    places: dict[Any, str] = {}
    for fqn in frozen:
        entry = found.entries[TensorKey(fqn, "weight")]
        owner = owners.get(_identity(entry, crcs))
        if owner is None and entry.num_bytes:
            place = entry.shape, tuple((f.file, f.offset_bytes) for f in entry.fragments)
            owner = places.setdefault(place, fqn)
        if owner is not None and owner != fqn:
            found.ties[fqn] = owner
    for alias in found.ties:
        del found.entries[TensorKey(alias, "weight")], found.roles[alias]


def _identity(entry: TensorEntry, crcs: Mapping[tuple[str, int, int], int]) -> Any:
    """Return a value that is equal for tensors of the same bytes.

    None if nothing proves equality.
    """
    if len(entry.shape) < 2:  # noqa: PLR2004
        return None
    found = [crcs.get((f.file, f.offset_bytes, f.num_bytes)) for f in entry.fragments]
    zeros = [crc32(bytes(f.num_bytes)) for f in entry.fragments[:1]]
    if None in found or found[:1] == zeros:
        return None
    return entry.dtype, entry.shape, tuple(f.box for f in entry.fragments), tuple(found)


def read(
    store: Store, directory: str, *, rules: Rules | None = None, tag: str | None = None
) -> Checkpoint:
    """Open a checkpoint of torch DCP; only metadata and small items are read.

    See ``open_source`` for arguments and errors. ``rules`` are ignored: the metadata say which box
    every file holds. ``tag`` is a folder in ``directory``, if that holds several checkpoints.
    """
    del rules
    where = directory if tag is None else join(directory, tag)
    names = store.list(where)
    parts = [""] if metadata_names(names) else parts_of(store, where, names)
    container = (
        read_container(store, where, parts) if parts else sharded_container(store, where, names)
    )
    if container is None:
        raise CheckpointNotFoundError(
            f"{where} has no .metadata: it is not a checkpoint of torch DCP, or its save was "
            "not finished",
            path=where,
        )
    if not container.tensors:
        raise UnsupportedVersionError(
            f"{container.where} names no tensor: none was saved, or whole states were saved as one "
            "pickle each; save with flatten_state_dict=True, the default of DefaultSavePlanner",
            path=container.where,
        )
    return state_of(container).checkpoint({"format": NAME, "version": container.version})
