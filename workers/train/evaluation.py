"""Looks at a model without changing it: mean loss over samples, digest over weights."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from workers.train.agreement import on_host
from workers.train.executor import Parts, Schedule

__all__ = ["mean_over_samples", "weights_digest"]


def mean_over_samples(
    loss_of: Callable[[NDArray[Any]], tuple[Tensor, int]],
    *,
    schedule: Schedule,
    num_micro_batches: int,
    samples_each: int,
    device: torch.device,
) -> float:
    """Return the mean loss per token over ``num_micro_batches``, the same on every worker.

    Every micro-batch has a place of its own in the sum, so it does not depend on the number of
    workers beyond what the forward passes do.
    """
    sums = torch.zeros(2, num_micro_batches, dtype=torch.float64, device=device)
    with torch.no_grad():
        for one in schedule.passes:
            start = one.micro_batch * samples_each
            loss, tokens = loss_of(np.arange(start, start + samples_each))
            if one.counts:
                sums[0, one.micro_batch] = loss.double() * tokens
                sums[1, one.micro_batch] = tokens
    dist.all_reduce(sums)
    found = on_host(sums.reshape(-1))
    return math.fsum(found[:num_micro_batches]) / math.fsum(found[num_micro_batches:])


def weights_digest(parts: Parts) -> str:
    """Return a SHA-256 over all float32 weights in the order of their names, hexadecimal.

    The same for every layout. Every rank calls it; one full parameter is in memory at a time.
    """
    group = parts.mesh.sharding.get_group(parts.mesh.sharding.ndim - 1)
    num_shards = dist.get_world_size(group)
    digest = hashlib.sha256()
    for piece in sorted(parts.pieces, key=lambda piece: piece.fqn):
        num_elements = math.prod(piece.shape)
        # Shards are equal but for the last ones, which are shorter: padding lies at the end.
        rows = -(-piece.shape[0] // num_shards)
        shard = torch.zeros(
            rows * (num_elements // piece.shape[0]), dtype=torch.float32, device=parts.device
        )
        shard[: piece.local.numel()] = piece.local.reshape(-1)
        whole = torch.empty(num_shards * len(shard), dtype=torch.float32, device=parts.device)
        dist.all_gather_single(whole, shard, group=group)
        weights: Any = whole[:num_elements].cpu().numpy()
        digest.update(piece.fqn.encode())
        digest.update(memoryview(weights))
    return digest.hexdigest()
