"""Checks that the workers of an attempt have the same data and state, and compute alike."""

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from workers.data import DataLoader, DataOrder
from workers.errors import DataDiffersError, KernelsDifferError, TaskError
from workers.settings import TrainSettings
from workers.train.executor import (
    ShardedModel,
    are_everywhere,
    checksums,
    described,
    exchanged,
)

log = logging.getLogger(__name__)

#: Number of characters of a node's name, and of nodes to name.
_NODE_CHARS: Final = 8
_NUM_NODES: Final = 4


def agree_on_data(
    data: int | DataLoader,
    order: DataOrder,
    digest: str,
    *,
    restored: Mapping[str, Any],
    step: int,
    sharded: ShardedModel,
    train: TrainSettings,
    node: str,
) -> dict[str, Any]:
    """Return what a checkpoint records about the data; also compare how the workers compute.

    ``digest`` identifies the samples; "" for the loader's. ``restored`` has the small named values
    of the version of ``step``, from which the attempt resumes.
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
    dtype = torch.bfloat16 if train.precision == "bf16" else torch.float32
    kernels = checksums(sharded.device, dtype)
    texts = [repr(value) for value in (*cursor.values(), *kernels.values())]
    same = are_everywhere(texts, sharded.device)
    differing = [
        f"{name} (rank {sharded.mesh.rank} has {value})"
        for (name, value), is_same in zip(cursor.items(), same, strict=False)
        if not is_same
    ]
    if differing:
        raise DataDiffersError(
            f"the workers have different training data: {', '.join(differing)}; give all nodes "
            "the same files, and with data.source=stdlib the same Python"
        )
    odd = [name for name, is_same in zip(kernels, same[len(cursor) :], strict=True) if not is_same]
    if odd:
        _tell_kernels(odd, kernels, sharded, deterministic=train.deterministic, node=node)
    return cursor


def _tell_kernels(
    odd: Sequence[str],
    kernels: Mapping[str, int],
    sharded: ShardedModel,
    *,
    deterministic: bool,
    node: str,
) -> None:
    """Report which machines compute differently; every worker calls it. ``odd`` kernels differ."""
    mine = [node[:_NODE_CHARS], described(sharded.device), sorted(kernels.items())]
    nodes: dict[str, dict[str, str]] = {}
    for name, what, kind in exchanged(mine, sharded.device):
        nodes.setdefault(str(kind), {})[name] = what
    kinds = [
        f"node {', '.join([*each][:_NUM_NODES])}{' and more' if len(each) > _NUM_NODES else ''} "
        f"({'; '.join(dict.fromkeys(each.values()))})"
        for each in nodes.values()
    ]
    told = f"{', '.join(odd)} give different bits on {' and on '.join(kinds)}"
    if deterministic:
        raise KernelsDifferError(
            f"the workers do not compute alike: {told}. With train.deterministic the run would "
            "depend on where a worker is: use machines of one kind with the same libraries, or "
            "write train.deterministic: false",
            kernels=tuple(odd),
        )
    if sharded.mesh.rank == 0:
        log.warning("the workers do not compute alike, which is no fault: %s", told)


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
    text = json.dumps(values, sort_keys=True)
    if values and not all(are_everywhere([text], sharded.device)):
        raise TaskError(
            f"the registered state ({', '.join(values)}) differs between workers; register "
            "only state that is the same on all of them"
        )
