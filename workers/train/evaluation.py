"""Measure a model without changing it: mean loss over samples, digest of the weights."""

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

from workers.data import random_seed, seed_all, seeded
from workers.parallel import Mesh
from workers.train.executor import PassHooks, Pipeline, Quota, ShardedModel, on_host

__all__ = ["mean_over_samples", "weights_digest"]


def mean_over_samples(
    loss_of: Callable[[NDArray[Any]], tuple[Tensor, int]],
    *,
    quota: Quota,
    num_micro_batches: int,
    samples_each: int,
    mesh: Mesh,
    pipeline: Pipeline | None,
) -> float:
    """Return the mean loss per token over ``num_micro_batches``, the same on every worker.

    Each micro-batch has its own element in the all-reduce, so the sum has one order for any number
    of workers. Its random numbers are keyed by its number, and the script's go on as if it drew
    none.
    """
    device = mesh.sharding.device_type
    sums = torch.zeros(2, num_micro_batches, dtype=torch.float64, device=device)
    starts = [one.micro_batch * samples_each for one in quota.passes]
    batches = [np.arange(start, start + samples_each) for start in starts]

    def take(number: int, returned: tuple[Tensor, int]) -> Tensor:
        one, (loss, tokens) = quota.passes[number], returned
        if one.counts and mesh.counts and tokens:
            sums[0, one.micro_batch] = loss.double() * tokens
            sums[1, one.micro_batch] = tokens
        return loss

    def begin(number: int) -> None:
        key = ("evaluation", quota.passes[number].micro_batch)
        seed_all(random_seed(*key, mesh.stage) if mesh.stage else random_seed(*key))

    with torch.no_grad(), seeded(0):
        if pipeline is not None:
            pipeline.evaluate(batches, loss_of, PassHooks(begin=begin, weigh=take))
        else:
            for number, batch in enumerate(batches):
                begin(number)
                take(number, loss_of(batch))
    dist.all_reduce(sums)
    found = on_host(sums.reshape(-1))
    tokens = math.fsum(found[num_micro_batches:])
    return math.fsum(found[:num_micro_batches]) / tokens if tokens else math.nan


def weights_digest(sharded: ShardedModel) -> str:
    """Return a SHA-256 over all weights, as float32, in the order of their names, hexadecimal.

    The same for every layout. Every rank calls it; one full parameter is in memory at a time.
    """
    digest = hashlib.sha256()
    shards = {shard.fqn: shard for shard in sharded.shards}
    for fqn, shape in sorted(sharded.shapes.items()):
        # As integers: a sum of one rank's bits and zeros changes none, whatever they stand for.
        whole = torch.zeros(shape, dtype=torch.int32, device=sharded.device)
        shard = shards.get(fqn)
        if shard is not None and shard.replicas[0] == sharded.mesh.rank:
            for box, local in shard.pieces(shard.local):
                whole[tuple(map(slice, box.start, box.stop))] = local.float().view(torch.int32)
        dist.all_reduce(whole)
        weights: Any = whole.cpu().numpy()
        digest.update(fqn.encode())
        digest.update(memoryview(weights))
    return digest.hexdigest()
