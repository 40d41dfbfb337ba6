"""Reads the optimizer of a DeepSpeed checkpoint without ZeRO, which numbers its parameters.

The file names them in ``param_shapes``, or in ``param_names``, which torch's optimizers keep since
2.6 if they were made of ``named_parameters()``. Otherwise the numbers follow the model's order, and
exactly one choice of parameters must fit the shapes of each group. Float32 masters must then round
to the weights.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from math import prod
from typing import Any, NamedTuple

from ucp_core.errors import PatternError, UnsupportedVersionError
from ucp_core.formats.deepspeed.keys import EXPERT
from ucp_core.formats.deepspeed.reading.topology import Native
from ucp_core.formats.deepspeed.reading.weights import Modules, add_optimizer_values
from ucp_core.formats.deepspeed.reading.zero import WEIGHT, param_shapes
from ucp_core.formats.refusals import corrupt, missing
from ucp_core.formats.shared import (
    Rank,
    assign,
    check_master,
    shapes_by_group,
    unclear,
)
from ucp_core.geometry import TensorKey
from ucp_core.manifest import Item
from ucp_core.torch_files import TensorRef

#: Keys of half-precision optimizers: torch's optimizer, and its masters by group.
_INNER = "optimizer_state_dict"
_FLAT = "fp32_groups_flat"
_LISTS = "fp32_groups"
#: The key of a group's names in torch's optimizers.
_NAMES = "param_names"
_EP_GROUP = re.compile(r"ep_size_(\d+)")
_TIED_NAME = re.compile(r"tied_modules\.([^.]+)\.(.+)")


def read_layer_files(native: Native, modules: Modules) -> None:
    """Find the tensors of the layer files that each stage's optimizer numbers.

    Layer files do not name their stage. ``param_shapes`` name the parameters of a stage, and also
    show which layer's tensor belongs to a tied module.
    """
    modules.pipeline = {}
    files = (native.model[0, mp] for mp in range(native.tp * native.pp))
    named = [param_shapes(native.files.trees[file], file) or [] for file in files]
    shapes = {n: s for stage in named for group in stage for n, s in group.items()}
    layers: dict[int, dict[int, Mapping[str, Any]]] = {}
    for (layer, tp), file in sorted(native.layers.items()):
        layers.setdefault(tp, {})[layer] = native.files.trees[file]
    for name, shape in shapes.items():
        match = _TIED_NAME.fullmatch(name)
        if match is None:
            continue
        for layer, held in layers.get(0, {}).items():
            is_own = any(f"{layer}.{local}" in shapes for local in held)
            ref = held.get(match[2])
            if not is_own and isinstance(ref, TensorRef) and ref.shape == shape:
                modules.layer_names[layer, match[2]] = name
                break
    for mp, stage in enumerate(named):
        own = layers.get(native.rank(mp).tp, {}).items()
        refs = {modules.in_layer(layer, n): ref for layer, tree in own for n, ref in tree.items()}
        modules.pipeline[mp] = {n: refs[n] for group in stage for n in group if n in refs}


class _Saved(NamedTuple):
    """One saved optimizer."""

    file: str
    tree: Mapping[str, Any]
    #: Owner of its shards. The weights of all stages of a pipeline belong to the first stage.
    rank: Rank
    params: Mapping[str, TensorRef]  #: Parameters that it can number, in the model's order.
    #: Names by group, if the file has names; frozen parameters can be among them.
    names: list[list[str]] | None

    @property
    def groups(self) -> list[Mapping[str, Any]]:
        """Return its groups."""
        groups: list[Mapping[str, Any]] = self.tree.get(_INNER, self.tree)["param_groups"]
        return groups

    @property
    def state(self) -> Mapping[Any, Any]:
        """Return the state by number; with flat masters a group is one parameter."""
        return self.tree.get(_INNER, self.tree).get("state") or {}

    def has_state(self) -> bool:
        """Return whether it holds state for any parameter: plain SGD does not."""
        return _FLAT in self.tree or _LISTS in self.tree or any(self.state.values())


def add_without_zero(native: Native, modules: Modules) -> None:
    """Add the slots and masters of the model files; nothing if no optimizer was saved."""
    met: set[tuple[str, int]] = set()
    known = {_INNER, _FLAT, _LISTS, "state", "param_groups"}
    for number, saved in enumerate(_saved(native, modules)):
        if number == 0:
            rest = {key: value for key, value in saved.tree.items() if key not in known}
            add_optimizer_values(modules, rest, saved.file)
        try:
            names = _names(saved)
        except PatternError:
            if saved.has_state():
                raise
            modules.items["optimizer.param_groups"] = Item(
                "drop",
                "no parameter has a state, so nothing shows how the parameters belong to the "
                f"groups of {', '.join(str(len(g['params'])) for g in saved.groups)} parameters",
            )
            continue
        for index, group in enumerate(names):
            _add_group(saved, modules, index, group, met)
        trained = set(chain.from_iterable(names))
        modules.roles |= {name: "frozen" for name in saved.params if name not in trained}
        unnamed = [{k: v for k, v in g.items() if k != _NAMES} for g in saved.groups]
        modules.add_groups(unnamed, names, saved.file)


def _saved(native: Native, modules: Modules) -> Iterator[_Saved]:
    """Yield the optimizers of all model-parallel and expert-parallel ranks that saved one."""
    for mp in range(native.tp * native.pp):
        file = native.model[0, mp]
        tree, rank = native.files.trees[file].get("optimizer"), Rank(0, native.rank(mp).tp)
        if tree is None:
            continue
        if native.experts:
            yield from _of_experts(native, modules, mp)
            continue
        shapes = param_shapes(native.files.trees[file], file)
        names = None if shapes is None else [list(group) for group in shapes]
        if modules.pipeline is None:
            saved = _Saved(file, tree, rank, dict(modules.order.get(rank.tp, [])), names)
            yield saved._replace(names=names or _kept_names(saved))
            continue
        # The optimizer of a stage has its own names, which are not the model's.
        saved = _Saved(file, tree, rank, modules.pipeline.get(mp, {}), names)
        if names is None and saved.has_state():
            why = "a pipeline stage numbers its own parameters, and no param_shapes name them"
            raise unclear(file, why)
        yield saved


def _kept_names(saved: _Saved) -> list[list[str]] | None:
    """Return the names that an optimizer keeps, by group; None unless all are the model's."""
    found = [group.get(_NAMES) for group in saved.groups]
    if not found or not all(isinstance(group, list) for group in found):
        return None
    joined = [str(name) for group in found for name in group or ()]
    is_of_model = saved.params.keys() >= set(joined) and len(set(joined)) == len(joined)
    return [list(map(str, group or ())) for group in found] if is_of_model else None


def _of_experts(native: Native, modules: Modules, mp: int) -> Iterator[_Saved]:
    """Yield the optimizers of the expert-parallel ranks: each has its own experts, and the rest."""
    directory, trees = native.files.directory, native.files.trees
    if native.pp > 1:
        raise UnsupportedVersionError(
            f"{directory}: experts in a pipeline without ZeRO keep no names of the optimizer's "
            "parameters; save with ZeRO stage 1",
            path=directory,
        )
    rank = native.rank(mp)
    params = dict(modules.order.get(rank.tp, []))
    saved = {
        ep: _Saved(file, trees[file]["optimizer"], rank, params, None)
        for (ep, of), file in sorted(native.expert_optim.items())
        if of == mp
    }
    # Marked groups are named after the number of expert-parallel ranks.
    marks = {str(g.get("name")) for one in saved.values() for g in one.groups if g.get("moe")}
    degrees = {int(match[1]) for match in map(_EP_GROUP.fullmatch, marks) if match}
    if len(degrees) > 1:
        raise UnsupportedVersionError(
            f"{directory}: layers of experts with {sorted(degrees)} expert-parallel ranks, without "
            "ZeRO: no file says which experts each rank has; save with ZeRO stage 1",
            path=directory,
        )
    degree = max([1 + max(saved, default=0), *degrees])
    if lacking := [ep for ep in range(degree) if ep not in saved]:
        form = f"expp_rank_{{}}_mp_rank_{mp:02d}_optim_states.pt"
        raise missing(directory, map(form.format, lacking))
    held: dict[str, list[tuple[int, str, TensorRef]]] = {}
    for (_, number, of), name in sorted(native.experts.items()):
        for fqn, ref in trees[name].items() if of == mp else ():
            match = EXPERT.fullmatch(str(fqn))
            if match is not None and isinstance(ref, TensorRef):
                held.setdefault(match[1], []).append((number, str(fqn), ref))
    for ep, one in saved.items():
        yield one._replace(params=_with_experts(one, held, ep, degree))


def _with_experts(
    saved: _Saved, held: Mapping[str, Sequence[tuple[int, str, TensorRef]]], ep: int, degree: int
) -> dict[str, TensorRef]:
    """Return the parameters of one expert-parallel rank, with its experts in their places.

    A layer registers its gate, then its experts, which have their own files.
    """
    behind: dict[str, dict[str, TensorRef]] = {}
    for prefix, experts in held.items():
        layer = prefix.removesuffix("experts.deepspeed_experts.")
        gates = [name for name in saved.params if name.startswith(f"{layer}gate.")]
        total = 1 + max(number for number, _, _ in experts)
        if not gates or total % degree:
            raise unclear(
                saved.file,
                f"{layer} has {total} experts over {degree} expert-parallel ranks, and "
                f"{len(gates)} parameters of a gate before them",
            )
        mine = {name: ref for number, name, ref in experts if number * degree // total == ep}
        behind.setdefault(gates[-1], {}).update(mine)
    params: dict[str, TensorRef] = {}
    for name, ref in saved.params.items():
        params |= {name: ref, **behind.get(name, {})}
    return params


def _names(saved: _Saved) -> list[list[str]]:
    """Return the names of each group's parameters, in the group's order."""
    file, tree, params = saved.file, saved.tree, saved.params
    flats, lists = tree.get(_FLAT), tree.get(_LISTS)
    if flats is not None:
        # A group of flat masters has no shapes.
        names = [list(params)] if saved.names is None else saved.names
        sizes = [flat.num_elements for flat in flats]
        if not params.keys() >= set(chain.from_iterable(names)) or sizes != [
            sum(params[name].num_elements for name in group) for group in names
        ]:
            raise unclear(
                file,
                f"its masters are flat, in groups of {', '.join(map(str, sizes))} elements, "
                "and no names say which parameters each group has",
            )
        return names
    wanted = shapes_by_group(saved.groups, saved.state, lists)
    if saved.names is None:
        return _by_order(saved, wanted)
    # Half-precision optimizers drop the masters of frozen parameters, but not their names.
    told = [[name for name in group if name in params] for group in saved.names]
    enough = [len(group) >= len(shapes) for group, shapes in zip(told, wanted, strict=True)]
    if (
        told != saved.names
        or not all(enough)
        or (lists is None and list(map(len, told)) != list(map(len, wanted)))
    ):
        raise corrupt(file, "its names are not those of the model, or not of its parameters")
    return [
        assign([shapes], [(name, params[name].shape) for name in group], file)[0]
        for group, shapes in zip(saved.names, wanted, strict=True)
    ]


def _by_order(saved: _Saved, wanted: Sequence[Sequence[tuple[int, ...] | None]]) -> list[list[str]]:
    """Return the names of each group's parameters, by the model's order.

    Groups of experts are matched separately: DeepSpeed marks them, and cuts a group of experts
    that gets too large into several consecutive ones.
    """
    kinds: dict[str, list[int]] = {}
    for index, group in enumerate(saved.groups):
        kind = f"experts {group.get('name')}" if group.get("moe") else ""
        kinds.setdefault(kind, []).append(index)
    found: dict[int, list[str]] = {}
    for kind, indices in kinds.items():
        params = [
            (name, ref.shape)
            for name, ref in saved.params.items()
            if len(kinds) == 1 or bool(EXPERT.fullmatch(name)) == bool(kind)
        ]
        own = [wanted[index] for index in indices]
        try:
            names = assign(own, params, saved.file)
        except PatternError:
            if not kind:
                raise
            left = iter(assign([[*chain.from_iterable(own)]], params, saved.file)[0])
            names = [[next(left) for _ in group] for group in own]
        found |= dict(zip(indices, names, strict=True))
    return [found[index] for index in range(len(saved.groups))]


def _add_group(
    saved: _Saved, modules: Modules, index: int, names: Sequence[str], met: set[tuple[str, int]]
) -> None:
    """Add the parameters of a group."""
    numbers = saved.groups[index]["params"]
    if _FLAT not in saved.tree:
        masters = saved.tree[_LISTS][index] if _LISTS in saved.tree else [None] * len(names)
        for name, number, master in zip(names, numbers, masters, strict=True):
            _add(saved, modules, (name, index), met, saved.state.get(number, {}), master)
        return
    flat, state, start = saved.tree[_FLAT][index], saved.state.get(numbers[0], {}), 0
    for slot, ref in state.items():
        if isinstance(ref, TensorRef) and ref.shape and ref.num_elements != flat.num_elements:
            raise UnsupportedVersionError(
                f"{saved.file}: optimizer state {slot!r} is {list(ref.shape)} for "
                f"{flat.num_elements} flat elements and cannot be resharded"
            )
    for name in names:
        _add(saved, modules, (name, index), met, state, flat, start)
        start += saved.params[name].num_elements


def _add(
    saved: _Saved,
    modules: Modules,
    param: tuple[str, int],
    met: set[tuple[str, int]],
    state: Mapping[str, Any],
    master: TensorRef | None,
    start: int | None = None,
) -> None:
    """Add the master and the slots of a parameter, by its name and group, unless it is in ``met``.

    Expert-parallel ranks repeat the parameters outside experts, and stages repeat tied modules.
    ``start`` is its first element in flat tensors; None if the tensors are its own.
    """
    name, weight, rank = param[0], saved.params[param[0]], saved.rank
    if master is not None:
        place = f"group {param[1]} belongs to {name}"
        check_master(modules.store, modules.directory, master, start or 0, weight, place)
    if (name, rank.tp) in met:
        return
    met.add((name, rank.tp))
    if master is not None:
        modules.shards.drop(TensorKey(name, WEIGHT), rank)
    values = state if master is None else {WEIGHT: master, **state}
    for slot, value in values.items():
        key = TensorKey(name, slot)
        is_tensor = isinstance(value, TensorRef)
        if is_tensor and start is not None and value.shape:
            span = 0, prod(weight.shape)
            modules.shards.add_flat(key, rank, value, weight.shape, start, span)
        elif is_tensor and start is None and (value.shape or not weight.shape):
            modules.shards.add_ref(key, rank, value)
        elif isinstance(value, TensorRef | int | float):
            modules.scalars.add(key, value)
