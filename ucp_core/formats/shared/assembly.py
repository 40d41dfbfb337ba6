"""Makes a checkpoint of everything that a reader has found in a folder, for all formats."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ucp_core.errors import CheckpointCorruptError, ForeignClassError
from ucp_core.formats.shared.shards import Shards
from ucp_core.formats.shared.values import NUMBER_DTYPES, Scalars, json_value, number_of
from ucp_core.geometry import Extent, StateMap, TensorEntry, TensorKey
from ucp_core.manifest import Item, Kind, Manifest
from ucp_core.native import Checkpoint
from ucp_core.numerics import BLOCK_BYTES
from ucp_core.storage import Store, join


@dataclass(slots=True)
class Assembly:
    """The findings of a reader; subclasses add fields that their format needs."""

    store: Store
    directory: str
    shards: Shards = field(default_factory=lambda: Shards(1))  #: Tensors that ranks hold parts of.
    #: Whole tensors; their fragments are proven to cover them.
    entries: dict[TensorKey, TensorEntry] = field(default_factory=dict)
    scalars: Scalars = field(default_factory=Scalars)  #: Tensors of one element.
    #: Checksums by file; only files with tensors matter.
    extents: dict[str, tuple[Extent, ...]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)  #: The optimizer's groups.
    extra: dict[str, Any] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)  #: Owner by alias.
    roles: dict[str, str] = field(default_factory=dict)  #: Roles; trained parameters have none.
    items: dict[str, Item] = field(default_factory=dict)  #: Policy of each key and file.
    #: Degrees of parallelism or counts of files of the saving run, for people.
    layout: dict[str, Any] = field(default_factory=dict)
    step: int = 0
    _group_keys: list[str] = field(default_factory=list)

    def put(self, entry: TensorEntry) -> None:
        """Add a tensor; raise ``CheckpointCorruptError`` if the name is taken."""
        if entry.key in self.entries:
            raise CheckpointCorruptError(
                f"{entry.key} is there twice, under different keys of the checkpoint"
            )
        self.entries[entry.key] = entry

    def put_number(self, key: TensorKey, value: float) -> None:
        """Add a number from a pickle as a 0-d tensor."""
        self.scalars.add(key, value)
        self.put(self.scalars.entries[key])

    def add_groups(
        self, groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]], where: str
    ) -> None:
        """Add hyper-parameters and names of one rank's groups, in order.

        Each pipeline stage knows only its own parameters and may lack a group, so groups of two
        ranks are the same group if their hyper-parameters are equal. Each rank has a group at most
        once.
        """
        met: set[int] = set()
        for index, (group, own) in enumerate(zip(groups, names, strict=True)):
            values = json_value(
                {name: value for name, value in group.items() if name != "params"},
                self.store,
                self.directory,
                f"{where}: param_groups[{index}]",
            )
            key = json.dumps(values, sort_keys=True)
            fits = [i for i, k in enumerate(self._group_keys) if k == key and i not in met]
            if fits:
                chosen = index if index in fits else fits[0]
            else:
                chosen = len(self.groups)
                self.groups.append({"params": [], **values})
                self._group_keys.append(key)
            met.add(chosen)
            params = self.groups[chosen]["params"]
            self.groups[chosen]["params"] = list(dict.fromkeys([*params, *own]))

    def keep(
        self,
        name: str,
        value: Any,
        file: str,
        *,
        item: str = "",
        into: dict[str, Any] | None = None,
        num_ranks: int = 1,
        exact: bool = False,
    ) -> None:
        """Keep a small value in ``extra``, and note its policy.

        Args:
            file: The file that has it, for messages.
            item: The key of the note; default: the name.
            into: The dict to put it in, if not ``extra`` itself.
            num_ranks: Number of ranks that have such a value; this one is the first rank's.
        """
        item = item or name
        where = f"{file}: {item}"
        try:
            kept = json_value(value, self.store, self.directory, where, exact=exact)
        except ForeignClassError as error:
            self.items[item] = Item("drop", str(error))
            return
        (self.extra if into is None else into)[name] = kept
        note = f"each of {num_ranks} ranks had its own; extra keeps the first rank's"
        is_rng = "rng" in item and num_ranks > 1
        self.items[item] = Item("reseed", note) if is_rng else Item("replicate", "in extra")

    def counted_step(self) -> int:
        """Return the first step that the optimizer counted; 0 if it counts none."""
        store = self.scalars.overlay(self.store)
        for key, entry in [*self.entries.items(), *self.scalars.entries.items()]:
            if key.slot == "step" and entry.shape == () and entry.dtype in NUMBER_DTYPES:
                file, start, size = entry.fragments[0][1:4]
                data = store.read_range(join(self.directory, file), start, size)
                return max(0, int(number_of(data, entry.dtype)))
        return 0

    def checkpoint(self, source: Mapping[str, Any], *, world_size: int = 0) -> Checkpoint:
        """Return the checkpoint with everything found."""
        entries = {**self.entries, **self.scalars.entries}
        used = {fragment.file for entry in entries.values() for fragment in entry.fragments}
        known = {key.fqn for key in entries}
        for alias, owner in self.ties.items():
            if owner not in known:
                raise CheckpointCorruptError(
                    f"{alias} should share the values of {owner}, which the checkpoint does "
                    "not hold"
                )
        manifest = Manifest(
            kind=Kind.FOREIGN,
            step=self.step,
            attempt=0,
            state_map=StateMap(
                entries=dict(sorted(entries.items())),
                block_bytes=BLOCK_BYTES,
                extents={name: self.extents[name] for name in sorted(used & self.extents.keys())},
            ),
            files={},
            param_groups=self.groups,
            extra=self.extra,
            source={**source, **({"layout": self.layout} if self.layout else {})},
            world_size=world_size,
            ties={alias: o for alias, o in sorted(self.ties.items()) if alias not in known},
            roles={fqn: role for fqn, role in sorted(self.roles.items()) if fqn in known},
            items=dict(sorted(self.items.items())),
            patterns=self.shards.patterns,
        )
        store = self.scalars.overlay(self.store)
        return Checkpoint(store=store, directory=self.directory, manifest=manifest)
