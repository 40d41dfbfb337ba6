"""Reads the model's files: weights in its dtype, frozen parameters and buffers, and small values.

The reader skips trained parameters whose float32 masters are in ZeRO's files. Ties come from
``shared_params``, which only the first rank fills, and from tensors that share their bytes in a
file. Every other key has a policy: ``replicate`` keeps the value in ``extra``, ``reseed`` only the
first rank's, as a run in another layout must make its own, and ``drop`` notes the reason.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ucp_core.formats.deepspeed import keys
from ucp_core.formats.deepspeed.keys import EXPERT
from ucp_core.formats.deepspeed.reading.topology import Native
from ucp_core.formats.deepspeed.reading.zero import WEIGHT, RankState, share
from ucp_core.formats.refusals import corrupt, missing, two_saves
from ucp_core.formats.shared import Assembly, Rank
from ucp_core.geometry import TensorKey
from ucp_core.manifest import Item
from ucp_core.torch_files import TensorRef, current_budget, extents_of

_LAYER_OF = re.compile(r"(\d+)\.")
_TIED = "tied_modules."
#: Approximate memory of a note about one key.
_ITEM_BYTES = 512
_EXTRA_STATE = "_extra_state"


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
    #: The parameters of each model-parallel rank of a pipeline, in the order of its optimizer, if
    #: there are no masters.
    pipeline: dict[int, dict[str, TensorRef]] | None = None
    #: Names of tensors that do not follow from their layer, by layer and name in the file.
    layer_names: dict[tuple[int, str], str] = field(default_factory=dict)

    def in_layer(self, layer: int, local: str) -> str:
        """Return the name in the model of a tensor in a layer's file."""
        return self.layer_names.get((layer, local), f"{layer}.{local}")

    def same_bytes(self, name: str) -> bool:
        """Return whether all tensor-parallel ranks saved a tensor with the same checksum."""
        refs = self.refs.get(name, {}).values()
        sums = {
            None if e is None or e.num_bytes != ref.num_bytes else (e.num_bytes, e.crc32)
            for ref in refs
            for e in [ref.extent]
        }
        return len(refs) == self.shards.tp_degree and len(sums) == 1 and None not in sums


def add_modules(native: Native, modules: Modules, *, complete: bool = True) -> None:
    """Add all weights of the model files, of pipeline layers and of experts.

    ``complete`` says whether files of pipeline layers and experts must exist.
    """
    for (dp, mp), file in native.model.items():
        tree = native.files.trees[file]
        if dp == 0 and tree.get("module") is not None:
            _add_module(native, modules, native.rank(mp), tree)
        if native.is_zero3:
            _add_frozen_fragments(native, modules, (dp, mp), tree)
    if complete:
        _add_layers(native, modules)
        _add_experts(native, modules)
    for name in modules.trained & set(modules.refs):
        # ZeRO's files omit shards without elements. With AutoTP a rank can have no part of a dim
        # that is shorter than the number of ranks.
        refs = modules.refs[name]
        for tp, ref in refs.items():
            if not ref.num_elements and any(other.num_elements for other in refs.values()):
                modules.shards.add_empty(name, tp, ref.shape)
    if modules.dtypes and modules.masters:
        dtypes = ", ".join(sorted(modules.dtypes))
        modules.items["module"] = Item(
            "drop", f"trained parameters: kept as masters instead of copies in {dtypes}"
        )


def buffer_names(native: Native) -> frozenset[str]:
    """Return the names of all buffers."""
    trees = (native.files.trees[file] for file in native.model.values())
    return frozenset(str(name) for tree in trees for name in tree.get("buffer_names") or ())


def shapes_by_mappings(
    native: Native, mp: int, states: Sequence[RankState]
) -> list[dict[str, tuple[int, ...]]]:
    """Return shapes by group if only the mappings of ZeRO's files name the parameters.

    This is so in bfloat16 without ZeRO, and with experts before DeepSpeed 0.19.
    """
    where, trees, tp_rank = native.model[0, mp], native.files.trees, native.rank(mp).tp
    layers = {layer: trees[file] for (layer, tp), file in native.layers.items() if tp == tp_rank}
    held: dict[str, Any] = dict(trees[where].get("module") or {})
    for layer, tree in layers.items():
        held |= {f"{layer}.{name}": ref for name, ref in tree.items()}
    for (_, _, expert_mp), file in native.experts.items():
        # Mappings number the experts of each rank from 0, as the first rank's files do.
        held |= trees[file] if expert_mp == mp else {}
    found: list[dict[str, tuple[int, ...]]] = []
    for index in range(len(states[0].partitions)):
        sizes: dict[str, int] = {}
        for state in states:
            for name, (_, size) in state.partitions[index].mapping.items():
                sizes[name] = sizes.get(name, 0) + size
        shapes: dict[str, tuple[int, ...]] = {}
        for name, size in sizes.items():
            named = [held.get(name)]
            if named == [None] and name.startswith(_TIED):
                # No file names the layers of a tied module, so its weight is known by its size.
                local = name.removeprefix(_TIED).partition(".")[2]
                own = (tree.get(local) for tree in layers.values())
                named = [r for r in own if isinstance(r, TensorRef) and r.num_elements == size]
            fitting = {ref.shape for ref in named if isinstance(ref, TensorRef)}
            if len(fitting) != 1:
                raise corrupt(where, f"neither param_shapes nor one tensor for {name}")
            shapes[name] = fitting.pop()
        found.append(shapes)
    return found


def _add_module(native: Native, modules: Modules, rank: Rank, tree: Mapping[str, Any]) -> None:
    module = tree["module"]
    buffers = set(tree.get("buffer_names") or ())
    shared = {**(native.first.get("shared_params") or {}), **(tree.get("shared_params") or {})}
    # Stage 3 has an empty tensor in place of every parameter.
    frozen = tree.get("frozen_param_shapes")
    stand_ins = {*modules.trained, *(frozen or ())} if native.is_zero3 else set()
    seen: dict[Any, str] = {}
    order = modules.order.setdefault(rank.tp if rank.stage == 0 else -1 - rank.stage, [])
    for name, ref in _tensors(module, modules.items):
        owner = _owner(modules, name, ref, shared, seen)
        if owner is not None:
            known = owner in module or owner in modules.trained or owner in modules.ties
            if modules.masters and not known and frozen is None:
                # DeepSpeed left a frozen parameter out, as it can do with LoRA's base model: from
                # stage 2 on it saves their shapes otherwise. ``named_parameters`` lists a tied
                # parameter once, so DeepSpeed saved it under its other name.
                if not ref.num_elements:
                    why = "not saved (exclude_frozen_parameters), like"
                    why = f"{why} {owner}, to which it is tied"
                    modules.items[f"module.{name}"] = Item("drop", why)
                    continue
                _add_weight(modules, rank, owner, ref)
            modules.ties[name] = owner
        elif not (ref.shape == (0,) and name in stand_ins):
            if name not in buffers:
                order.append((name, ref))
            _add_weight(modules, rank, name, ref, is_buffer=name in buffers)


def _tensors(module: Mapping[str, Any], items: dict[str, Item]) -> Iterator[tuple[str, TensorRef]]:
    budget = current_budget()
    for name, value in module.items():
        if isinstance(value, TensorRef) and not str(name).endswith(_EXTRA_STATE):
            yield str(name), value
        else:
            budget.draw(_ITEM_BYTES, f"a file of the model: module: {str(name)[:80]}")
            items[f"module.{name}"] = Item("drop", "a module's own state, which is not a weight")


def _owner(
    modules: Modules,
    name: str,
    ref: TensorRef,
    shared: Mapping[str, str],
    seen: dict[Any, str],
) -> str | None:
    """Return the owner of a tied tensor, or None if ``name`` is the owner."""
    place = ref.offset_bytes, ref.shape, ref.strides
    if name in modules.trained:
        if ref.num_bytes:
            seen[place] = name
        return None
    owner = shared.get(name, name)
    for _ in shared:
        owner = shared.get(owner, owner)
    if owner == name:
        # An empty tensor has no bytes to share, but another rank may have shown the tie.
        owner = seen.setdefault(place, name) if ref.num_bytes else modules.ties.get(name, name)
    return None if owner == name else owner


def _add_weight(
    modules: Modules,
    rank: Rank,
    name: str,
    ref: TensorRef,
    *,
    is_buffer: bool = False,
    in_layer: bool = False,
) -> None:
    """Add a weight, unless it has masters; then it must have their shape."""
    if rank.stage == 0 or name not in modules.refs:
        modules.refs.setdefault(name, {})[rank.tp] = ref
    key = TensorKey(name, WEIGHT)
    if name in modules.trained:
        modules.dtypes.add(ref.dtype)
        # A layer's file does not tell its stage.
        shape = modules.shards.shape_of(key, None if in_layer else rank)
        if shape not in (None, ref.shape):
            raise corrupt(
                ref.file,
                f"{name} is {list(ref.shape)} there and {list(shape or ())} in param_shapes, or by "
                "ZeRO's files: one of them is left from another run, or was edited",
            )
        return
    modules.shards.add_ref(key, rank, ref)
    if is_buffer:
        modules.roles[name] = "buffer"
    elif modules.masters:
        modules.roles[name] = "frozen"


def _add_frozen_fragments(
    native: Native, modules: Modules, of: tuple[int, int], tree: Mapping[str, Any]
) -> None:
    """Add the parts of frozen parameters that a rank ``(dp, mp)`` of stage 3 holds."""
    dp_rank, mp = of
    pieces = tree.get("frozen_param_fragments") or {}
    for name, dims in (tree.get("frozen_param_shapes") or {}).items():
        ref, shape = pieces.get(name), extents_of(dims)
        total = prod(shape)
        extent, span = share(total, native.dp, dp_rank)
        if not isinstance(ref, TensorRef) or ref.num_elements not in (extent, total):
            raise corrupt(
                native.files.path(native.model[of]),
                f"each of {native.dp} ranks should hold {extent} elements of the frozen parameter "
                f"{name}, {list(shape)}",
            )
        at = span[0] if ref.num_elements == total != extent else 0
        modules.shards.add_flat(TensorKey(name, WEIGHT), native.rank(mp), ref, shape, at, span)
        if name not in modules.trained:
            modules.roles[name] = "frozen"


def _add_layers(native: Native, modules: Modules) -> None:
    """Add the tensors of a pipeline's layer files that no optimizer trains."""
    if native.first.get("module", ()) is not None:
        unused = Item("drop", "left from another run: this one has no pipeline")
        modules.items |= dict.fromkeys(native.layers.values(), unused)
        return
    needed = {int(m[1]) for name in modules.trained if (m := _LAYER_OF.match(name))}
    if lacking := needed - {layer for layer, _ in native.layers}:
        raise missing(native.files.directory, [f"layer {n}'s file" for n in sorted(lacking)])
    buffers = buffer_names(native)
    for (layer, tp), file in sorted(native.layers.items()):
        for name, ref in _tensors(native.files.trees[file], modules.items):
            fqn = modules.in_layer(layer, name)
            if layer not in needed and fqn not in buffers:
                # Layer files do not name a tied module. A tensor belongs to that with the same name
                # and shape, if nothing else in the layer was trained.
                tied = [
                    own
                    for own in sorted(modules.trained)
                    if own.startswith(_TIED)
                    and own.endswith(f".{name}")
                    and modules.shards.shape_of(TensorKey(own, WEIGHT)) == ref.shape
                ]
                if tied:
                    why = f"the model's copy of {tied[0]}"
                    modules.items[f"{file}:{name}"] = Item("drop", why)
                    continue
            is_buffer = fqn in buffers
            _add_weight(modules, Rank(0, tp), fqn, ref, is_buffer=is_buffer, in_layer=True)


def _add_experts(native: Native, modules: Modules) -> None:
    """Add experts from their files, unless they have masters."""
    directory, trees = native.files.directory, native.files.trees
    counts = native.first.get("num_experts")
    by_layer: dict[tuple[int, int], set[int]] = {}
    for layer, expert, mp in native.experts:
        by_layer.setdefault((layer, mp), set()).add(expert)
    for (layer, mp), experts in by_layer.items():
        total = max(experts) + 1
        if isinstance(counts, list) and 0 <= layer < len(counts) and isinstance(counts[layer], int):
            total = counts[layer]
        if lacking := sorted(set(range(total)) - experts):
            form = f"layer_{layer}_expert_{{}}_mp_rank_{mp:02d}_model_states.pt"
            raise missing(directory, map(form.format, lacking))
    held = {name for file in native.experts.values() for name in trees[file]}
    if lost := sorted(n for n in modules.trained if EXPERT.fullmatch(n) and n not in held):
        if not native.experts:
            raise missing(directory, ["the files of all experts (layer_0_expert_0_...)"])
        raise two_saves(
            directory,
            f"ZeRO's files hold {lost[0]}, but the files of experts do not (or only some experts "
            "of a layer are trained)",
        )
    for (_, _, mp), file in sorted(native.experts.items()):
        for name, ref in _tensors(trees[file], modules.items):
            _add_weight(modules, native.rank(mp), name, ref)


def add_model_values(found: Assembly, native: Native) -> None:
    """Add the keys of the first rank's model file."""
    tree, file, num_ranks = native.first, native.model[0, 0], native.tp * native.pp
    found.extra["counters"] = {k: tree[k] for k in keys.COUNTERS if isinstance(tree.get(k), int)}
    found.items |= native.items
    for key, value in tree.items():
        if key in keys.MODEL:
            found.items[key] = keys.MODEL[key]
        elif key in keys.COUNTERS:
            found.items[key] = Item("replicate", "in extra: counters")
        elif value is None and key in keys.NAMED:
            found.items[key] = Item("drop", "it is None")
        elif key in keys.NAMED:
            found.keep(key, value, file, num_ranks=num_ranks)
        else:
            client = found.extra.setdefault("client_state", {})
            found.keep(str(key), value, file, into=client, num_ranks=num_ranks, exact=True)


def add_optimizer_values(found: Assembly, rest: Mapping[str, Any], file: str) -> None:
    """Add the keys of the first rank's optimizer state that are not tensors."""
    kept: dict[str, Any] = {}
    for key, value in rest.items():
        item = f"optimizer.{key}"
        if key in keys.OPTIMIZER:
            found.items[item] = keys.OPTIMIZER[key]
        else:
            into = found.extra if key == "loss_scaler" else kept
            found.keep(str(key), value, file, item=item, into=into)
    if kept:
        found.extra["optimizer"] = kept
