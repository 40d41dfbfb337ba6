"""Reads the folder that DeepSpeed's ``ds_to_universal`` makes: a folder of files per parameter.

``zero/NAME/fp32.pt`` and one file per slot hold ``{param: tensor, ...}``. Made from stage 3 without
tensor parallelism, they hold a flat tensor, whose shape is in the model files beside them. Frozen
parameters and buffers are taken from the model files, because the converter upcasts them and, under
tensor parallelism, drops parts of them.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ucp_core.errors import UnsupportedVersionError
from ucp_core.formats.deepspeed import reading
from ucp_core.formats.deepspeed.recognition import ZERO, Folder, sort_names
from ucp_core.formats.refusals import corrupt, missing
from ucp_core.formats.shared import Files, Shards, in_parallel, whole_tensor
from ucp_core.geometry import TensorKey
from ucp_core.manifest import Item
from ucp_core.native import Checkpoint
from ucp_core.storage import Store, join
from ucp_core.torch_files import TensorRef

_OPTIMIZER = "optimizer_state.pt"
_SUFFIX = ".pt"
_MASTER = "fp32"
_STEP = "step"
_STEP_IN_TAG = re.compile(r"\D*(\d+)(?:_universal)?")


@dataclass(slots=True)
class _Folder(reading.Modules):
    """The content of a universal folder that was read so far."""

    #: Names of the files of each parameter, without the suffix.
    slots: dict[str, frozenset[str]] = field(default_factory=dict)
    #: Content of these files, by name in the folder.
    trees: dict[str, Any] = field(default_factory=dict)
    native: reading.Native | None = None  #: The model files beside the folder, if any.
    #: Shapes of trained parameters as their ranks had them, by group, all stages together.
    grouped: list[dict[str, tuple[int, ...]]] = field(default_factory=list)

    def trained_names(self) -> list[str]:
        """Return the names with optimizer state."""
        return sorted({key.fqn for key in self.entries if key.slot not in (reading.WEIGHT, _STEP)})


def read_universal(
    store: Store,
    folder: Folder,
    layouts_of: Callable[[reading.Native, reading.Modules], reading.TensorParallelLayouts],
) -> Checkpoint:
    """Open a universal folder; ``layouts_of`` are for tensors that only the model files have."""
    found = _Folder(store, folder.directory)
    _open(found)
    native, layouts = found.native, None
    if native is not None:
        for file in (native.model[0, mp] for mp in range(native.tp * native.pp)):
            for index, shapes in enumerate(
                reading.param_shapes(native.files.trees[file], file) or ()
            ):
                found.grouped += [{}] * (index == len(found.grouped))
                found.grouped[index] = found.grouped[index] | shapes
        found.shards = Shards(native.tp)
        found.trained = {name for shapes in found.grouped for name in shapes}
        reading.add_model_values(found, native)
        reading.add_modules(native, found, complete=bool(native.layers))
        layouts = layouts_of(native, found)
        found.entries |= found.shards.entries(layouts.pattern)
        found.extents |= native.files.extents
    _add_params(found, layouts)
    held = found.trees.get(f"{ZERO}/{_OPTIMIZER}")
    tree: Mapping[str, Any] = held if isinstance(held, dict) else {}
    if held is not None:
        _add_groups(found, held)
    _add_buffers(found)
    first: Mapping[str, Any] = {} if native is None else native.first
    step, match = first.get("global_steps"), _STEP_IN_TAG.fullmatch(folder.tag)
    if not isinstance(step, int) or step < 0:
        step = found.counted_step() or (int(match[1]) if match else 0)
    found.step = step
    found.layout = {"dp": 1, "tp": 1, "pp": 1}
    version = str(first.get("ds_version") or tree.get("ds_version") or "")
    return found.checkpoint(
        {"format": "deepspeed-universal", "version": version, "tag": folder.tag}
    )


def _open(found: _Folder) -> None:
    store, directory = found.store, found.directory
    zero = join(directory, ZERO)
    names = [name for name in store.list(zero) if name != _OPTIMIZER]
    listed = in_parallel(lambda name: store.list(join(zero, name)), names)
    found.slots = {
        name: frozenset(file.removesuffix(_SUFFIX) for file in inside if file.endswith(_SUFFIX))
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
    for name in beside["other"].values():
        found.items[name] = Item("drop", "not a part of a universal checkpoint")
    if beside["model"]:
        # A folder for the loaders of every stage has both kinds of files; this kind has the
        # tensors.
        beside["model_zero3"].clear()
    if beside["model"] or beside["model_zero3"]:
        found.native = reading.open_native(store, directory, beside, with_optim=False)
    if not found.slots:
        raise corrupt(zero, "it holds no folder of a parameter")
    if found.native is None and f"{ZERO}/{_OPTIMIZER}" not in found.trees:
        raise corrupt(
            directory,
            f"neither {ZERO}/{_OPTIMIZER} nor model files, which ds_to_universal writes last: it "
            "was interrupted, and parameters may be missing; use the checkpoint that it was made "
            "from",
        )


def _add_params(found: _Folder, layouts: reading.TensorParallelLayouts | None) -> None:
    """Add the tensors of the parameters' folders."""
    shapes = {name: shape for group in found.grouped for name, shape in group.items()}
    if lacking := sorted(shapes.keys() - found.slots.keys()):
        raise missing(join(found.directory, ZERO), [f"the folder of {name}" for name in lacking])
    known = found.shards.fqns() | set(found.ties)
    # Groups of the optimizer may have different slots.
    kinds = {slots - {_MASTER} for name, slots in found.slots.items() if name not in known}
    for name, slots in found.slots.items():
        item = f"{ZERO}/{name}"
        if name in known and name not in shapes:
            found.items[item] = Item("drop", "the model files have it as it was")
            continue
        mine = slots - {_MASTER, _STEP}
        more = (kind - slots for kind in kinds if mine and mine <= kind)
        if lost := sorted(next(filter(None, [{_MASTER} - slots, *more]), ())):
            path = join(found.directory, item, f"{lost[0]}{_SUFFIX}")
            raise corrupt(path, "the file is missing: other parameters have it")
        if not mine and any(kind - {_STEP} for kind in kinds):
            found.items[item] = Item("reshard", "the folder has no optimizer state for it")
            if found.native is None:
                found.roles[name] = "frozen"
        for slot in (_MASTER, *sorted(slots - {_MASTER})):
            _add_slot(found, name, slot, shapes.get(name))
        if layouts is not None and layouts.is_joined_wrongly(name):
            raise UnsupportedVersionError(
                f"{join(found.directory, item)}: DeepSpeed's converter joined the q, k and v of "
                "several ranks in a wrong order; read the checkpoint that it was made from"
            )


def _add_slot(found: _Folder, name: str, slot: str, local: tuple[int, ...] | None) -> None:
    file = f"{ZERO}/{name}/{slot}{_SUFFIX}"
    tree = found.trees[file]
    value: Any = tree.get("param") if isinstance(tree, dict) else tree
    key = TensorKey(name, reading.WEIGHT if slot == _MASTER else slot)
    if slot == _STEP and (not isinstance(value, TensorRef) or value.num_elements == 1):
        found.scalars.add(key, value)
        return
    if slot == _STEP or not isinstance(value, TensorRef):
        raise corrupt(join(found.directory, file), f"it does not hold a {slot} in one tensor")
    shape = _shape(found, file, value, tree, local)
    weight = found.entries.get(TensorKey(name, reading.WEIGHT)) if slot != _MASTER else None
    if shape is None or (weight is not None and weight.shape != shape):
        other = local if weight is None else weight.shape
        raise corrupt(
            join(found.directory, file),
            f"it holds a tensor of {list(value.shape)}, but the parameter is {list(other or ())} "
            f"by the model files or by {_MASTER}{_SUFFIX}",
        )
    found.entries[key] = whole_tensor(key, value, shape)


def _shape(
    found: _Folder, file: str, ref: TensorRef, tree: Any, local: tuple[int, ...] | None
) -> tuple[int, ...] | None:
    """Return the shape of a whole tensor; for a flat tensor, the shape in the model files.

    Under tensor parallelism the model files have the shapes of shards, so only the number of dims
    is compared. None means that the model files contradict it.
    """
    native = found.native
    if local is None or native is None:
        if not isinstance(tree, dict) and len(ref.shape) == 1:
            found.items[file] = Item(
                "reshard", "flat: nothing in the folder gives its shape; copy the model files"
            )
        return ref.shape
    if len(ref.shape) == 1 and native.tp == 1 and ref.num_elements == prod(local):
        return local
    is_cut = native.tp > 1 or (isinstance(tree, dict) and bool(tree.get("vocab_tensor")))
    fits = ref.shape == local or (is_cut and len(ref.shape) == len(local))
    return ref.shape if fits else None


def _add_groups(found: _Folder, tree: Mapping[str, Any]) -> None:
    """Add the optimizer's groups, and its step if only the optimizer's file has it."""
    file = f"{ZERO}/{_OPTIMIZER}"
    inner = tree.get("optimizer_state_dict")
    is_zero3 = isinstance(inner, dict)
    inner = inner if isinstance(inner, dict) else {}
    bulk = {"param_groups", "optimizer_state_dict", "fp32_flat_groups", "state"}
    reading.add_optimizer_values(found, {k: v for k, v in tree.items() if k not in bulk}, file)
    if is_zero3:
        found.items[f"{file}: state"] = Item(
            "drop", "the first rank's part, which the parameters' folders also hold"
        )
        # Stage 3 saves the step of all parameters only once.
        states: Mapping[Any, Any] = inner.get("state") or {0: {}}
        value = next(iter(states.values())).get(_STEP)
        for fqn in found.trained_names() if value is not None else ():
            found.scalars.add(TensorKey(fqn, _STEP), value)
    groups = tree.get("param_groups") or inner.get("param_groups") or []
    names = _names_by_group(found, groups, tree if is_zero3 else None)
    found.add_groups(groups, names, file)


def _names_by_group(
    found: _Folder, groups: Sequence[Mapping[str, Any]], zero3: Mapping[str, Any] | None
) -> list[list[str]]:
    """Return the parameters of every group; stage 3 names them by sub-group."""
    shapes = found.grouped
    if len(shapes) == len(groups):
        return [list(group) for group in shapes]
    if len(groups) == 1:
        return [[name for group in shapes for name in group] or found.trained_names()]
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


def _add_buffers(found: _Folder) -> None:
    """Mark the tensors that are buffers, and note the buffers that are lost."""
    buffers = frozenset() if found.native is None else reading.buffer_names(found.native)
    known = {key.fqn for key in found.entries}
    found.roles |= dict.fromkeys(buffers & known, "buffer")
    lost = sorted(buffers - known - set(found.ties))
    if lost:
        found.items["buffers"] = Item(
            "drop",
            f"{', '.join(lost[:3])} and others that only layer files hold: DeepSpeed's "
            "converter drops them; convert the native checkpoint",
        )
