"""Compare the weights of ranks that hold copies of one state, before they are saved.

A flipped bit in a copy stays there, and each copy saves a share of the state: the next version
would mix two models. The sum of all words as integers differs after any flipped bit. Optimizer
state is not compared: its difference shows in the weights of the next step.

Machines that do not compute alike round differently in the optimizer, so their copies differ in
the last bits without a fault. In that case all ranks get the weights of the first copy.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ucp_core.layout import ParallelLayout
from ucp_core.numerics import shortened
from workers.collectives import on_host, settled
from workers.errors import DivergedError
from workers.train.executor import ShardedModel, by_rank, machine_kind, odd_results, sum_of_words

_NUM_NAMED = 3


def refuse_diverged(step: int, sharded: ShardedModel) -> None:
    """Raise on all ranks if copies of the weights after ``step`` differ.

    Every rank calls it. On machines that do not compute alike, it makes the copies equal. Without
    copies (``dp_replicate`` of 1) there is nothing to compare.
    """
    layout, device = sharded.mesh.layout, sharded.device
    if layout.dp_replicate == 1:
        return
    zero = torch.zeros((), dtype=torch.int64, device=device)
    sums = torch.stack([zero, *(sum_of_words(one.local) for one in sharded.shards)])
    kind = torch.tensor(machine_kind(device), device=device)
    found = by_rank(torch.stack([sums.sum(), kind]))
    if odd_ones(layout, [row[1] for row in found]):
        _bring_together(sharded)
        return
    ranks = odd_ones(layout, [row[0] for row in found])
    if not ranks:
        return
    names = _differing(sharded, sums[1:])
    which = ", ".join(map(str, ranks))
    is_known = layout.dp_replicate > 2  # noqa: PLR2004  with two it is unknown which is right
    told = f"those of rank {which}" if is_known else f"rank {which}, of which one is wrong"
    raise DivergedError(
        f"step {step}: copies of the weights differ, {told}: "
        f"{shortened(names, _NUM_NAMED)}. Its state was not saved: the last saved "
        "version is the last one with equal copies",
        step=step,
        ranks=ranks,
        tensors=names,
    )


def odd_ones(layout: ParallelLayout, sums: Sequence[float]) -> tuple[int, ...]:
    """Return the ranks whose sums differ from those of most of their copies. Pure.

    If no sum has a majority, all ranks with copies of that state are returned.
    """
    found: list[int] = []
    for first in range(layout.world_size):
        copies = layout.ranks_along(first, ["dp_replicate"])
        if copies[0] == first:
            found += (copies[at] for at in odd_results([[sums[rank]] for rank in copies]) or ())
    return tuple(sorted(found))


def _bring_together(sharded: ShardedModel) -> None:
    for one in sharded.shards:
        values = one.local.detach().contiguous()
        dist.broadcast(values, group=sharded.mesh.replicas, group_src=0)
        one.local.detach().copy_(settled(values))


def _differing(sharded: ShardedModel, sums: Tensor) -> list[str]:
    """Return the parameters whose copies differ, the same on every rank."""
    least, most = sums.clone(), sums.clone()
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=sharded.mesh.replicas)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=sharded.mesh.replicas)
    differ = [one != other for one, other in zip(on_host(least), on_host(most), strict=True)]
    places = {name: at for at, name in enumerate(sorted(sharded.shapes))}
    flags = torch.zeros(len(places), device=sharded.device)
    for shard, differs in zip(sharded.shards, differ, strict=True):
        flags[places[shard.fqn]] += float(differs)
    dist.all_reduce(flags)
    found = on_host(flags)
    return [name for name, at in places.items() if found[at]]
