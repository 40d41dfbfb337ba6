"""Keeps what a DeepSpeed checkpoint holds besides tensors: every key has a policy.

``reshard`` and ``replicate``: kept, as tensors or in ``extra``. ``reseed``: only the first rank's
value is kept, and a run in another layout must make its own. ``drop``: not kept, with the reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucp_core.errors import ForeignClassError
from ucp_core.formats.shared import json_value
from ucp_core.manifest import Item

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ucp_core.formats.deepspeed.reading.topology import Native
    from ucp_core.storage import Store

_TENSORS = "its tensors, or where they lie"
_LAYOUT = "describes the layout it was saved under"
_REPLICATE = "replicate"

#: Keys of model files that DeepSpeed itself writes.
_MODEL = {
    "module": Item("reshard", _TENSORS),
    "optimizer": Item("reshard", _TENSORS),
    "param_shapes": Item("reshard", _TENSORS),
    "buffer_names": Item("reshard", "roles of its tensors"),
    "frozen_param_shapes": Item("reshard", _TENSORS),
    "frozen_param_fragments": Item("reshard", _TENSORS),
    "shared_params": Item("reshard", "ties of its tensors"),
    "dp_world_size": Item("drop", _LAYOUT),
    "mp_world_size": Item("drop", _LAYOUT),
    "checkpoint_parallel_dimensions": Item("drop", _LAYOUT),
    "universal_checkpoint_info": Item("drop", _LAYOUT),
    "ds_version": Item(_REPLICATE, "in source"),
    "num_experts": Item("drop", _LAYOUT),
    "ds_autoep_layers": Item("drop", _LAYOUT),
}
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
#: Keys of model files that are kept under their own name.
_NAMED = ("lr_scheduler", "data_sampler", "random_ltd", "ds_config", "sparse_tensor_module_names")

#: Keys of ZeRO's files.
_OPTIM = {
    "zero_stage": Item("drop", _LAYOUT),
    "group_paddings": Item("drop", _LAYOUT),
    "param_alignment_paddings": Item("drop", _LAYOUT),
    "partition_count": Item("drop", _LAYOUT),
    "ds_zero_partition_groups": Item("drop", _LAYOUT),
    "universal_checkpoint_info": Item("drop", _LAYOUT),
    "ds_version": Item(_REPLICATE, "in source"),
}


class Extras:
    """Collects ``extra``, small values by name, and ``items``, policies by key."""

    def __init__(self, store: Store, directory: str) -> None:
        self.extra: dict[str, Any] = {}
        self.items: dict[str, Item] = {}
        self._store = store
        self._directory = directory

    def add_model(self, native: Native) -> None:
        """Add the keys of the first rank's model file; each rank has such a file."""
        tree, file, num_ranks = native.first, native.model[0, 0], native.tp * native.pp
        counters = {key: tree[key] for key in _COUNTERS if isinstance(tree.get(key), int)}
        self.extra["counters"] = counters
        for key, value in tree.items():
            if key in _MODEL:
                self.items[key] = _MODEL[key]
            elif key in _COUNTERS:
                self.items[key] = Item(_REPLICATE, "in extra: counters")
            elif value is None and key in _NAMED:
                self.items[key] = Item("drop", "it is None")
            elif key in _NAMED:
                self._keep(self.extra, key, value, key, file, num_ranks)
            else:
                client = self.extra.setdefault("client_state", {})
                self._keep(client, key, value, str(key), file, num_ranks, exact=True)

    def add_optim(self, rest: Mapping[str, Any], file: str) -> None:
        """Add the keys of the first rank's optimizer state that are no tensors."""
        kept: dict[str, Any] = {}
        for key, value in rest.items():
            if key in _OPTIM:
                self.items[f"optimizer.{key}"] = _OPTIM[key]
            elif key == "loss_scaler":
                self._keep(self.extra, "loss_scaler", value, "optimizer.loss_scaler", file)
            else:
                self._keep(kept, key, value, f"optimizer.{key}", file)
        if kept:
            self.extra["optimizer"] = kept

    def _keep(
        self,
        target: dict[str, Any],
        key: Any,
        value: Any,
        item: str,
        file: str,
        num_ranks: int = 1,
        *,
        exact: bool = False,
    ) -> None:
        where = f"{file}: {item}"
        try:
            kept = json_value(value, self._store, self._directory, where, exact=exact)
        except ForeignClassError as error:
            self.items[item] = Item("drop", str(error))
            return
        target[str(key)] = kept
        if "rng" in item and num_ranks > 1:
            note = f"each of {num_ranks} ranks had its own; extra has that of the first"
            self.items[item] = Item("reseed", note)
        else:
            self.items[item] = Item(_REPLICATE, "in extra")
