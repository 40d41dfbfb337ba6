"""Measure a model without changing it: mean loss over samples, digest of the weights."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace
from math import isfinite
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from workers.data import random_seed, seed_all, seeded
from workers.train.executor import PassHooks, ShardedModel, on_host, quota

__all__ = ["mean_over_samples", "weights_digest"]


def mean_over_samples(
    loss_of: Callable[[NDArray[Any]], tuple[Tensor, int]],
    num_samples: int,
    *,
    micro_batch: int,
    sharded: ShardedModel,
    done: Callable[[int], None],
) -> tuple[float, str]:
    """Return the mean loss per token over samples ``0 .. num_samples - 1``, on every worker.

    Beside it the samples whose loss is not finite, for people; "" if there are none.

    Each micro-batch has its own element in the all-reduce, so the sum has one order for any number
    of workers. Its random numbers are keyed by its number, and the script's go on as if it drew
    none.

    Args:
        loss_of: Returns the mean loss over samples, and its number of tokens.
        num_samples: At least 1.
        micro_batch: Samples of a micro-batch; the last one has what is left.
        sharded: The model; it is in evaluation mode meanwhile.
        done: Called before each pass with the number of passes that this rank has begun.
    """
    mesh = sharded.mesh
    starts = range(0, num_samples, micro_batch)
    sums = torch.zeros(2, len(starts), dtype=torch.float64, device=mesh.sharding.device_type)
    num_begun = 0

    def run(numbers: range) -> None:
        """Compute micro-batches of one size, shared by all workers."""
        passes = [
            replace(one, micro_batch=numbers[one.micro_batch])
            for one in quota(len(numbers), mesh.layout.dp, mesh.data_rank, fixed_tree=False).passes
        ]
        firsts = [starts[one.micro_batch] for one in passes]
        batches = [np.arange(first, min(first + micro_batch, num_samples)) for first in firsts]

        def take(number: int, returned: tuple[Tensor, int]) -> Tensor:
            one, (loss, tokens) = passes[number], returned
            if one.counts and mesh.counts and tokens:
                sums[0, one.micro_batch] = loss.double() * tokens
                sums[1, one.micro_batch] = tokens
            return loss

        def begin(number: int) -> None:
            nonlocal num_begun
            num_begun += 1
            done(num_begun)
            key = ("evaluation", passes[number].micro_batch)
            seed_all(random_seed(*key, mesh.stage) if mesh.stage else random_seed(*key))

        if sharded.pipeline is not None:
            hooks = PassHooks(begin=begin, weigh=take)
            sharded.pipeline.evaluate(batches, loss_of, hooks)
            return
        for number, batch in enumerate(batches):
            begin(number)
            take(number, loss_of(batch))

    num_whole = num_samples // micro_batch
    trained = [module for module in sharded.model.modules() if module.training]
    sharded.model.eval()
    with torch.no_grad(), seeded(0):
        # In a pipeline all micro-batches have one shape.
        for numbers in filter(len, (range(num_whole), range(num_whole, len(starts)))):
            run(numbers)
    for module in trained:
        module.training = True
    dist.all_reduce(sums)
    found = on_host(sums.reshape(-1))
    losses, tokens = found[: len(starts)], math.fsum(found[len(starts) :])
    bad = next((start for start, one in zip(starts, losses, strict=True) if not isfinite(one)), -1)
    if bad >= 0:
        return math.nan, f"samples {bad} to {min(bad + micro_batch, num_samples) - 1}"
    return (math.fsum(losses) / tokens if tokens else math.nan), ""


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
