"""Keeps what a DeepSpeed checkpoint holds besides tensors: every key has a policy.

``reshard`` and ``replicate`` keep the value, as tensors or in ``extra``. ``reseed`` keeps only the
first rank's value, and a run in another layout must make its own. ``drop`` does not keep it, and
notes the reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucp_core.formats.deepspeed import keys
from ucp_core.manifest import Item

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ucp_core.formats.deepspeed.reading.topology import Native
    from ucp_core.formats.shared import Assembly


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
