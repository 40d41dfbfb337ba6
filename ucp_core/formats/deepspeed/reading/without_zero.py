"""Reads the optimizer of a DeepSpeed checkpoint without ZeRO, which numbers its parameters.

The file names them in ``param_shapes``, or in ``param_names``, which torch's optimizers keep since
2.6 if they were made of ``named_parameters()``. Otherwise the numbers follow the model's order, and
the shapes of each group must fit it in one way only. Float32 masters must then round to the
weights.
"""

from __future__ import annotations

import re
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from ucp_core.errors import CheckpointCorruptError, PatternError, UnsupportedVersionError
from ucp_core.formats.deepspeed.keys import EXPERT
from ucp_core.formats.deepspeed.reading.extras import add_optimizer_values
from ucp_core.formats.deepspeed.reading.weights import WEIGHT, LayerFiles, Modules
from ucp_core.formats.deepspeed.reading.zero import param_shapes
from ucp_core.formats.shared import (
    DISTRIBUTE_IT,
    NAME_THEM,
    Rank,
    assign,
    check_numbers,
    is_master_of,
    largest_shape,
    unclear,
)
from ucp_core.geometry import TensorKey
from ucp_core.manifest import Item
from ucp_core.torch_files import TensorRef

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ucp_core.formats.deepspeed.reading.topology import Native

    Params = Sequence[tuple[str, TensorRef]]

#: Keys of half-precision optimizers: torch's optimizer, and its masters by group.
INNER = "optimizer_state_dict"
FLAT = "fp32_groups_flat"
LISTS = "fp32_groups"
#: The key of a group's names in torch's optimizers.
_NAMES = "param_names"
_EP_GROUP = "ep_size_"
_TIED_NAME = re.compile(r"tied_modules\.([^.]+)\.(.+)")


def read_layer_files(native: Native) -> LayerFiles:
    """Return the tensors of the layer files that each stage's optimizer numbers.

    Layer files do not name their stage. ``param_shapes`` name the parameters of a stage, and also
    show which layer's tensor belongs to a tied module.
    """
    found = LayerFiles()
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
                found.names[layer, match[2]] = name
                break
    for mp, stage in enumerate(named):
        own = layers.get(native.rank(mp).tp, {}).items()
        refs = {found.fqn(layer, str(n)): ref for layer, tree in own for n, ref in tree.items()}
        found.params[mp] = [(n, refs[n]) for group in stage for n in group if n in refs]
    return found


def add_without_zero(native: Native, modules: Modules) -> None:
    """Add the slots and masters of the model files; nothing if no optimizer was saved.

    Raises:
        PatternError: The files do not say which state belongs to which parameter.
        CheckpointCorruptError: Shapes of model and optimizer contradict each other.
        UnsupportedVersionError: The optimizer's state cannot be resharded.
    """
    met: set[tuple[str, int]] = set()
    for number, source in enumerate(_sources(native, modules)):
        optimizer = _Optimizer(native, source)
        if number == 0:
            add_optimizer_values(modules, optimizer.rest(), source.file)
        if optimizer.is_unnamed:
            modules.items["optimizer.param_groups"] = Item(
                "drop",
                "no parameter has a state, so nothing shows how the parameters belong to the "
                f"groups of {', '.join(str(len(g['params'])) for g in optimizer.groups)} "
                "parameters",
            )
            continue
        optimizer.add(source.rank, modules, met)
        trained = set(chain.from_iterable(optimizer.names))
        modules.roles |= {name: "frozen" for name, _ in source.params if name not in trained}
        unnamed = [{k: v for k, v in g.items() if k != _NAMES} for g in optimizer.groups]
        modules.add_groups(unnamed, optimizer.names, source.file)


class _SavedOptimizer(NamedTuple):
    """One saved optimizer."""

    file: str
    tree: Mapping[str, Any]
    #: Owner of its shards. The weights of all stages of a pipeline belong to the first stage.
    rank: Rank
    params: Params  #: Parameters that it can number, in the model's order.
    #: Names by group, if the file has names; frozen parameters can be among them.
    names: list[list[str]] | None
    remedy: str = DISTRIBUTE_IT  #: Advice if the parameters cannot be identified.


def _sources(native: Native, modules: Modules) -> Iterator[_SavedOptimizer]:
    """Yield the optimizers of all model-parallel and expert-parallel ranks that saved one."""
    for mp in range(native.tp * native.pp):
        file = native.model[0, mp]
        tree = native.files.trees[file].get("optimizer")
        if tree is None:
            continue
        if native.experts:
            yield from _of_experts(native, modules, mp)
            continue
        tree = _checked(tree, file)
        shapes = param_shapes(native.files.trees[file], file)
        names = None if shapes is None else [list(group) for group in shapes]
        rank = Rank(0, native.rank(mp).tp)
        if modules.pipeline is not None:
            # The optimizer of a stage has its own names, which are not the model's.
            if names is None and _has_state(tree):
                raise unclear(
                    file,
                    "a pipeline stage numbers its own parameters, and no param_shapes name them",
                )
            yield _SavedOptimizer(file, tree, rank, modules.pipeline.params.get(mp, []), names)
            continue
        params = modules.order.get(rank.tp, [])
        yield _SavedOptimizer(
            file, tree, rank, params, names or _kept_names(tree, params), NAME_THEM
        )


def _checked(tree: Any, file: str) -> Mapping[str, Any]:
    if not isinstance(tree, dict):
        raise CheckpointCorruptError(f"{file}: optimizer is not a dict", file=file)
    return tree


def _has_state(tree: Mapping[str, Any]) -> bool:
    """Return whether an optimizer holds state for any parameter: plain SGD does not."""
    inner = tree.get(INNER, tree)
    state = inner.get("state") or {} if isinstance(inner, dict) else {}
    return FLAT in tree or LISTS in tree or any(state.values())


def _kept_names(tree: Mapping[str, Any], params: Params) -> list[list[str]] | None:
    """Return the names that an optimizer keeps, by group; None unless all are the model's."""
    inner = tree.get(INNER, tree)
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return None
    names = [group.get(_NAMES) for group in groups]
    if not names or not all(isinstance(group, list) for group in names):
        return None
    found = [[str(name) for name in group] for group in names]
    joined = list(chain.from_iterable(found))
    is_of_model = {name for name, _ in params}.issuperset(joined)
    return found if is_of_model and len(set(joined)) == len(joined) else None


def _of_experts(native: Native, modules: Modules, mp: int) -> Iterator[_SavedOptimizer]:
    """Yield the optimizers of the expert-parallel ranks: each has its own experts, and the rest."""
    if native.pp > 1:
        raise UnsupportedVersionError(
            f"{native.files.directory}: experts in a pipeline without ZeRO keep no names of the "
            "optimizer's parameters; save with ZeRO stage 1",
            path=native.files.directory,
        )
    files = {ep: file for (ep, of), file in native.expert_optim.items() if of == mp}
    degree = 1 + max(files, default=0)
    for file in files.values():
        tree = _checked(native.files.trees[file].get("optimizer"), file)
        degree = max(degree, _named_degree(tree, file))
    missing = [f"expp_rank_{ep}_mp_rank_{mp:02d}_optim_states.pt" for ep in range(degree)]
    missing = [name for ep, name in enumerate(missing) if ep not in files]
    if missing:
        raise CheckpointCorruptError(
            f"{native.files.directory} lacks {', '.join(missing[:4])}, the optimizer of experts: "
            "the checkpoint was not copied or saved completely; use another one",
            path=native.files.directory,
            missing=tuple(missing),
        )
    for ep, file in sorted(files.items()):
        tree = _checked(native.files.trees[file].get("optimizer"), file)
        params = _with_experts(native, modules, mp, (ep, degree), file)
        yield _SavedOptimizer(file, tree, native.rank(mp), params, None)


def _named_degree(tree: Mapping[str, Any], file: str) -> int:
    """Return the number of expert-parallel ranks in the names of groups, 1 without one."""
    inner = tree.get(INNER, tree)
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    names = {str(g.get("name", "")) for g in groups or () if isinstance(g, dict) and g.get("moe")}
    degrees = {int(n[len(_EP_GROUP) :]) for n in names if n[len(_EP_GROUP) :].isdecimal()}
    if len(degrees) > 1:
        raise UnsupportedVersionError(
            f"{file}: layers of experts with {sorted(degrees)} expert-parallel ranks, without "
            "ZeRO: no file says which experts each rank has; save with ZeRO stage 1",
            file=file,
        )
    return max(degrees, default=1)


def _with_experts(
    native: Native, modules: Modules, mp: int, ep: tuple[int, int], file: str
) -> Params:
    """Return the parameters of one expert-parallel rank, with its experts in their places.

    A layer registers its gate, then its experts, which have their own files.
    """
    rank, degree = ep
    held: dict[str, list[tuple[int, str, TensorRef]]] = {}
    for (_, number, of), name in sorted(native.experts.items()):
        if of == mp:
            for fqn, ref in native.files.trees[name].items():
                match = EXPERT.fullmatch(str(fqn))
                if match is not None and isinstance(ref, TensorRef):
                    held.setdefault(match[1], []).append((number, str(fqn), ref))
    behind: dict[str, list[tuple[str, TensorRef]]] = {}
    params = list(modules.order.get(native.rank(mp).tp, []))
    for prefix, experts in held.items():
        layer = prefix.removesuffix("experts.deepspeed_experts.")
        gates = [name for name, _ in params if name.startswith(f"{layer}gate.")]
        total = 1 + max(number for number, _, _ in experts)
        if not gates or total % degree:
            raise unclear(
                file,
                f"{layer} has {total} experts over {degree} expert-parallel ranks"
                + ("" if gates else " and no gate before them"),
            )
        local = total // degree
        mine = [(n, ref) for number, n, ref in experts if number // local == rank]
        behind.setdefault(gates[-1], []).extend(mine)
    return [item for name, ref in params for item in ((name, ref), *behind.get(name, ()))]


class _Optimizer:
    """A saved optimizer and the model's parameters, in their order.

    Attributes:
        names: The parameters of each group, in the group's order.
        is_unnamed: Whether the files lack names, but no parameter has state that could go to a
            wrong one.
    """

    def __init__(self, native: Native, source: _SavedOptimizer) -> None:
        self._store, self._directory = native.files.store, native.files.directory
        self._remedy = source.remedy
        self._tree = tree = source.tree
        self._file = file = source.file
        self._params = dict(source.params)
        inner = tree.get(INNER, tree)
        if not isinstance(inner, dict) or not isinstance(inner.get("param_groups"), list):
            raise CheckpointCorruptError(f"{file}: optimizer has no param_groups", file=file)
        self.groups: list[Mapping[str, Any]] = inner["param_groups"]
        self._state: Mapping[Any, Any] = inner.get("state") or {}
        # A group of flat masters has one parameter, the flat tensor.
        flats, lists = tree.get(FLAT), tree.get(LISTS)
        masters = lists if flats is None else [[flat] for flat in flats]
        check_numbers(self.groups, masters, file)
        self.is_unnamed = False
        if flats is not None:
            self.names = self._of_flats(flats, source.names)
            self._check_flat(flats)
            return
        wanted = [
            [ref.shape for ref in lists[index]]
            if lists is not None
            else [largest_shape(self._state.get(n, {})) for n in group["params"]]
            for index, group in enumerate(self.groups)
        ]
        if source.names is not None:
            self.names = self._named(source.names, wanted)
        else:
            self.names = self._by_order_if_any(wanted)
        if lists is not None:
            self._check_lists(lists)

    def _named(
        self, names: Sequence[Sequence[str]], wanted: Sequence[Sequence[tuple[int, ...] | None]]
    ) -> list[list[str]]:
        """Return the names in the file, after checks against the optimizer's state.

        Half-precision optimizers drop the masters of frozen parameters, but not their names.
        """
        strange = [name for group in names for name in group if name not in self._params]
        counts = [len(group) for group in names], [len(group) for group in wanted]
        is_short = any(n < m for n, m in zip(*counts, strict=False))
        if (
            strange
            or is_short
            or len(names) != len(wanted)
            or (LISTS not in self._tree and counts[0] != counts[1])
        ):
            raise CheckpointCorruptError(
                f"{self._file}: groups of {counts[0]} parameters have names, the optimizer "
                f"has groups of {counts[1]}"
                + (f", and the model has no {strange[0]}" if strange else ""),
                file=self._file,
            )
        found = []
        for group, shapes in zip(names, wanted, strict=True):
            params = [(name, self._params[name].shape) for name in group]
            found += assign([shapes], params, self._file, self._remedy)
        return found

    def _by_order_if_any(
        self, wanted: Sequence[Sequence[tuple[int, ...] | None]]
    ) -> list[list[str]]:
        """Return the names by the model's order; none if it is unclear and there is no state."""
        try:
            return self._by_order(wanted)
        except PatternError:
            if _has_state(self._tree):
                raise
            self.is_unnamed = True
            return [[] for _ in self.groups]

    def _by_order(self, wanted: Sequence[Sequence[tuple[int, ...] | None]]) -> list[list[str]]:
        """Return the names of each group's parameters, by the model's order.

        Groups of experts are matched separately: DeepSpeed marks them, and cuts a group of experts
        that gets too large into several consecutive ones.
        """
        kinds: dict[str, list[int]] = {}
        for index, group in enumerate(self.groups):
            is_cut = bool(group.get("moe"))
            kinds.setdefault(f"experts {group.get('name')}" if is_cut else "", []).append(index)
        found: dict[int, list[str]] = {}
        for kind, indices in kinds.items():
            params = [
                (name, ref.shape)
                for name, ref in self._params.items()
                if len(kinds) == 1 or bool(EXPERT.fullmatch(name)) == bool(kind)
            ]
            own = [wanted[index] for index in indices]
            try:
                names = assign(own, params, self._file, self._remedy)
            except PatternError:
                if not kind:
                    raise
                joined = list(chain.from_iterable(own))
                left = iter(assign([joined], params, self._file)[0])
                names = [[next(left) for _ in group] for group in own]
            found |= dict(zip(indices, names, strict=True))
        return [found[index] for index in range(len(self.groups))]

    def _of_flats(
        self, flats: Sequence[TensorRef], names: Sequence[Sequence[str]] | None
    ) -> list[list[str]]:
        """Return the names of groups whose masters are one flat tensor each, without padding."""
        sizes = [flat.num_elements for flat in flats]
        found = [list(self._params)] if names is None else [list(group) for group in names]
        if not self._params.keys() >= set(chain.from_iterable(found)) or sizes != [
            sum(self._params[name].num_elements for name in group) for group in found
        ]:
            raise unclear(
                self._file,
                f"its masters are flat, in groups of {', '.join(map(str, sizes))} elements, "
                "and no names say which parameters each group has",
                self._remedy,
            )
        return found

    def _check_flat(self, flats: Sequence[TensorRef]) -> None:
        for index, (flat, names) in enumerate(zip(flats, self.names, strict=True)):
            start = 0
            for name in names:
                self._check_master(flat, start, name, index)
                start += self._params[name].num_elements

    def _check_lists(self, lists: Sequence[Sequence[TensorRef]]) -> None:
        for index, (masters, names) in enumerate(zip(lists, self.names, strict=True)):
            for master, name in zip(masters, names, strict=True):
                self._check_master(master, 0, name, index)

    def _check_master(self, masters: TensorRef, start: int, name: str, index: int) -> None:
        weight = self._params[name]
        if not is_master_of(self._store, self._directory, masters, start, weight):
            raise unclear(
                self._file,
                f"by names and shapes a master of group {index} belongs to {name}, but it does "
                "not round to its weights: the group has an order of its own, or the file "
                "mixes two saves",
                self._remedy,
            )

    def rest(self) -> dict[str, Any]:
        """Return the optimizer's values that are not tensors of a parameter."""
        known = {INNER, FLAT, LISTS, "state", "param_groups"}
        return {key: value for key, value in self._tree.items() if key not in known}

    def add(self, rank: Rank, modules: Modules, met: set[tuple[str, int]]) -> None:
        """Add masters and slots of all parameters that are not in ``met``.

        Expert-parallel ranks repeat the parameters outside experts, and stages repeat tied modules.
        """
        for index, group in enumerate(self.groups):
            if FLAT in self._tree:
                self._add_flat(rank, modules, index, met)
                continue
            masters = self._tree.get(LISTS)
            numbered = zip(self.names[index], group["params"], strict=True)
            for place, (name, number) in enumerate(numbered):
                if (name, rank.tp) in met:
                    continue
                met.add((name, rank.tp))
                if masters is not None:
                    modules.shards.replace_ref(TensorKey(name, WEIGHT), rank, masters[index][place])
                for slot, value in self._state.get(number, {}).items():
                    is_scalar = isinstance(value, TensorRef) and not value.shape
                    if isinstance(value, TensorRef) and not (
                        is_scalar and self._params[name].shape
                    ):
                        modules.shards.add_ref(TensorKey(name, slot), rank, value)
                    elif isinstance(value, TensorRef | int | float):
                        modules.scalars.add(TensorKey(name, slot), value)

    def _add_flat(
        self, rank: Rank, modules: Modules, index: int, met: set[tuple[str, int]]
    ) -> None:
        """Add a group whose parameters were flattened into one tensor, without padding."""
        flat = self._tree[FLAT][index]
        state = self._state.get(self.groups[index]["params"][0], {})
        slots = {k: v for k, v in state.items() if isinstance(v, TensorRef) and v.shape}
        for slot, ref in slots.items():
            if ref.num_elements != flat.num_elements:
                raise UnsupportedVersionError(
                    f"{self._file}: optimizer state {slot!r} is {list(ref.shape)} for "
                    f"{flat.num_elements} flat elements and cannot be resharded",
                    file=self._file,
                    slot=slot,
                )
        start = 0
        for name in self.names[index]:
            shape = self._params[name].shape
            first, start = start, start + prod(shape)
            if (name, rank.tp) in met:
                continue
            met.add((name, rank.tp))
            modules.shards.drop(TensorKey(name, WEIGHT), rank)
            for slot, ref in ((WEIGHT, flat), *slots.items()):
                key, span = TensorKey(name, slot), (0, prod(shape))
                modules.shards.add_flat(key, rank, ref, shape, first, span)
            for slot, value in state.items():
                if slot not in slots and isinstance(value, TensorRef | int | float):
                    modules.scalars.add(TensorKey(name, slot), value)
