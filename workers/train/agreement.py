"""Checks that all workers of an attempt have the same data, and register the same state."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from workers.collectives import on_host
from workers.data import DataLoader, DataOrder
from workers.errors import DataDiffersError, TaskError
from workers.train.executor import ShardedModel

log = logging.getLogger(__name__)


def agree_on_data(
    data: int | DataLoader,
    order: DataOrder,
    digest: str,
    *,
    restored: Mapping[str, Any],
    step: int,
    sharded: ShardedModel,
) -> dict[str, Any]:
    """Return what a checkpoint records about the data.

    Args:
        data: The number of samples, or what reads them.
        digest: Identifies them; "" for that of the loader.
        restored: The small named values of the version of ``step``.
        step: The step that the attempt resumes from.

    Raises:
        DataDiffersError: Workers, or this run and its checkpoint, have different data.
    """
    loader = data if isinstance(data, DataLoader) else None
    cursor: dict[str, Any] = {
        "data_digest": digest or (loader.digest if loader is not None else ""),
        "num_samples": None if loader is not None and loader.is_stream else order.num_samples,
        "global_batch": order.global_batch,
        "data_seed": order.seed,
    }
    if order.epoch is not None:
        cursor["epoch"] = list(order.epoch)
    loaded = loader.sampled if loader is not None else None
    if loaded is not None or "sampler" in restored:
        cursor["sampler"] = loaded.digest() if loaded is not None else 0
        restored = {"sampler": 0, **restored} if restored else restored
    before = {name: restored.get(name, value) for name, value in cursor.items()}
    changed = [
        f"{name} is {value} but the checkpoint of step {step} was made with {before[name]}"
        for name, value in cursor.items()
        # Data without a name may be given one.
        if before[name] != value and not (name == "data_digest" and not before[name])
    ]
    if changed:
        raise DataDiffersError(
            f"{'; '.join(changed)}. Samples would be lost or seen twice. Resume with the same "
            "data and batch, or start a new run",
            found=cursor,
            expected=before,
        )
    differing = [
        f"{name} (rank {sharded.mesh.rank} has {value})"
        for name, value in cursor.items()
        if not is_everywhere(repr(value), sharded.device)
    ]
    if differing:
        raise DataDiffersError(
            f"the workers have different training data: {', '.join(differing)}; give all nodes "
            "the same files, and with data.source=stdlib the same Python"
        )
    return cursor


def agree_on_registered(sharded: ShardedModel, saved: Mapping[str, Any], *, step: int) -> None:
    """Raise ``TaskError`` if the state that the script registered differs between workers.

    ``saved`` is the state in the version of ``step``; a warning names state that the script no
    longer registers.
    """
    values = sharded.registered.values()
    unknown = sorted(saved.keys() - values.keys())
    if unknown and sharded.mesh.rank == 0:
        told = ", ".join(unknown)
        log.warning("step %s has state of %s, which the script does not register now", step, told)
    if values and not is_everywhere(json.dumps(values, sort_keys=True), sharded.device):
        raise TaskError(
            f"the registered state ({', '.join(values)}) differs between workers; register "
            "what is the same on all of them"
        )


def is_everywhere(text: str, device: torch.device) -> bool:
    """Return whether all workers have the same text; every worker calls it."""
    key = hashlib.sha256(text.encode()).digest()
    number = int.from_bytes(key[:8], "little") >> 2
    ends = torch.tensor([number, -number], device=device)
    dist.all_reduce(ends, op=dist.ReduceOp.MIN)
    least, negative = on_host(ends)
    return bool(least == -negative)
