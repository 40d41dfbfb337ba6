"""Reads the folder that DeepSpeed's ``ds_to_universal`` makes: a folder of files per parameter.

``zero/NAME/fp32.pt`` and one file per slot hold ``{param: tensor, ...}``. Made from stage 3 without
tensor parallelism, they hold a flat tensor, whose shape is in the model files beside them. Frozen
parameters and buffers are taken from the model files, because the converter upcasts them and, under
tensor parallelism, drops parts of them.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from ucp_core.errors import CheckpointCorruptError
from ucp_core.formats.deepspeed.reading import (
    Modules,
    Native,
    add_model_values,
    add_modules,
    add_optimizer_values,
    buffer_names,
    open_native,
    param_shapes,
)
from ucp_core.formats.deepspeed.recognition import ZERO, Folder, sort_names
from ucp_core.formats.shared import (
    THREADS_MAX,
    Files,
    Shards,
    number,
    reading_pool,
    whole_tensor,
)
from ucp_core.geometry import TensorEntry, TensorKey
from ucp_core.language import extract, place, plain, union
from ucp_core.manifest import Item
from ucp_core.storage import join
from ucp_core.torch_files import TensorRef

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ucp_core.formats.deepspeed.reading import TensorParallelLayouts
    from ucp_core.native import Checkpoint
    from ucp_core.storage import Store

_OPTIMIZER = "optimizer_state.pt"
_SUFFIX = ".pt"
_MASTER = "fp32"
_STEP = "step"
_STEP_IN_TAG = re.compile(r"\D*(\d+)(?:_universal)?")


@dataclass(slots=True)
class _Folder(Modules):
    """The content of a universal folder that was read so far."""

    #: Names of the files of each parameter, without the suffix.
    slots: dict[str, tuple[str, ...]] = field(default_factory=dict)
    trees: dict[str, Any] = field(
        default_factory=dict
    )  #: Content of these files, by name in the folder.
    native: Native | None = None  #: The model files beside the folder, if any.

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of trained parameters as their ranks had them."""
        return {name: shape for group in self.shapes_by_group() for name, shape in group.items()}

    def shapes_by_group(self) -> list[dict[str, tuple[int, ...]]]:
        """Return the shapes by group, all stages together."""
        found: list[dict[str, tuple[int, ...]]] = []
        native = self.native
        if native is None:
            return found
        for mp in range(native.tp * native.pp):
            name = native.model[0, mp]
            for index, shapes in enumerate(param_shapes(native.files.trees[name], name) or ()):
                if index == len(found):
                    found.append({})
                found[index] |= shapes
        return found


def read_universal(
    store: Store, folder: Folder, layouts_of: Callable[[Native, Modules], TensorParallelLayouts]
) -> Checkpoint:
    """Open a universal folder.

    Args:
        layouts_of: Makes the layouts of tensors that are only in the model files.
    """
    found = _Folder(store, folder.directory)
    _open(found)
    native, layouts = found.native, None
    if native is not None:
        found.shards, found.trained = Shards(native.tp), set(found.shapes())
        add_model_values(found, native)
        add_modules(native, found, complete=bool(native.layers))
        layouts = layouts_of(native, found)
        found.put_shards(layouts)
        found.extents |= native.files.extents
    _add_params(found, layouts)
    _add_groups(found)
    _add_buffers(found)
    found.step = _step(found, folder)
    found.layout = {"dp": 1, "tp": 1, "pp": 1}
    source = {"format": "deepspeed-universal", "version": _version(found), "tag": folder.tag}
    return found.checkpoint(source)


def _open(found: _Folder) -> None:
    store, directory = found.store, found.directory
    zero = join(directory, ZERO)
    names = [name for name in store.list(zero) if name != _OPTIMIZER]
    with reading_pool(len(names)) as pool:
        listed = list(pool.map(lambda name: store.list(join(zero, name)), names))
    found.slots = {
        name: tuple(file.removesuffix(_SUFFIX) for file in inside if file.endswith(_SUFFIX))
        for name, inside in zip(names, listed, strict=True)
        if inside
    }
    wanted = [f"{ZERO}/{name}/{s}{_SUFFIX}" for name in found.slots for s in found.slots[name]]
    if store.exists(join(zero, _OPTIMIZER)):
        wanted.append(f"{ZERO}/{_OPTIMIZER}")
    files = Files(store, directory)
    files.open(wanted, kinds=(object,))
    found.trees, found.extents = files.trees, files.extents
    beside = sort_names(name for name in store.list(directory) if name != ZERO)
    for name in beside.others:
        found.items[name] = Item("drop", "not a part of a universal checkpoint")
    if beside.model:
        # A folder for the loaders of every stage has both kinds of files; this kind has the
        # tensors.
        beside.model_zero3.clear()
    if beside.model or beside.model_zero3:
        found.native = open_native(store, directory, beside, with_optim=False)
    if not found.slots:
        raise CheckpointCorruptError(f"{zero} holds no folder of a parameter", path=zero)
    if found.native is None and f"{ZERO}/{_OPTIMIZER}" not in found.trees:
        raise CheckpointCorruptError(
            f"{directory} has neither {ZERO}/{_OPTIMIZER} nor model files, which "
            "ds_to_universal writes last: it was interrupted, and parameters may be missing; "
            "use the checkpoint that it was made from",
            path=directory,
            missing=(f"{ZERO}/{_OPTIMIZER}",),
        )


def _add_params(found: _Folder, layouts: TensorParallelLayouts | None) -> None:
    """Add the tensors of the parameters' folders."""
    shapes = found.shapes()
    missing = sorted(set(shapes) - set(found.slots))
    if missing:
        raise CheckpointCorruptError(
            f"{join(found.directory, ZERO)} lacks the folder of {missing[0]} and "
            f"{len(missing) - 1} more: the conversion was interrupted, or the copy is incomplete",
            path=join(found.directory, ZERO),
            missing=tuple(missing),
        )
    known = found.shards.fqns() | set(found.ties)
    kinds = {_slots(s) for n, s in found.slots.items() if n not in known}
    stepped = {_slots(s) for s in found.slots.values() if _STEP in s and _slots(s)}
    for name, slots in found.slots.items():
        item = f"{ZERO}/{name}"
        if name in known and name not in shapes:
            found.items[item] = Item("drop", "the model files have it as it was")
            continue
        mine = _slots(slots)
        more = next((kind for kind in kinds if mine < kind), None)
        if _MASTER not in slots or (mine and more is not None):
            raise CheckpointCorruptError(
                f"{join(found.directory, item)} holds {', '.join(slots)}, other parameters "
                f"{', '.join(sorted({_MASTER, *(more or mine)}))}: a file is missing",
                path=join(found.directory, item),
                fqn=name,
            )
        if mine in stepped and _STEP not in slots:
            path = join(found.directory, item, f"{_STEP}{_SUFFIX}")
            raise CheckpointCorruptError(
                f"{path} is missing: other parameters with {', '.join(sorted(mine))} have it",
                path=path,
                fqn=name,
            )
        if not mine and more is not None:
            found.items[item] = Item("reshard", "the folder has no optimizer state for it")
            if found.native is None:
                found.roles[name] = "frozen"
        for slot in slots:
            _add_slot(found, name, slot, shapes.get(name))
        _check_alike(found, name)
        if layouts is not None:
            _put_parts_together(found, name, layouts)


def _check_alike(found: _Folder, name: str) -> None:
    """Raise an error if a slot has another shape than the weight."""
    shape = found.entries[TensorKey(name, "weight")].shape
    for slot in _slots(found.slots[name]):
        other = found.entries.get(TensorKey(name, slot))
        if other is not None and other.shape != shape:
            path = join(found.directory, ZERO, name)
            raise CheckpointCorruptError(
                f"{path}: {_MASTER}{_SUFFIX} holds a tensor of {list(shape)}, {slot}{_SUFFIX} one "
                f"of {list(other.shape)}: a file of another parameter was copied over one of them",
                path=path,
                fqn=name,
                slot=slot,
            )


def _slots(files: tuple[str, ...]) -> frozenset[str]:
    """Return the optimizer's slots among a parameter's files; groups may have different ones."""
    return frozenset(files) - {_MASTER, _STEP}


def _add_slot(found: _Folder, name: str, slot: str, local: tuple[int, ...] | None) -> None:
    file = f"{ZERO}/{name}/{slot}{_SUFFIX}"
    tree = found.trees[file]
    value = tree.get("param") if isinstance(tree, dict) else tree
    key = TensorKey(name, "weight" if slot == _MASTER else slot)
    if slot == _STEP and isinstance(value, int | float):
        found.scalars.add(key, value)
        return
    if not isinstance(value, TensorRef):
        raise CheckpointCorruptError(
            f"{join(found.directory, file)} holds a {type(value).__name__}, not a tensor",
            path=join(found.directory, file),
            fqn=name,
        )
    if slot == _STEP:
        if value.num_elements != 1:
            raise CheckpointCorruptError(
                f"{join(found.directory, file)} holds {list(value.shape)} numbers, not a step: "
                "another file was copied over it; use another checkpoint",
                path=join(found.directory, file),
                fqn=name,
            )
        found.scalars.add(key, value._replace(shape=(), strides=()))
        return
    shape = _shape(found, file, value, tree, local)
    found.entries[key] = whole_tensor(key, value, shape)


def _put_parts_together(found: _Folder, name: str, layouts: TensorParallelLayouts) -> None:
    """Correct a fused projection whose shards the converter joined end to end."""
    for key in [TensorKey(name, slot) for slot in ("weight", *found.slots[name])]:
        entry = found.entries.get(key)
        told = layouts.concatenated(name, entry.shape) if entry is not None else None
        if entry is None or told is None or entry.fragments[0].strides is not None:
            continue
        pattern, count = told
        shard = (entry.shape[0] // count, *entry.shape[1:])
        placement = place(pattern, [shard] * count, name=str(key))
        whole = entry.fragments[0]
        step_bytes = whole.num_bytes // count
        fragments = [
            fragment
            for rank in range(count)
            for fragment in extract(
                key,
                entry.dtype,
                placement,
                rank,
                file=whole.file,
                offset_bytes=whole.offset_bytes + rank * step_bytes,
            )
        ]
        found.entries[key] = union(key, entry.dtype, placement, fragments)
        found.shards.patterns[key] = plain(pattern)
        found.items[f"cut of {name}"] = Item("reshard", layouts.chosen[name])


def _shape(
    found: _Folder, file: str, ref: TensorRef, tree: Any, local: tuple[int, ...] | None
) -> tuple[int, ...]:
    """Return the shape of a whole tensor; for a flat tensor, the shape in the model files.

    Under tensor parallelism the model files have the shapes of shards, so only the number of dims
    is compared.
    """
    native = found.native
    if local is None or native is None:
        if not isinstance(tree, dict) and len(ref.shape) == 1:
            found.items[file] = Item(
                "reshard", "flat: nothing in the folder gives its shape; copy the model files"
            )
        return ref.shape
    if ref.shape == local:
        return local
    if len(ref.shape) == 1 and native.tp == 1 and ref.num_elements == prod(local):
        return local
    is_cut = native.tp > 1 or (isinstance(tree, dict) and bool(tree.get("vocab_tensor")))
    if is_cut and len(ref.shape) == len(local):
        return ref.shape
    raise CheckpointCorruptError(
        f"{join(found.directory, file)} holds a tensor of {list(ref.shape)}, the model files give "
        f"the parameter {list(local)}",
        path=join(found.directory, file),
    )


def _add_groups(found: _Folder) -> None:
    """Add the optimizer's groups, and its step if only the optimizer's file has it."""
    file = f"{ZERO}/{_OPTIMIZER}"
    if file not in found.trees:
        return
    tree = found.trees[file]
    if not isinstance(tree, dict):
        raise CheckpointCorruptError(f"{join(found.directory, file)} does not hold a dict")
    inner = tree.get("optimizer_state_dict")
    is_zero3 = isinstance(inner, dict)
    inner = inner if isinstance(inner, dict) else {}
    bulk = {"param_groups", "optimizer_state_dict", "fp32_flat_groups", "state"}
    add_optimizer_values(found, {k: v for k, v in tree.items() if k not in bulk}, file)
    if is_zero3:
        found.items[f"{file}: state"] = Item(
            "drop", "the first rank's part, which the parameters' folders also hold"
        )
        _add_step(found, inner)
    groups = tree.get("param_groups") or inner.get("param_groups") or []
    names = _names_by_group(found, groups, tree if is_zero3 else None)
    _check_steps(found, names)
    found.add_groups(groups, names, file)


def _check_steps(found: _Folder, names: list[list[str]]) -> None:
    """Raise an error if parameters of one group have different steps."""

    def step_of(name: str) -> float | None:
        entry = found.scalars.entries.get(TensorKey(name, _STEP))
        if entry is None:
            return None
        return _number(found, entry)

    for group in names:
        with ThreadPoolExecutor(THREADS_MAX) as pool:
            steps = dict(zip(group, pool.map(step_of, group), strict=True))
        known = [(name, step) for name, step in steps.items() if step is not None]
        for name, step in known:
            if step != known[0][1]:
                first = join(found.directory, f"{ZERO}/{known[0][0]}")
                raise CheckpointCorruptError(
                    f"{join(found.directory, f'{ZERO}/{name}')} is from step {step:g}, {first} "
                    f"from step {known[0][1]:g}: the folder mixes two saves; use another "
                    "checkpoint",
                    path=join(found.directory, f"{ZERO}/{name}"),
                    fqn=name,
                    steps=(step, known[0][1]),
                )


def _number(found: _Folder, entry: TensorEntry) -> float | None:
    """Return the value of a 0-d tensor."""
    fragment = entry.fragments[0]
    ref = TensorRef(entry.dtype, (), (), fragment.file, fragment.offset_bytes, None)
    return number(found.scalars.overlay(found.store), found.directory, ref)


def _add_step(found: _Folder, inner: Mapping[str, Any]) -> None:
    """Give every trained parameter the step, which stage 3 saves only once."""
    state = inner.get("state")
    first: Any = next(iter(state.values()), {}) if isinstance(state, dict) else {}
    value = first.get(_STEP) if isinstance(first, dict) else None
    if isinstance(value, TensorRef | int | float):
        if isinstance(value, TensorRef):
            value = value._replace(shape=(), strides=())
        stepped = {key.fqn for key in found.entries if key.slot not in ("weight", _STEP)}
        for fqn in sorted(stepped):
            found.scalars.add(TensorKey(fqn, _STEP), value)


def _names_by_group(
    found: _Folder, groups: list[Mapping[str, Any]], zero3: Mapping[str, Any] | None
) -> list[list[str]]:
    """Return the parameters of every group; stage 3 names them by sub-group."""
    shapes = found.shapes_by_group()
    if len(shapes) == len(groups):
        return [list(group) for group in shapes]
    trained = sorted({key.fqn for key in found.entries if key.slot not in ("weight", _STEP)})
    if len(groups) == 1:
        return [[name for group in shapes for name in group] or trained]
    if zero3 is None or found.native is None:
        note = "the folder does not say which parameters each of its groups has"
        found.items["param_groups"] = Item("drop", note)
        return [[] for _ in groups]
    group_of = {i: g for g, group in enumerate(groups) for i in group.get("params", ())}
    names: list[list[str]] = [[] for _ in groups]
    left = iter([item for group in shapes for item in group.items()])
    for index, flat in enumerate(zero3.get("fp32_flat_groups") or ()):
        room = flat.num_elements
        while room > 0 and (item := next(left, None)) is not None:
            names[group_of.get(index, 0)].append(item[0])
            room -= -(-prod(item[1]) // found.native.dp)
    return names


def _step(found: _Folder, folder: Folder) -> int:
    if found.native is not None:
        step = found.native.first.get("global_steps")
        if isinstance(step, int) and step >= 0:
            return step
    entry = next((e for e in found.scalars.entries.values() if e.key.slot == _STEP), None)
    if entry is not None:
        value = _number(found, entry)
        if value is not None:
            return int(value)
    match = _STEP_IN_TAG.fullmatch(folder.tag)
    return int(match[1]) if match else 0


def _add_buffers(found: _Folder) -> None:
    """Mark the tensors that are buffers, and note the buffers that are lost."""
    buffers = frozenset() if found.native is None else buffer_names(found.native)
    known = {key.fqn for key in found.entries}
    found.roles |= dict.fromkeys(buffers & known, "buffer")
    lost = sorted(buffers - known - set(found.ties))
    if lost:
        found.items["buffers"] = Item(
            "drop",
            f"{', '.join(lost[:3])} and others that only layer files hold: DeepSpeed's "
            "converter drops them; convert the native checkpoint",
        )


def _version(found: _Folder) -> str:
    held = found.trees.get(f"{ZERO}/{_OPTIMIZER}")
    tree = held if isinstance(held, dict) else {}
    first: Mapping[str, Any] = {} if found.native is None else found.native.first
    return str(first.get("ds_version") or tree.get("ds_version") or "")
