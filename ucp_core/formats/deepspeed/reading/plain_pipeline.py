"""The weights of a pipeline without ZeRO: which of its layers' files each stage's optimizer means.

A tied module's weights are in the file of one layer, and nothing says the module's name but
``universal_checkpoint_info``; without that, they are named by the layer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import count
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from ucp_core.errors import CheckpointCorruptError, PatternError
from ucp_core.formats.deepspeed.reading.pipeline_order import Names, Stages, find_stages
from ucp_core.formats.deepspeed.reading.topology import Native
from ucp_core.formats.deepspeed.reading.zero import param_shapes
from ucp_core.formats.shared import assign, can_be, largest_shape, unclear
from ucp_core.geometry import DTYPE_BYTES
from ucp_core.manifest import Item
from ucp_core.torch_files import TensorRef

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Shape = tuple[int, ...]

INNER = "optimizer_state_dict"
FLAT = "fp32_groups_flat"
LISTS = "fp32_groups"

_TIED = "tied_modules."
_TIED_NAME = re.compile(r"tied_modules\.([^.]+)\.(.+)")
#: Stages are tried with so many ranges of layers; more only where many parameters are frozen.
_TRIES_MAX = 5000
#: Elements that are compared of states that must be one tensor's.
_SAMPLE = 256


@dataclass(slots=True)
class PlainPipeline:
    """What stands in the files of layers.

    Attributes:
        params: By model-parallel rank, what its optimizer can number, in order.
        names: Of tensors that are not named by their layer, by layer and name in its file.
        copies: Layers whose files repeat an earlier one's, and which that is.
        items: How all that was found.
    """

    params: dict[int, list[tuple[str, TensorRef]]] = field(default_factory=dict)
    names: dict[tuple[int, str], str] = field(default_factory=dict)
    copies: dict[int, int] = field(default_factory=dict)
    items: dict[str, Item] = field(default_factory=dict)

    def fqn(self, layer: int, local: str) -> str:
        """Return the name of a tensor of a layer's file."""
        return self.names.get((layer, local), f"{layer}.{local}")


class _Demand(NamedTuple):
    """What one stage's optimizer numbers: shapes by group, and how much of it all.

    Attributes:
        file: Where it is.
        tree: The optimizer.
        groups: Its groups.
        wanted: By group, the shape of each parameter as far as it is known.
        need: Parameters; or elements, where all are in flat masters.
    """

    file: str
    tree: Mapping[str, Any]
    groups: Sequence[Mapping[str, Any]]
    wanted: Sequence[Sequence[Shape | None]]
    need: int

    @property
    def is_flat(self) -> bool:
        """Return whether masters are flat: then no shape is known."""
        return FLAT in self.tree


def plain_pipeline(native: Native) -> PlainPipeline:
    """Return which tensors each stage's optimizer numbers.

    Raises:
        PatternError: It cannot be told.
        CheckpointCorruptError: A file holds what no DeepSpeed writes.
    """
    found = PlainPipeline()
    told = [
        param_shapes(native.files.trees[native.model[0, s * native.tp]], native.model[0, 0])
        for s in range(native.pp)
    ]
    demands = [_demand(native, stage) for stage in range(native.pp)]
    params = {layer: _params(native, layer, 0) for layer in _layers(native)}
    params = {layer: held for layer, held in params.items() if held}
    if all(shapes is not None for shapes in told):
        wanted = {n: s for shapes in told for group in shapes or () for n, s in group.items()}
        _name_told(params, wanted, found)
        by_name = {found.fqn(ly, n): (ly, n) for ly, held in params.items() for n in held}
        parts = [
            [by_name[n] for group in shapes or () for n in group if n in by_name] for shapes in told
        ]
    elif any(demand is None or _is_stateless(demand) for demand in demands):
        return found
    else:
        stages = _found(native, params, [d for d in demands if d is not None])
        _name_tied(native, params, stages, found)
        parts = [
            [(layer, n) for layer in layers for n in params[layer]] for layers in stages.layers
        ]
        shown = "; ".join(f"{s}: {_shown(layers)}" for s, layers in enumerate(stages.layers))
        found.items["layers by stage"] = Item("drop", f"found by what optimizers number: {shown}")
    for mp in range(native.tp * native.pp):
        rank = native.rank(mp)
        refs = {layer: _params(native, layer, rank.tp) for layer, _ in parts[rank.stage]}
        found.params[mp] = [(found.fqn(ly, n), refs[ly][n]) for ly, n in parts[rank.stage]]
    return found


def _shown(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers))


def _layers(native: Native) -> list[int]:
    return sorted({layer for layer, _ in native.layers})


def _params(native: Native, layer: int, tp: int) -> dict[str, TensorRef]:
    """Return what a layer's file holds besides buffers."""
    trees = (native.files.trees[file] for file in native.model.values())
    buffers = {str(name) for tree in trees for name in tree.get("buffer_names") or ()}
    tied = {match[2] for name in buffers if (match := _TIED_NAME.fullmatch(name))}
    own = native.files.trees[native.layers[layer, tp]]
    return {
        str(name): ref
        for name, ref in own.items()
        if isinstance(ref, TensorRef) and f"{layer}.{name}" not in buffers and name not in tied
    }


def _demand(native: Native, stage: int) -> _Demand | None:
    file = native.model[0, stage * native.tp]
    tree = native.files.trees[file].get("optimizer")
    if not isinstance(tree, dict):
        return None
    inner = tree.get(INNER, tree)
    if not isinstance(inner, dict) or not isinstance(inner.get("param_groups"), list):
        raise CheckpointCorruptError(f"{file}: optimizer has no param_groups", file=file)
    groups, state = inner["param_groups"], inner.get("state") or {}
    if FLAT in tree:
        return _Demand(file, tree, groups, (), sum(ref.num_elements for ref in tree[FLAT]))
    if LISTS in tree:
        wanted = [[ref.shape for ref in group] for group in tree[LISTS]]
    else:
        wanted = [[largest_shape(state.get(n, {})) for n in group["params"]] for group in groups]
    return _Demand(file, tree, groups, wanted, sum(map(len, wanted)))


def _is_stateless(demand: _Demand) -> bool:
    """Return whether an optimizer has nothing of any parameter, as plain SGD."""
    return not demand.is_flat and not any(other for group in demand.wanted for other in group)


def _name_told(
    params: Mapping[int, Mapping[str, TensorRef]],
    shapes: Mapping[str, Shape],
    found: PlainPipeline,
) -> None:
    """Name the tensors of tied modules, where ``param_shapes`` has the names of all."""
    for name, shape in shapes.items():
        match = _TIED_NAME.fullmatch(name)
        if match is None:
            continue
        for layer, held in params.items():
            is_own = any(f"{layer}.{local}" in shapes for local in held)
            ref = held.get(match[2])
            if not is_own and ref is not None and ref.shape == shape:
                found.names[layer, match[2]] = name
                break


def _name_tied(
    native: Native,
    params: Mapping[int, Mapping[str, TensorRef]],
    stages: Stages,
    found: PlainPipeline,
) -> None:
    """Name tied modules by the checkpoint's patterns and buffers, if these tell."""
    keys = _tied_keys(native)
    found.copies = {ly: one for ly, one in _copies(params).items() if one in stages.tied}
    for layer in stages.tied:
        fitting = [key for key, locals_ in keys.items() if locals_ <= set(params[layer])]
        if len(fitting) == 1:
            names = {local: f"{_TIED}{fitting[0]}.{local}" for local in params[layer]}
            found.names |= {(layer, local): name for local, name in names.items()}
            continue
        found.items[f"tied module of layer {layer}"] = Item(
            "reshard",
            "no file says its key, so its tensors are named by the layer; to load them into a "
            f"PipelineModule, rename {layer}.NAME to {_TIED}KEY.NAME with --rename",
        )


def _tied_keys(native: Native) -> dict[str, set[str]]:
    """Return the keys of tied modules that files name, and tensors of each."""
    names: set[str] = set()
    for file in native.model.values():
        tree = native.files.trees[file]
        info = tree.get("universal_checkpoint_info")
        if isinstance(info, dict):
            lists = [value for value in info.values() if isinstance(value, list)]
            names |= {text for texts in lists for text in texts if isinstance(text, str)}
    keys: dict[str, set[str]] = {}
    for name in names:
        plain = re.sub(r"\\(.)", r"\1", name.strip("^$"))
        if match := _TIED_NAME.fullmatch(plain):
            keys.setdefault(match[1], set()).add(match[2])
    return keys


def _found(
    native: Native,
    params: Mapping[int, Mapping[str, TensorRef]],
    demands: Sequence[_Demand],
) -> Stages:
    """Return the only explanation of what the stages' optimizers number."""
    is_flat = demands[0].is_flat
    sizes = {
        layer: sum(ref.num_elements for ref in held.values()) if is_flat else len(held)
        for layer, held in params.items()
    }

    tries = count()

    def fits(stage: int, layers: Sequence[int]) -> Names | None:
        if next(tries) == _TRIES_MAX:
            raise unclear(demands[0].file, "too many layers could be frozen in too many ways")
        held = [(f"{ly}.{n}", ref.shape) for ly in layers for n, ref in params[ly].items()]
        return _assigned(demands[stage], held)

    def proven(stages: Stages) -> bool:
        return _states_agree(native, demands, stages)

    needs = [demand.need for demand in demands]
    found = find_stages(sizes, needs, _copies(params), fits, proven)
    if len(found) == 1 and all(found[0].names):
        return found[0]
    what = "elements" if is_flat else "parameters"
    held = f"files of {len(params)} layers hold {sum(sizes.values())} {what}"
    why = f"the optimizers of {len(demands)} stage(s) number {_shown(needs)}, the {held}, and "
    if found:
        raise unclear(demands[0].file, why + "these can be theirs in more than one way")
    raise unclear(
        demands[0].file,
        why + "in no order of a PipelineModule do these have the shapes of the optimizers' state "
        "(a tied module that every layer uses by its forward_fn has no file of weights)",
    )


def _assigned(demand: _Demand, params: Sequence[tuple[str, Shape]]) -> Names | None:
    """Return the names of each group; None if the parameters cannot be the optimizer's.

    Where they can be in more than one way, the names are empty: that is no explanation, but may
    be the truth.
    """
    if demand.is_flat:
        total = sum(prod(shape) for _, shape in params)
        return (tuple(name for name, _ in params),) if total == demand.need else None
    try:
        names = assign(demand.wanted, params, demand.file)
    except CheckpointCorruptError:
        return None
    except PatternError:
        return () if can_be(demand.wanted, params) else None
    shapes = dict(params)
    for index, group in names.items():
        for name, other in zip(group, demand.wanted[index], strict=True):
            if other is not None and not _may_be(other, shapes[name]):
                return None
    return tuple(tuple(names.get(index, ())) for index in range(len(demand.wanted)))


def _may_be(state: Shape, param: Shape) -> bool:
    """Return whether state is of a parameter's shape, or factored: then it lacks some extents."""
    if prod(state) >= prod(param):
        return state == param
    return all(extent == 1 or extent in param for extent in state)


def _copies(params: Mapping[int, Mapping[str, TensorRef]]) -> dict[int, int]:
    """Return the layers whose files have the same bytes as an earlier layer's."""
    seen: dict[Any, int] = {}
    found: dict[int, int] = {}
    for layer, held in params.items():
        parts = [
            (name, ref.shape, ref.extent.num_bytes, ref.extent.crc32)
            for name, ref in held.items()
            if ref.extent is not None and ref.extent.num_bytes == ref.num_bytes
        ]
        if len(parts) == len(held):
            first = seen.setdefault(tuple(parts), layer)
            if first != layer:
                found[layer] = first
    return found


def _states_agree(native: Native, demands: Sequence[_Demand], stages: Stages) -> bool:
    """Return whether stages have the same state of a tied module, and of nothing else.

    Its gradients are summed over the stages, so its optimizers stay equal bit for bit.
    """
    if demands[0].is_flat:
        return True
    told: dict[str, tuple[Any, ...]] = {}
    owners: dict[tuple[Any, ...], str] = {}
    for stage, groups in enumerate(stages.names):
        mine: dict[tuple[Any, ...], str] = {}
        for index, names in enumerate(groups):
            for place, name in enumerate(names):
                refs = _slots(demands[stage], index, place)
                marks = tuple(_mark(native, ref) for ref in refs)
                if told.setdefault(name, marks) != marks:
                    return False
                other = owners.get(marks, name)
                if marks and other != name and any(any(_first_bytes(native, r)) for r in refs):
                    return False
                mine[marks] = name
        owners |= mine
    return True


def _slots(demand: _Demand, index: int, place: int) -> list[TensorRef]:
    """Return the tensors of a parameter's state, besides its step."""
    inner = demand.tree.get(INNER, demand.tree)
    state = (inner.get("state") or {}).get(demand.groups[index]["params"][place], {})
    found = ((str(slot), ref) for slot, ref in state.items() if isinstance(ref, TensorRef))
    return [ref for slot, ref in sorted(found, key=lambda item: item[0]) if slot != "step"]


def _mark(native: Native, ref: TensorRef) -> Any:
    """Return what tells a tensor from others: its checksum, else its beginning."""
    extent = ref.extent
    if extent is not None and extent.num_bytes == ref.num_bytes and extent.crc32 is not None:
        return ref.shape, extent.crc32
    return ref.shape, _first_bytes(native, ref)


def _first_bytes(native: Native, ref: TensorRef) -> bytes:
    size_bytes = min(ref.num_bytes, _SAMPLE * DTYPE_BYTES[ref.dtype])
    path = native.files.path(ref.file)
    return native.files.store.read_range(path, ref.offset_bytes, size_bytes)
