"""The optimizer of a DeepSpeed checkpoint without ZeRO: one file has all of it, by number."""

from __future__ import annotations

from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any

from ucp_core.errors import CheckpointCorruptError, PatternError, UnsupportedVersionError
from ucp_core.formats.deepspeed.reading.plain_names import NAMES, names_by_storage
from ucp_core.formats.deepspeed.reading.plain_pipeline import FLAT, INNER, LISTS
from ucp_core.formats.deepspeed.reading.plain_sources import Source, sources
from ucp_core.formats.deepspeed.reading.weights import WEIGHT, Modules
from ucp_core.formats.deepspeed.reading.zero import EXPERT
from ucp_core.formats.shared import (
    Rank,
    Run,
    Scalars,
    assign,
    check_numbers,
    interchangeable,
    json_value,
    largest_shape,
    match_flat,
    match_masters,
    unclear,
)
from ucp_core.geometry import DTYPE_BYTES, TensorKey
from ucp_core.manifest import Item
from ucp_core.torch_files import TensorRef

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ucp_core.formats.deepspeed.reading.extras import Extras
    from ucp_core.formats.deepspeed.reading.topology import Native
    from ucp_core.formats.shared import Groups


#: Of a group's keys, those that say which parameters it has.
_NUMBERED = ("params", NAMES)


def add_plain(
    native: Native, modules: Modules, scalars: Scalars, groups: Groups, extras: Extras
) -> None:
    """Add the slots and masters that model files hold; nothing where there was no optimizer.

    Raises:
        PatternError: Which parameter is which cannot be told.
        CheckpointCorruptError: Shapes of model and optimizer contradict each other.
        UnsupportedVersionError: It is a kind of optimizer that cannot be laid out again.
    """
    met: set[tuple[str, int]] = set()
    for number, source in enumerate(sources(native, modules)):
        optimizer = _Optimizer(native, source)
        if number == 0:
            extras.add_optim(optimizer.rest())
        if optimizer.is_unnamed:
            modules.items["optimizer.param_groups"] = Item(
                "drop",
                "no parameter has a state, so nothing tells which is in which of the groups of "
                f"{', '.join(str(len(g['params'])) for g in optimizer.groups)} parameters",
            )
            continue
        optimizer.add(source.rank, modules, scalars, met)
        trained = {name for names in optimizer.names() for name in names}
        modules.roles |= {name: "frozen" for name, _ in source.params if name not in trained}
        store, directory = native.files.store, native.files.directory
        values = [
            json_value({k: v for k, v in g.items() if k not in _NUMBERED}, store, directory)
            for g in optimizer.groups
        ]
        groups.add(list(zip(values, optimizer.names(), strict=True)))


class _Optimizer:
    """A saved optimizer and the model's parameters, in their order.

    Attributes:
        groups: Its groups as they were saved.
        is_unnamed: Nothing tells the names of its parameters, and nothing but hyper-parameters
            is lost by that.
    """

    def __init__(self, native: Native, source: Source) -> None:
        self._remedy = source.remedy
        self._tree = tree = source.tree
        self._file = file = source.file
        params, names = source.params, source.names
        inner = tree.get(INNER, tree)
        if not isinstance(inner, dict) or not isinstance(inner.get("param_groups"), list):
            raise CheckpointCorruptError(f"{file}: optimizer has no param_groups", file=file)
        self.groups: list[Mapping[str, Any]] = inner["param_groups"]
        self._state: Mapping[Any, Any] = inner.get("state") or {}
        self._shapes = {name: ref.shape for name, ref in params}
        # A group of flat masters has one parameter: the flat one.
        flats = tree.get(FLAT)
        masters = tree.get(LISTS) if flats is None else [[flat] for flat in flats]
        check_numbers(self.groups, masters, file)
        self.is_unnamed = False
        if FLAT in tree or LISTS in tree:
            self._names = self._by_masters(native, params, names or source.told)
        elif names is not None or source.told is not None:
            told = self._told(names or source.told or ())
            self._names = {i: list(group) for i, group in enumerate(told)}
        else:
            self._names = self._by_shapes_if_any()

    def _told(self, names: Sequence[Sequence[str]]) -> Sequence[Sequence[str]]:
        """Return the names that the file gives: DeepSpeed leaves out ``param_shapes`` here."""
        counts = [len(group) for group in names], [len(g["params"]) for g in self.groups]
        strange = [name for group in names for name in group if name not in self._shapes]
        if counts[0] != counts[1] or strange:
            raise CheckpointCorruptError(
                f"{self._file}: groups of {counts[0]} parameters have names, the optimizer "
                f"has groups of {counts[1]}"
                + (f", and the model has no {strange[0]}" if strange else ""),
                file=self._file,
            )
        numbers = chain.from_iterable(group["params"] for group in self.groups)
        for name, number in zip(chain.from_iterable(names), numbers, strict=True):
            shape = largest_shape(self._state.get(number, {}))
            # Factored state is smaller than its parameter, never larger.
            if shape is not None and prod(shape) > prod(self._shapes[name]):
                raise CheckpointCorruptError(
                    f"{self._file}: {name} is {list(self._shapes[name])}, but the state of the "
                    f"parameter of this name is {list(shape)}",
                    file=self._file,
                    fqn=name,
                )
        return names

    def _by_shapes_if_any(self) -> dict[int, list[str]]:
        """Return the names by shape; none where there is no state that could be another's."""
        try:
            return self._by_shapes()
        except PatternError:
            if any(self._state.values()):
                raise
            self.is_unnamed = True
            return {}

    def _by_shapes(self) -> dict[int, list[str]]:
        """Return the names of each group's parameters, by order and shape.

        Groups of experts are a matter by themselves: DeepSpeed marks them, and cuts a group of
        experts that gets too large into several, one behind the other.
        """
        kinds: dict[str, list[int]] = {}
        for index, group in enumerate(self.groups):
            is_cut = bool(group.get("moe"))
            kinds.setdefault(f"experts {group.get('name')}" if is_cut else "", []).append(index)
        is_split = len(kinds) > 1
        found: dict[int, list[str]] = {}
        for kind, indices in kinds.items():
            params = [
                (name, shape)
                for name, shape in self._shapes.items()
                if not is_split or bool(EXPERT.fullmatch(name)) == bool(kind)
            ]
            wanted = [
                [largest_shape(self._state.get(n, {})) for n in self.groups[index]["params"]]
                for index in indices
            ]
            try:
                names = assign(wanted, params, self._file, self._remedy)
            except PatternError:
                if not kind:
                    raise
                joined = [shape for group in wanted for shape in group]
                left = iter(assign([joined], params, self._file)[0])
                names = {place: [next(left) for _ in group] for place, group in enumerate(wanted)}
            found |= {indices[place]: group for place, group in names.items()}
        return found

    def _by_masters(
        self,
        native: Native,
        params: Sequence[tuple[str, TensorRef]],
        told: Sequence[Sequence[str]] | None,
    ) -> dict[int, list[str]]:
        """Return the names of each group's parameters, whose weights its masters round to."""
        store, directory = native.files.store, native.files.directory
        if FLAT in self._tree:
            stored = names_by_storage(store, directory, self._tree[FLAT], params)
            if stored is not None:
                return stored
        candidates = [params for _ in self.groups]
        refs = dict(params)
        is_told = told and len(told) == len(self.groups) and refs.keys() >= set(chain(*told))
        if told and is_told:
            candidates = [[(name, refs[name]) for name in group] for group in told]
        taken: set[str] = set()
        found: dict[int, list[str]] = {}
        for index in range(len(self.groups)):
            matched: Sequence[str | None] | None
            if FLAT in self._tree:
                flat = self._tree[FLAT][index]
                matched = match_flat(store, directory, flat, candidates[index], taken)
            else:
                masters = self._tree[LISTS][index]
                matched = match_masters(store, directory, masters, candidates[index], taken)
            found[index] = [name for name in matched or () if name is not None]
            if matched is None or None in matched:
                raise unclear(
                    self._file,
                    f"masters of group {index}, after {len(found[index])}, round to no weight of "
                    "the model that is left: the file mixes two saves, or was changed",
                    self._remedy,
                )
        checks = [(params, list(found.values()))]
        if is_told:
            # What another group has cannot be meant.
            checks = [(candidates[index], [names]) for index, names in found.items()]
        for held, groups in checks:
            alike = interchangeable(store, directory, held, groups)
            if alike is None:
                continue
            raise unclear(
                self._file,
                f"{alike[0]} and {alike[1]} have the same weights, and one of them was not "
                "trained, or is in another group",
                self._remedy,
            )
        return found

    def names(self) -> list[list[str]]:
        """Return the names of every group's parameters."""
        return [self._names.get(index, []) for index in range(len(self.groups))]

    def rest(self) -> dict[str, Any]:
        """Return what is no tensor of a parameter."""
        known = {INNER, FLAT, LISTS, "state", "param_groups"}
        return {key: value for key, value in self._tree.items() if key not in known}

    def add(
        self, rank: Rank, modules: Modules, scalars: Scalars, met: set[tuple[str, int]]
    ) -> None:
        """Add masters and slots of all parameters but those that other ranks have added.

        Ranks of experts repeat the others' parameters, and stages those of tied modules.
        """
        for index, group in enumerate(self.groups):
            names = self._names.get(index, [])
            if FLAT in self._tree:
                self._add_flat(rank, modules, scalars, index, met)
                continue
            masters = self._tree.get(LISTS)
            for place, (name, number) in enumerate(zip(names, group["params"], strict=True)):
                if (name, rank.tp) in met:
                    continue
                met.add((name, rank.tp))
                if masters is not None:
                    modules.shards.replace_ref(TensorKey(name, WEIGHT), rank, masters[index][place])
                self._add_state(rank, modules, scalars, name, self._state.get(number, {}))

    def _add_state(
        self, rank: Rank, modules: Modules, scalars: Scalars, name: str, state: Mapping[str, Any]
    ) -> None:
        for slot, value in state.items():
            if isinstance(value, TensorRef) and (value.shape or not self._shapes[name]):
                modules.shards.add_ref(TensorKey(name, slot), rank, value)
            elif isinstance(value, TensorRef | int | float):
                scalars.add(TensorKey(name, slot), value)

    def _add_flat(
        self,
        rank: Rank,
        modules: Modules,
        scalars: Scalars,
        index: int,
        met: set[tuple[str, int]],
    ) -> None:
        """Add a group whose parameters were flattened into one tensor, without padding."""
        flat = self._tree[FLAT][index]
        state = self._state.get(self.groups[index]["params"][0], {})
        slots = {k: v for k, v in state.items() if isinstance(v, TensorRef) and v.shape}
        for slot, ref in slots.items():
            if ref.num_elements != flat.num_elements:
                raise UnsupportedVersionError(
                    f"{self._file}: optimizer state {slot!r} is {list(ref.shape)} for "
                    f"{flat.num_elements} flat elements and cannot be laid out again",
                    file=self._file,
                    slot=slot,
                )
        start = 0
        for name in self._names.get(index, []):
            shape = self._shapes[name]
            first, start = start, start + prod(shape)
            if (name, rank.tp) in met:
                continue
            met.add((name, rank.tp))
            modules.shards.drop(TensorKey(name, WEIGHT), rank)
            for slot, ref in ((WEIGHT, flat), *slots.items()):
                offset_bytes = ref.offset_bytes + first * DTYPE_BYTES[ref.dtype]
                run = Run(ref.file, offset_bytes, 0, prod(shape))
                modules.shards.add_run(TensorKey(name, slot), rank, ref.dtype, shape, run)
            for slot, value in state.items():
                if slot not in slots and isinstance(value, TensorRef | int | float):
                    scalars.add(TensorKey(name, slot), value)
