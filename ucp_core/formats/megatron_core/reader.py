"""Reads Megatron-core's ``torch_dist``: the container of torch DCP with its own keys.

Equal layers are one tensor in the files; here each layer has its own tensor. The distributed
optimizer has one tensor per parameter (``fully_reshardable``), or flat buffers of each
model-parallel rank without names (``dp_reshardable``); see ``flat_buffers``. Source:
``megatron/core/dist_checkpointing`` and ``megatron/core/optimizer/distrib_optimizer.py`` of
Megatron-core 0.16 and 0.19.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ucp_core.errors import (
    CheckpointNotFoundError,
    ForeignClassError,
    UnsupportedVersionError,
)
from ucp_core.formats.dcp import Container, read_container
from ucp_core.formats.megatron import TRACKER, assigned, located
from ucp_core.formats.megatron_core import flat_buffers, key_names
from ucp_core.formats.megatron_core.recognition import COMMON, CONFIG, NAME, is_checkpoint
from ucp_core.formats.refusals import missing
from ucp_core.formats.shared import (
    Assembly,
    arguments_of,
    refusing_nonsense,
    tells_padding,
    vocabulary_of,
)
from ucp_core.geometry import TensorKey
from ucp_core.language import Cut, Rules, place, strip_padding
from ucp_core.manifest import Item
from ucp_core.native import Checkpoint
from ucp_core.storage import Store, join
from ucp_core.torch_files import read_torch_file

_COMMON_KEY = "common_state/shard_0_1"
_BACKENDS = ("torch_dist",)
#: Objects of the distributed optimizer that describe the buffers of the saving run.
_LAYOUTS = (".per_bucket_numel", ".per_bucket_numel_unpadded", ".param_state_sharding_type")
#: The whole state of one model-parallel rank, pickled (``dp_zero_gather_scatter``).
_GATHERED = ".param_state"


def read(
    store: Store, directory: str, *, rules: Rules | None = None, tag: str | None = None
) -> Checkpoint:
    """Open a ``torch_dist`` checkpoint; only metadata and small items are read.

    See ``open_source`` for arguments and errors. It uses only ``unpadded`` of ``rules``, which says
    where the padding of a vocabulary begins: the metadata say the rest. ``tag`` is an iteration's
    folder.
    """
    where = located(store, directory, tag, is_checkpoint)
    if where is None:
        raise CheckpointNotFoundError(
            f"{directory} has no {CONFIG} of Megatron-core and no {TRACKER} that leads to one",
            path=directory,
        )
    config = _config(store, where)
    backend = config.get("sharded_backend")
    if backend not in _BACKENDS:
        raise UnsupportedVersionError(
            f"{where} was saved as {str(backend)[:40]!r}; only {', '.join(_BACKENDS)} can be read: "
            "load it with Megatron and save it with --ckpt-format torch_dist",
            path=where,
        )
    container = read_container(store, where)
    found = _ContainerReader(
        store, where, container=container, common=_common(container), rules=rules
    )
    found.read()
    version = str(config.get("sharded_backend_version", ""))
    return found.checkpoint({"format": NAME, "version": version})


def _config(store: Store, where: str) -> dict[str, Any]:
    path = join(where, CONFIG)
    if not store.exists(path):
        raise missing(where, [CONFIG])
    with refusing_nonsense(path, "Megatron-core"):
        return dict(json.loads(store.read(path)))


def _common(container: Container) -> dict[str, Any]:
    """Return the common state of all ranks: iteration, arguments, groups, schedule."""
    if _COMMON_KEY in container.blobs:
        ((_, found),) = container.values([_COMMON_KEY])
    elif COMMON in container.sizes:
        found = read_torch_file(container.store, container.directory, COMMON).tree
    else:
        raise missing(container.directory, [f"{COMMON} or an item {_COMMON_KEY}"])
    while isinstance(found, list | tuple) and len(found) == 1:
        found = found[0]
    with refusing_nonsense(container.directory, "Megatron-core"):
        return {str(key): value for key, value in found.items()}


@dataclass(slots=True, kw_only=True)
class _ContainerReader(Assembly):
    """The training state in a container, found from its keys."""

    container: Container
    common: dict[str, Any]
    rules: Rules | None = None
    is_local: bool = True
    objects: dict[str, list[str]] = field(default_factory=dict)

    def read(self) -> None:
        for key in self.container.blobs:
            if key != _COMMON_KEY:
                self.objects.setdefault(key_names.object_of(key), []).append(key)
        self._refuse_gathered()
        self._add_extra_states()
        models = [k for k in self.container.tensors if not key_names.is_optimizer(k)]
        self._add_tensors(models)
        self._add_buckets(models)
        self._strip_padding()
        self._add_common()
        self._add_groups()
        self._add_objects()
        self._add_roles(models)
        self.layout["layers"] = "local" if self.is_local else "fused"

    def _refuse_gathered(self) -> None:
        """Refuse state that is not a tensor: without it a run would restart its optimizer."""
        for key in self.objects:
            if key_names.is_optimizer(key) and key.endswith(_GATHERED):
                why = "holds the optimizer's state as gathered by one rank (dp_zero_gather_scatter)"
                raise self._unsupported(key, why)

    def _unsupported(self, key: str, why: str) -> UnsupportedVersionError:
        return UnsupportedVersionError(
            f"{self.container.where}: {key} {why}, which cannot be read: load it with the Megatron "
            "that saved it and save it with --dist-ckpt-optim-fully-reshardable"
        )

    def _add_extra_states(self) -> None:
        """Keep the modules' extra states. They are None without Transformer Engine."""
        keys = [key for key in self.objects if key.endswith("._extra_state")]
        found: dict[str, Any] = {}
        for shard in [shard for key in keys for shard in self.objects.pop(key)]:
            try:
                ((_, value),) = self.container.values([shard])
                parts = value if isinstance(value, list | tuple) else [value]
                if any(part is not None for part in parts):
                    self.is_local = False
                    found[shard] = self.container.as_json(value, shard)
            except ForeignClassError as error:
                self.is_local = False
                note = f"fp8 scaling is recomputed: the module's state cannot be kept: {error}"
                self.items[shard] = Item("drop", note)
        if found:
            self.extra["_extra_state"] = found
            note = "kept in extra; fp8 scaling is recomputed if it does not fit"
            self.items["_extra_state"] = Item("replicate", note)
        elif keys and self.is_local:
            self.items["_extra_state"] = Item("drop", f"{len(keys)} modules have none")

    def _add_tensors(self, models: list[str]) -> None:
        """Add parameters and states that are separate tensors, layer by layer."""
        keys: dict[str, TensorKey] = {}
        for key in self.container.tensors:
            named = key_names.slot_of(key)
            if named is not None:
                keys[key] = TensorKey(named[1], named[0])
            elif key_names.is_optimizer(key) and key_names.bucket_of(key) is None:
                raise self._unsupported(key, "has an unknown form of the distributed optimizer")
        self._refuse_flattened(keys)
        mastered = {name.fqn for name in keys.values() if name.slot == "weight"}
        copies = [key for key in models if key in mastered]
        keys |= {key: TensorKey(key, "weight") for key in models if key not in mastered}
        entries, self.extents = self.container.entries(keys)
        for entry in entries.values():
            for layer in key_names.unstacked(entry, is_local=self.is_local):
                self.put(layer)
        if copies:
            dtypes = sorted({self.container.tensors[key].dtype for key in copies})
            note = f"{len(copies)} copies in {', '.join(dtypes)} of weights that the optimizer has"
            self.items["model"] = Item("drop", note)
        else:
            self.items["model"] = Item("reshard", f"{len(models)} tensors")
        if mastered:
            note = f"{len(mastered)} parameters, fp32 weights among them"
            self.items["optimizer.state"] = Item("reshard", note)

    def _refuse_flattened(self, keys: dict[str, TensorKey]) -> None:
        """Refuse masters of another shape, where each rank flattened its shard."""
        for key, (fqn, slot) in keys.items():
            model = self.container.tensors.get(fqn)
            shape = self.container.tensors[key].shape
            if slot == "weight" and model is not None and model.shape != shape:
                why = f"is {list(shape)} and {fqn} {list(model.shape)}: a range of flattened "
                raise self._unsupported(key, f"{why}parameters (fully_sharded_model_space)")

    def _add_buckets(self, models: list[str]) -> None:
        """Replace the weights by the masters in the flat buffers, and add their states."""
        found = {}
        for key in self.container.tensors:
            bucket = key_names.bucket_of(key)
            if bucket is not None:
                found[bucket] = key
        if not found:
            return
        entries, extents = flat_buffers.decoded(self.container, found, models)
        for file, more in extents.items():
            merged = {*self.extents.get(file, ()), *more}
            self.extents[file] = tuple(sorted(merged))
        for entry in entries:
            for layer in key_names.unstacked(entry, is_local=self.is_local):
                self.entries[layer.key] = layer
        note = "flat buffers, matched by the weights in them"
        self.items["optimizer.distributed"] = Item("reshard", note)
        note = "copies of the weights that the optimizer has in fp32"
        self.items["model"] = Item("drop", note)

    def _strip_padding(self) -> None:
        """Drop the rows after a vocabulary's tokens, in every slot."""
        vocabulary = vocabulary_of(arguments_of(self.common))
        for key, entry in self.entries.items():
            if not entry.shape:
                continue
            rule = None if self.rules is None else self.rules.match(key.fqn, key.slot)
            cut = Cut(0, unpadded=vocabulary.extent(key.fqn, entry.shape[0]))
            if tells_padding(rule):
                cut = Cut(rule.dim, unpadded=rule.unpadded)
            if cut.unpadded is not None:
                shape = place(cut, (entry.shape,), name=str(key)).shape
                self.entries[key] = strip_padding(entry, shape)
        self.items |= vocabulary.item(self.entries)

    def _add_common(self) -> None:
        for key, value in self.common.items():
            if key == "optimizer":
                continue
            self.extra[key] = self.container.as_json(value, f"{COMMON}: {key}")
            self.items[key] = Item("replicate", "kept in extra")
        iteration = self.common.get("iteration")
        if isinstance(iteration, int) and iteration >= 0:
            self.step = iteration

    def _add_groups(self) -> None:
        """Name the parameters of the groups, and give each its step count."""
        states = [self.container.as_json(self.common.get("optimizer"), f"{COMMON}: optimizer")]
        for key in [key for key in self.objects if key.endswith(".optimizer")]:
            states += [
                self.container.as_json(v, k)
                for k, v in self.container.values(self.objects.pop(key))
            ]
        groups, steps, rest = key_names.split_optimizer(states)
        if rest:
            self.extra["optimizer"] = rest
            self.items["optimizer"] = Item("replicate", "everything but its groups, in extra")
        if not groups:
            return
        weights = {k.fqn: e.shape for k, e in self.entries.items() if k.slot == "weight"}
        trained = {key.fqn for key in self.entries if key.slot != "weight"} or set(weights)
        shapes = {fqn: shape for fqn, shape in weights.items() if fqn in trained}
        named, unsure = assigned(groups, shapes)
        self.groups = named
        note = f"{len(named)} groups; their parameters follow from Megatron's own rule"
        if unsure:
            note += f", which leaves out {len(unsure)} parameters: {', '.join(unsure[:3])}"
        self.items["optimizer.param_groups"] = Item("replicate", note)
        for fqn, step in self._steps(named, unsure, steps):
            if TensorKey(fqn, "step") not in self.entries:
                self.put_number(TensorKey(fqn, "step"), step)

    def _steps(
        self, named: list[dict[str, Any]], unsure: list[str], common: list[float]
    ) -> Iterator[tuple[str, float]]:
        """Yield the step of every parameter: its group's, or else the one that all groups share."""
        own = [group.get("step") for group in named]
        counts = {step for step in own if isinstance(step, int | float)} or {*common[:1]}
        shared = next(iter(counts)) if len(counts) == 1 else None
        for group, step in [*zip(named, own, strict=True), ({"params": unsure}, None)]:
            count = step if isinstance(step, int | float) else shared
            if count is not None:
                yield from ((fqn, count) for fqn in group["params"])

    def _add_objects(self) -> None:
        """Keep the other sharded objects: random state, data cursor, bucket sizes."""
        for key, shards in self.objects.items():
            if key.endswith(_LAYOUTS):
                self.items[key] = Item("drop", "the layout of the flat buffers")
                continue
            try:
                values = {
                    shard.rsplit("/", 1)[-1]: self.container.as_json(value, shard, exact=True)
                    for shard, value in self.container.values(shards)
                }
            except ForeignClassError as error:
                self.items[key] = Item("drop", f"its value has an unknown class: {error}")
                continue
            self.extra[key] = values
            if "rng" in key:
                note = "kept in extra by model-parallel rank; other layouts derive their own"
                self.items[key] = Item("reseed", note)
            else:
                self.items[key] = Item("replicate", "kept in extra")
        self.items |= self.container.leftovers()

    def _add_roles(self, models: list[str]) -> None:
        slots: dict[str, int] = {}
        for key in self.entries:
            slots[key.fqn] = slots.get(key.fqn, 0) + 1
        if max(slots.values(), default=0) < 2 or not models:  # noqa: PLR2004 - no optimizer
            return
        for fqn, count in slots.items():
            if count == 1:
                self.roles[fqn] = "buffer" if fqn.endswith(_BUFFERS) else "frozen"


_BUFFERS = ("expert_bias", "local_tokens_per_expert", "inv_freq", "running_mean", "running_var")
