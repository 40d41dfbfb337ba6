"""The optimizer of a DeepSpeed checkpoint without ZeRO: one file has all of it, by number."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from ucp_core.converters.deepspeed.reading.weights import WEIGHT, Modules
from ucp_core.converters.deepspeed.reading.zero import param_shapes
from ucp_core.converters.files.torch_reader import TensorRef
from ucp_core.converters.shared.optimizer_order import assign, largest_shape, unclear
from ucp_core.converters.shared.shards import Rank, Run
from ucp_core.converters.shared.values import Scalars, json_value
from ucp_core.errors import CheckpointCorruptError, UnsupportedVersionError
from ucp_core.statemap import DTYPE_BYTES, TensorKey

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ucp_core.converters.deepspeed.reading.extras import Extras
    from ucp_core.converters.deepspeed.reading.topology import Native
    from ucp_core.converters.shared.groups import Groups

_INNER = "optimizer_state_dict"
_FLAT = "fp32_groups_flat"
_LISTS = "fp32_groups"


def add_plain(
    native: Native, modules: Modules, scalars: Scalars, groups: Groups, extras: Extras
) -> None:
    """Add the slots and masters that model files hold; nothing where there was no optimizer.

    Raises:
        PatternError: Which parameter is which cannot be told.
        CheckpointCorruptError: Shapes of model and optimizer contradict each other.
        UnsupportedVersionError: It is a kind of optimizer that cannot be laid out again.
    """
    for mp in range(native.tp * native.pp):
        file = native.model[0, mp]
        tree = native.files.trees[file].get("optimizer")
        if tree is None:
            continue
        if not isinstance(tree, dict):
            raise CheckpointCorruptError(f"{file}: optimizer is no dict", file=file)
        if native.pp > 1 or native.experts:
            raise UnsupportedVersionError(
                f"{file}: without ZeRO, pipelines and experts keep no names of the optimizer's "
                "parameters; save with ZeRO stage 1",
                file=file,
            )
        rank = native.rank(mp)
        params = modules.order.get(rank.tp, [])
        shapes = param_shapes(native.files.trees[file], file)
        names = None if shapes is None else [list(group) for group in shapes]
        optimizer = _Optimizer(native, tree, file, params, names)
        optimizer.add(rank, modules, scalars)
        trained = {name for names in optimizer.names() for name in names}
        modules.roles |= {name: "frozen" for name, _ in params if name not in trained}
        store, directory = native.files.store, native.files.directory
        values = [
            json_value({k: v for k, v in g.items() if k != "params"}, store, directory)
            for g in optimizer.groups
        ]
        groups.add(list(zip(values, optimizer.names(), strict=True)))
        if mp == 0:
            extras.add_optim(optimizer.rest())


class _Optimizer:
    """A saved optimizer and the model's parameters, in their order.

    Attributes:
        groups: Its groups as they were saved.
    """

    def __init__(
        self,
        native: Native,
        tree: Mapping[str, Any],
        file: str,
        params: Sequence[tuple[str, TensorRef]],
        names: Sequence[Sequence[str]] | None,
    ) -> None:
        self._tree = tree
        self._file = file
        inner = tree.get(_INNER, tree)
        if not isinstance(inner, dict) or not isinstance(inner.get("param_groups"), list):
            raise CheckpointCorruptError(f"{file}: optimizer has no param_groups", file=file)
        self.groups: list[Mapping[str, Any]] = inner["param_groups"]
        self._state: Mapping[Any, Any] = inner.get("state") or {}
        self._shapes = {name: ref.shape for name, ref in params}
        if _FLAT in tree or _LISTS in tree:
            self._names = self._by_masters(native, params)
        elif names is not None:
            self._names = {i: list(group) for i, group in enumerate(self._told(names))}
        else:
            wanted = [
                [largest_shape(self._state.get(number, {})) for number in group["params"]]
                for group in self.groups
            ]
            self._names = assign(wanted, list(self._shapes.items()), file)

    def _told(self, names: Sequence[Sequence[str]]) -> Sequence[Sequence[str]]:
        """Return the names that ``param_shapes`` gives, which DeepSpeed itself leaves out here."""
        counts = [len(group) for group in names], [len(g["params"]) for g in self.groups]
        strange = [name for group in names for name in group if name not in self._shapes]
        if counts[0] != counts[1] or strange:
            raise CheckpointCorruptError(
                f"{self._file}: param_shapes names groups of {counts[0]} parameters, the optimizer "
                f"has groups of {counts[1]}"
                + (f", and the model has no {strange[0]}" if strange else ""),
                file=self._file,
            )
        return names

    def _by_masters(
        self, native: Native, params: Sequence[tuple[str, TensorRef]]
    ) -> dict[int, list[str]]:
        """Return the names of each group's parameters, whose weights its masters round to."""
        # numpy takes 80 ms to import, and ZeRO's files do without.
        from ucp_core.converters.shared.evidence import match_flat, match_masters

        store, directory = native.files.store, native.files.directory
        taken: set[str] = set()
        found: dict[int, list[str]] = {}
        for index in range(len(self.groups)):
            names: Sequence[str | None] | None
            if _FLAT in self._tree:
                names = match_flat(store, directory, self._tree[_FLAT][index], params, taken)
            else:
                names = match_masters(store, directory, self._tree[_LISTS][index], params, taken)
            found[index] = [name for name in names or () if name is not None]
            if names is None or None in names:
                raise unclear(
                    self._file,
                    f"masters of group {index}, after {len(found[index])}, round to no weight of "
                    "the model that is left: the file mixes two saves, or was changed",
                )
        return found

    def names(self) -> list[list[str]]:
        """Return the names of every group's parameters."""
        return [self._names.get(index, []) for index in range(len(self.groups))]

    def rest(self) -> dict[str, Any]:
        """Return what is no tensor of a parameter."""
        known = {_INNER, _FLAT, _LISTS, "state", "param_groups"}
        return {key: value for key, value in self._tree.items() if key not in known}

    def add(self, rank: Rank, modules: Modules, scalars: Scalars) -> None:
        """Add masters and slots of all parameters."""
        for index, group in enumerate(self.groups):
            names = self._names.get(index, [])
            if _FLAT in self._tree:
                self._add_flat(rank, modules, scalars, index, names)
                continue
            masters = self._tree.get(_LISTS)
            for place, (name, number) in enumerate(zip(names, group["params"], strict=True)):
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
        self, rank: Rank, modules: Modules, scalars: Scalars, index: int, names: Sequence[str]
    ) -> None:
        """Add a group whose parameters were flattened into one tensor, without padding."""
        flat = self._tree[_FLAT][index]
        number = self.groups[index]["params"][0]
        state = self._state.get(number, {})
        slots = {k: v for k, v in state.items() if isinstance(v, TensorRef) and v.shape}
        start = 0
        for name in names:
            shape = self._shapes[name]
            stop = start + prod(shape)
            modules.shards.drop(TensorKey(name, WEIGHT), rank)
            for slot, ref in ((WEIGHT, flat), *slots.items()):
                if ref.num_elements != flat.num_elements:
                    raise UnsupportedVersionError(
                        f"{self._file}: optimizer state {slot!r} is {list(ref.shape)} for "
                        f"{flat.num_elements} flat elements and cannot be laid out again",
                        file=self._file,
                        slot=slot,
                    )
                run = Run(
                    ref.file, ref.offset_bytes + start * DTYPE_BYTES[ref.dtype], 0, prod(shape)
                )
                modules.shards.add_run(TensorKey(name, slot), rank, ref.dtype, shape, run)
            for slot, value in state.items():
                if slot not in slots and isinstance(value, TensorRef | int | float):
                    scalars.add(TensorKey(name, slot), value)
            start = stop
