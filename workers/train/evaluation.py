"""Measure a model without changing it: mean loss over samples."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from workers.collectives import on_host
from workers.data import random_seed, seed_all, seeded
from workers.errors import TaskError
from workers.parallel import PassHooks
from workers.state import DTYPES, TORCH_DTYPES
from workers.train.executor import ShardedModel, exchanged, quota, summed


def mean_over_samples(
    loss_of: Callable[[NDArray[Any]], Any],
    num_samples: int,
    *,
    micro_batch: int,
    sharded: ShardedModel,
    done: Callable[[int], None],
    of_means: bool = False,
    outputs: dict[int, list[Tensor]] | None = None,
) -> tuple[float, str]:
    """Return the mean loss per token over samples ``0 .. num_samples - 1``, on every worker.

    Also return, for people, the samples whose loss is not finite; "" if there are none.
    ``of_means`` means the mean over samples of the means of their micro-batches.

    Each micro-batch has its own element in the all-reduce, so the sum has one order for any number
    of workers. Its random numbers are keyed by its number; those of the script continue as if none
    had been drawn. ``done`` is called before each pass with the number of passes that this rank has
    begun. ``outputs`` gets, by micro-batch, the values that ``loss_of`` returns after the tokens.
    """
    starts = range(0, num_samples, micro_batch)
    batches = [np.arange(start, min(start + micro_batch, num_samples)) for start in starts]
    sums = torch.zeros(2, len(batches), dtype=torch.float64, device=sharded.device)
    held: dict[int, list[Tensor]] = {}
    counted = itertools.count(1)
    num_whole = num_samples // micro_batch
    trained = [module for module in sharded.called.modules() if module.training]
    sharded.called.eval()
    with torch.no_grad(), seeded(0):
        # In a pipeline all micro-batches have one shape.
        for numbers in filter(len, (range(num_whole), range(num_whole, len(starts)))):
            _run(numbers, batches, loss_of, sharded, lambda: done(next(counted)), sums, held)
    for module in trained:
        module.training = True
    dist.all_reduce(sums)
    if outputs is not None:
        outputs |= _gathered(held, sharded)
    found = on_host(sums.reshape(-1))
    losses, counts = found[: len(starts)], found[len(starts) :]
    for batch, loss in zip(batches, losses, strict=True):
        if not math.isfinite(loss):
            return math.nan, f"samples {batch[0]} to {batch[-1]}"
    if of_means:
        losses = [
            loss / count * len(batch) if count else 0.0
            for loss, count, batch in zip(losses, counts, batches, strict=True)
        ]
        counts = [len(batch) if count else 0 for count, batch in zip(counts, batches, strict=True)]
    weight = math.fsum(counts)
    return (math.fsum(losses) / weight if weight else math.nan), ""


def _gathered(
    held: Mapping[int, Sequence[Tensor]], sharded: ShardedModel
) -> dict[int, list[Tensor]]:
    """Return the tensors of all ranks' micro-batches, on every rank and on the host."""
    mine = {
        number: [[DTYPES[one.dtype], list(one.shape)] for one in tensors]
        for number, tensors in held.items()
    }
    rows = exchanged(mine, sharded.device)
    there = {int(number): one for each in rows for number, one in each.items()}
    found: dict[int, list[Tensor]] = {}
    for number in sorted(there):
        found[number] = []
        for place, (dtype, shape) in enumerate(there[number]):
            whole = torch.zeros(shape, dtype=TORCH_DTYPES[dtype], device=sharded.device)
            if number in held:
                whole.copy_(held[number][place])
            found[number].append(summed(whole).cpu())
    return found


def _read(returned: Any, num_samples: int) -> tuple[Any, ...]:
    """Return the mean loss of a micro-batch, its weight, and the values returned after them."""
    match returned:
        case Tensor():
            return returned, num_samples
        case (Tensor(), int() | Tensor(), *_):
            return tuple(returned)
        case _:
            raise TaskError(
                "session.evaluate: the function must return the mean loss of the samples that it "
                f"gets, or that and its number of tokens; it returned {type(returned).__name__}"
            )


def _run(
    numbers: range,
    batches: Sequence[NDArray[Any]],
    loss_of: Callable[[NDArray[Any]], Any],
    sharded: ShardedModel,
    begun: Callable[[], None],
    sums: Tensor,
    held: dict[int, list[Tensor]],
) -> None:
    """Compute micro-batches of one size, which all workers share.

    ``sums`` gets losses and tokens of this rank's, by number, and ``held`` the values that the
    function returned after these.
    """
    mesh, pipeline = sharded.mesh, sharded.pipeline
    shares = quota(len(numbers), mesh.layout.dp, mesh.data_rank, fixed_tree=False)
    passes = [(numbers[one.micro_batch], one.counts) for one in shares.passes]

    def take(number: int, returned: Any) -> Tensor:
        micro_batch, counts = passes[number]
        loss, tokens, *others = _read(returned, len(batches[micro_batch]))
        if counts and mesh.counts and others:
            held[micro_batch] = others[0]
        if counts and mesh.counts and tokens:
            sums[0, micro_batch] = loss.double() * tokens
            sums[1, micro_batch] = tokens
        return cast("Tensor", loss)

    def begin(_stage: int, number: int) -> None:
        begun()
        seed_all(random_seed("evaluation", passes[number][0]))

    mine = [batches[micro_batch] for micro_batch, _ in passes]
    if pipeline is not None:
        pipeline.evaluate(mine, loss_of, PassHooks(begin=begin, weigh=take))
        return
    for number, batch in enumerate(mine):
        begin(0, number)
        take(number, loss_of(batch))
