"""Reads the weights in the model's dtype: frozen parameters and buffers.

The reader skips trained parameters whose float32 masters are in ZeRO's files. Ties come from
``shared_params``, which only the first rank fills, and from tensors that share their bytes in a
file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from ucp_core.errors import CheckpointCorruptError
from ucp_core.formats.deepspeed.keys import EXPERT
from ucp_core.formats.deepspeed.reading.topology import Native
from ucp_core.formats.shared import Assembly, Rank
from ucp_core.geometry import TensorKey
from ucp_core.manifest import Item
from ucp_core.torch_files import TensorRef, current_budget, extents_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

WEIGHT = "weight"
_LAYER_OF = re.compile(r"(\d+)\.")
_TIED = "tied_modules."
#: Approximate memory of a note about one key.
_ITEM_BYTES = 512
_EXTRA_STATE = "_extra_state"
_ZERO3 = 3


@dataclass(slots=True)
class LayerFiles:
    """The content of the files of layers."""

    #: The parameters of each model-parallel rank's optimizer, in the optimizer's order.
    params: dict[int, list[tuple[str, TensorRef]]] = field(default_factory=dict)
    #: Names of tensors that do not follow from their layer, by layer and name in the file.
    names: dict[tuple[int, str], str] = field(default_factory=dict)

    def fqn(self, layer: int, local: str) -> str:
        """Return the name in the model of a tensor in a layer's file."""
        return self.names.get((layer, local), f"{layer}.{local}")


@dataclass(slots=True)
class Modules(Assembly):
    """The content of a checkpoint, including its model files."""

    #: Names that have masters; their copies in the model files are skipped.
    trained: set[str] = field(default_factory=set)
    #: Whether there are any masters. Without them everything but buffers counts as trained.
    masters: bool = True
    #: Every tensor by name and tensor-parallel rank, to prove replication.
    refs: dict[str, dict[int, TensorRef]] = field(default_factory=dict)
    #: Names of the first rank's parameters, in the model's order.
    order: dict[int, list[tuple[str, TensorRef]]] = field(default_factory=dict)
    #: Dtypes of the copies of trained parameters in the model files.
    dtypes: set[str] = field(default_factory=set)
    pipeline: LayerFiles | None = None  #: The parameters of each stage, if there are no masters.

    def same_bytes(self, name: str) -> bool:
        """Return whether all tensor-parallel ranks saved a tensor with the same checksum."""
        refs = self.refs.get(name, {})
        if len(refs) != self.shards.tp_degree:
            return False
        extents = [ref.extent for ref in refs.values()]
        if any(extent is None for extent in extents):
            return False
        whole = all(
            ref.extent is not None and ref.extent.num_bytes == ref.num_bytes
            for ref in refs.values()
        )
        return whole and len({(e.num_bytes, e.crc32) for e in extents if e is not None}) == 1


def add_modules(native: Native, modules: Modules, *, complete: bool = True) -> None:
    """Add all weights of the model files, of pipeline layers and of experts.

    Args:
        complete: Whether files of pipeline layers and experts must exist.

    Raises:
        CheckpointCorruptError: The files contradict one another, or one is missing.
    """
    for (dp, mp), file in native.model.items():
        tree = native.files.trees[file]
        module = tree.get("module")
        if dp == 0 and isinstance(module, dict):
            # Stage 3 has an empty tensor in place of every parameter.
            stand_ins = modules.trained | set(tree.get("frozen_param_shapes") or ())
            stand_ins = stand_ins if native.stage == _ZERO3 else set()
            _add_module(modules, native.rank(mp), tree, native.first, module, stand_ins)
            for name, ref in module.items():
                if isinstance(ref, TensorRef) and not (ref.shape == (0,) and name in stand_ins):
                    _check_shape(native, modules, file, name, ref, native.rank(mp))
        elif dp == 0 and module is not None:
            raise CheckpointCorruptError(
                f"{native.files.path(file)}: module is a {type(module).__name__}, not a dict",
                path=native.files.path(file),
            )
    _add_frozen_fragments(native, modules)
    if complete:
        _add_layers(native, modules)
        _add_experts(native, modules)
    _add_empty_shards(modules)
    if modules.dtypes and modules.masters:
        dtypes = ", ".join(sorted(modules.dtypes))
        modules.items["module"] = Item(
            "drop", f"trained parameters: kept as masters instead of copies in {dtypes}"
        )


def _add_empty_shards(modules: Modules) -> None:
    """Add trained shards without elements, which ZeRO's files omit.

    With AutoTP a rank can have no part of a dim that is shorter than the number of ranks.
    """
    for name in modules.trained & set(modules.refs):
        for tp, ref in modules.refs[name].items():
            if not ref.num_elements and any(
                other.num_elements for other in modules.refs[name].values()
            ):
                modules.shards.add_empty(name, tp, ref.shape)


def buffer_names(native: Native) -> frozenset[str]:
    """Return the names of all buffers."""
    trees = (native.files.trees[file] for file in native.model.values())
    return frozenset(str(name) for tree in trees for name in tree.get("buffer_names") or ())


def weights_of(native: Native, mp: int) -> dict[str, Any]:
    """Return the tensors in a model-parallel rank's files by name, with experts."""
    held: dict[str, Any] = dict(native.files.trees[native.model[0, mp]].get("module") or {})
    for (layer, tp), file in native.layers.items():
        if tp == native.rank(mp).tp:
            held |= {f"{layer}.{name}": ref for name, ref in native.files.trees[file].items()}
    for (_, _, expert_mp), file in native.experts.items():
        if expert_mp == mp:
            # Mappings number the experts of each rank from 0, as the first rank's files do.
            held |= native.files.trees[file]
    return held


def tied_weight(native: Native, mp: int, name: str, num_elements: int) -> TensorRef | None:
    """Return the weight of a pipeline's tied module, found in layer files by its size.

    No file names the layers of a tied module. None means that no weight has this size, or that
    weights of several shapes have it.
    """
    module, _, local = name.removeprefix(_TIED).partition(".")
    if not name.startswith(_TIED) or not module:
        return None
    files = [file for (_, tp), file in native.layers.items() if tp == native.rank(mp).tp]
    refs = [native.files.trees[file].get(local) for file in files]
    found = {
        ref.shape: ref
        for ref in refs
        if isinstance(ref, TensorRef) and ref.num_elements == num_elements
    }
    return next(iter(found.values())) if len(found) == 1 else None


def _add_module(
    modules: Modules,
    rank: Rank,
    tree: Mapping[str, Any],
    first: Mapping[str, Any],
    module: Mapping[str, Any],
    stand_ins: set[str],
) -> None:
    buffers = {*(tree.get("buffer_names") or ()), *_beside_tensors(module, modules.items)}
    shared = {**(first.get("shared_params") or {}), **(tree.get("shared_params") or {})}
    seen: dict[tuple[int, tuple[int, ...], tuple[int, ...]], str] = {}
    order = modules.order.setdefault(rank.tp if rank.stage == 0 else -1 - rank.stage, [])
    for name, ref in _tensors(module, modules.items):
        is_empty = ref.shape == (0,) and name in stand_ins
        owner = _owner(modules, name, ref, shared, seen)
        if owner is not None and _is_excluded(modules, tree, module, owner):
            # ``named_parameters`` lists a tied parameter once, so DeepSpeed saved it under its
            # other name.
            if not ref.num_elements:
                why = f"not saved (exclude_frozen_parameters), like {owner}, to which it is tied"
                modules.items[f"module.{name}"] = Item("drop", why)
                continue
            _add_weight(modules, rank, owner, ref, is_buffer=False)
        if owner is not None:
            modules.ties[name] = owner
            continue
        if is_empty:
            continue
        if name not in buffers:
            order.append((name, ref))
        _add_weight(modules, rank, name, ref, is_buffer=name in buffers)


def _is_excluded(
    modules: Modules, tree: Mapping[str, Any], module: Mapping[str, Any], owner: str
) -> bool:
    """Return whether DeepSpeed left a frozen parameter out, as it can do with LoRA's base model.

    From stage 2 on, DeepSpeed saves the shapes of frozen parameters unless it leaves them out.
    """
    named = owner in module or owner in modules.trained or owner in modules.ties
    return modules.masters and not named and tree.get("frozen_param_shapes") is None


def _tensors(module: Mapping[str, Any], items: dict[str, Item]) -> Iterator[tuple[str, TensorRef]]:
    budget = current_budget()
    for name, value in module.items():
        if isinstance(value, TensorRef) and not str(name).endswith(_EXTRA_STATE):
            yield str(name), value
        else:
            budget.draw(_ITEM_BYTES, f"a file of the model: module: {str(name)[:80]}")
            items[f"module.{name}"] = Item("drop", "a module's own state, which is not a weight")


def _beside_tensors(module: Mapping[str, Any], items: dict[str, Item]) -> Iterator[str]:
    """Yield the tensors that modules add to the state dict, as bitsandbytes does.

    DeepSpeed does not list them. ``fc.weight.absmax`` is below ``fc.weight``, which is a tensor and
    not a module. So it is neither a parameter nor a registered buffer.
    """
    for name, value in module.items():
        parts = str(name).split(".")
        above = (".".join(parts[:count]) for count in range(1, len(parts)))
        owner = next((a for a in above if isinstance(module.get(a), TensorRef)), None)
        if owner is not None and isinstance(value, TensorRef):
            items[f"module.{name}"] = Item("reshard", f"kept as a buffer beside {owner}")
            yield str(name)


def _owner(
    modules: Modules,
    name: str,
    ref: TensorRef,
    shared: Mapping[str, str],
    seen: dict[tuple[int, tuple[int, ...], tuple[int, ...]], str],
) -> str | None:
    """Return the owner of a tied tensor, or None if ``name`` is the owner."""
    if name in modules.trained:
        if ref.num_bytes:
            seen[ref.offset_bytes, ref.shape, ref.strides] = name
        return None
    owner = shared.get(name, name)
    for _ in shared:
        owner = shared.get(owner, owner)
    if owner != name:
        return owner
    if not ref.num_bytes:
        # An empty tensor has no bytes to share, but another rank may have shown the tie.
        return modules.ties.get(name)
    first = seen.setdefault((ref.offset_bytes, ref.shape, ref.strides), name)
    return None if first == name else first


def _add_weight(
    modules: Modules, rank: Rank, name: str, ref: TensorRef, *, is_buffer: bool
) -> None:
    if rank.stage == 0 or name not in modules.refs:
        modules.refs.setdefault(name, {})[rank.tp] = ref
    if name in modules.trained:
        modules.dtypes.add(ref.dtype)
        return
    modules.shards.add_ref(TensorKey(name, WEIGHT), rank, ref)
    if is_buffer:
        modules.roles[name] = "buffer"
    elif modules.masters:
        modules.roles[name] = "frozen"


def _add_frozen_fragments(native: Native, modules: Modules) -> None:
    """Add the frozen parameters of stage 3, which every rank holds a part of."""
    if native.stage != _ZERO3:
        return
    for (dp_rank, mp), file in sorted(native.model.items()):
        tree = native.files.trees[file]
        shapes = tree.get("frozen_param_shapes") or {}
        pieces = tree.get("frozen_param_fragments") or {}
        for name, dims in shapes.items():
            shape = extents_of(dims)
            ref = pieces.get(name)
            total = prod(shape)
            piece = -(-total // native.dp)
            if not isinstance(ref, TensorRef) or ref.num_elements not in (piece, total):
                raise CheckpointCorruptError(
                    f"{native.files.path(file)}: each of {native.dp} ranks should hold {piece} "
                    f"elements of the frozen parameter {name}, {list(shape)}",
                    path=native.files.path(file),
                    fqn=name,
                )
            begin, end = min(total, dp_rank * piece), min(total, (dp_rank + 1) * piece)
            is_whole = ref.num_elements == total and native.dp > 1 and piece != total
            at = begin if is_whole else 0
            key = TensorKey(name, WEIGHT)
            modules.shards.add_flat(key, native.rank(mp), ref, shape, at, (begin, end))
            if name not in modules.trained:
                modules.roles[name] = "frozen"


def _add_layers(native: Native, modules: Modules) -> None:
    """Add the tensors of a pipeline's layer files that no optimizer trains."""
    if native.first.get("module", ()) is not None:
        for file in native.layers.values():
            modules.items[file] = Item("drop", "left from another run: this one has no pipeline")
        return
    layers = {layer for layer, _ in native.layers}
    needed = {int(m[1]) for name in modules.trained if (m := _LAYER_OF.match(name))}
    if needed - layers:
        number = min(needed - layers)
        raise CheckpointCorruptError(
            f"{native.files.directory} lacks the file(s) of layer {number}, which has trained "
            "parameters: the checkpoint was not copied or saved completely; use another one",
            path=native.files.directory,
            missing=tuple(f"layer_{n:02d}" for n in sorted(needed - layers)),
        )
    buffers = buffer_names(native)
    pipeline = modules.pipeline
    for (layer, tp), file in sorted(native.layers.items()):
        for name, ref in _tensors(native.files.trees[file], modules.items):
            fqn = f"{layer}.{name}" if pipeline is None else pipeline.fqn(layer, name)
            if layer not in needed and fqn not in buffers:
                tied = _tied_name(modules, name, ref)
                if tied is not None:
                    modules.items[f"{file}:{name}"] = Item("drop", f"the model's copy of {tied}")
                    continue
            _check_shape(native, modules, file, fqn, ref)
            _add_weight(modules, Rank(0, tp), fqn, ref, is_buffer=fqn in buffers)


def _tied_name(modules: Modules, name: str, ref: TensorRef) -> str | None:
    """Return the trained tied parameter that a layer file's tensor is a copy of.

    Layer files do not name it. It belongs to the tied module with the same name and shape, if
    nothing else in the layer was trained.
    """
    found = [fqn for fqn in modules.trained if fqn.startswith(_TIED) and fqn.endswith(f".{name}")]
    fitting = [fqn for fqn in found if modules.shards.shape_of(TensorKey(fqn, WEIGHT)) == ref.shape]
    return min(fitting, default=None)


def _check_shape(
    native: Native,
    modules: Modules,
    file: str,
    fqn: str,
    ref: TensorRef,
    rank: Rank | None = None,
) -> None:
    key = TensorKey(fqn, WEIGHT)
    shape = modules.shards.shape_of(key, rank) if fqn in modules.trained else None
    if shape is not None and shape != ref.shape:
        where = "ZeRO's files" if rank is None else f"the param_shapes of {file}"
        raise CheckpointCorruptError(
            f"{native.files.path(file)}: {fqn} is {list(ref.shape)} there and {list(shape)} in "
            f"{where}: one of them is left from another run, or was edited",
            path=native.files.path(file),
            fqn=fqn,
        )


def _add_experts(native: Native, modules: Modules) -> None:
    """Add experts from their files, unless they have masters."""
    if not native.experts and any(EXPERT.fullmatch(name) for name in modules.trained):
        raise CheckpointCorruptError(
            f"{native.files.directory} lacks the files of all experts (layer_0_expert_0_...): the "
            "checkpoint was not copied or saved completely; use another one",
            path=native.files.directory,
        )
    counts = native.first.get("num_experts")
    by_layer: dict[tuple[int, int], set[int]] = {}
    for layer, expert, mp in native.experts:
        by_layer.setdefault((layer, mp), set()).add(expert)
    for (layer, mp), experts in by_layer.items():
        total = max(experts) + 1
        if isinstance(counts, list) and 0 <= layer < len(counts) and isinstance(counts[layer], int):
            total = counts[layer]
        missing = sorted(set(range(total)) - experts)
        if missing:
            name = f"layer_{layer}_expert_{missing[0]}_mp_rank_{mp:02d}_model_states.pt"
            raise CheckpointCorruptError(
                f"{native.files.directory} lacks {name}: the checkpoint was not copied or saved "
                "completely; use another one",
                path=native.files.directory,
                missing=(name,),
            )
    held = {name for file in native.experts.values() for name in native.files.trees[file]}
    lost = sorted(n for n in modules.trained if EXPERT.fullmatch(n) and n not in held)
    if lost:
        raise CheckpointCorruptError(
            f"{native.files.directory}: ZeRO's files hold {lost[0]}, but the files of experts "
            "do not: the folder mixes two saves, or only some experts of a layer are trained",
            path=native.files.directory,
            fqn=lost[0],
        )
    for (_, _, mp), file in sorted(native.experts.items()):
        for name, ref in _tensors(native.files.trees[file], modules.items):
            _check_shape(native, modules, file, name, ref)
            _add_weight(modules, native.rank(mp), name, ref, is_buffer=False)
