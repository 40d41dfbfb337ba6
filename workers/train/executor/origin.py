"""Find where a number that is not finite comes from: micro-batch, ranks, positions in the data.

The ranks do this together, and only in a step whose sums are not finite.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ucp_core.layout import ParallelLayout
from ucp_core.numerics import shortened
from workers.collectives import on_host
from workers.train.executor.quotas import Pass
from workers.train.executor.sharded_model import ShardedModel

#: Maximum number of micro-batches, or ranks, to name.
_TOLD: Final = 8


class Reduced(Protocol):
    """The facts about a step when its sums are reduced; see ``Step``."""

    number: int
    passes: tuple[Pass, ...]
    sums: dict[int, tuple[Tensor, int]]
    num_micro_batches: int
    loss: float
    grad_norm: float
    tokens: int
    order_range: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The origin of a number that is not finite."""

    text: str  #: For people.
    #: The ranks that computed it first, in order; empty if unknown, or if all ranks did.
    ranks: tuple[int, ...]


def find_origin(step: Reduced, sharded: ShardedModel) -> Origin:
    """Return the origin. Every rank calls it and gets the same."""
    names = sorted(sharded.shapes)
    sizes = *[step.num_micro_batches] * 2, len(names), *[sharded.mesh.layout.world_size] * 3
    flags = torch.zeros(sum(sizes), device=sharded.device)
    # A view of each part.
    losses, passed, parameters, *by_rank = flags.split(sizes)
    rank, probe = sharded.mesh.rank, sharded.reduction.probe
    for micro_batch, (loss, _) in step.sums.items():
        if not math.isfinite(float(loss)):
            losses[micro_batch] = by_rank[0][rank] = 1.0
    by_rank[1][rank] = float(bool(probe.outputs()))
    places = {name: at for at, name in enumerate(names)}
    for shard in sharded.shards:
        gradient = shard.gradient
        if gradient is not None and not gradient.isfinite().all():
            parameters[places[shard.fqn]] = 1.0
    is_alone = sharded.mesh.sharding.size() == 1
    found = probe.gradients()
    if found or (is_alone and parameters.any()):
        by_rank[2][rank] = 1.0
    for micro_batch in _since_reductions(step.passes, found):
        passed[micro_batch] = 1.0
    dist.all_reduce(flags)
    held = iter(on_host(flags))
    told = [[at for at in range(size) if next(held)] for size in sizes]
    return _described(step, sharded.mesh.layout, names, told)


def _since_reductions(passes: Sequence[Pass], numbers: Iterable[int]) -> set[int]:
    """Return the micro-batches whose gradients went into the reductions after these passes."""
    found: set[int] = set()
    open_ones: set[int] = set()
    for number, one in enumerate(passes):
        open_ones |= {one.micro_batch} if one.counts else set()
        if one.syncs:
            found |= open_ones if number in numbers else set()
            open_ones = set()
    return found


def _described(
    step: Reduced, layout: ParallelLayout, names: Sequence[str], told: Sequence[list[int]]
) -> Origin:
    num = step.num_micro_batches
    losses, passed, parameters, with_loss, with_outputs, with_gradient = told
    if losses:
        what = f"the loss of {described_numbers(losses, num)}"
        ranks = _ranks(layout, with_loss, with_outputs, first_stage=True)
    elif not parameters:
        return Origin(text="the gradient norm overflows", ranks=())
    else:
        more = f" and of {len(parameters) - 1} more" if parameters[1:] else ""
        of = "among" if passed[1:] else "of"
        part = f", {of} {described_numbers(passed, num)}" if passed else ""
        what = f"the gradient of {names[parameters[0]]}{more}, with a finite loss{part}"
        ranks = _ranks(layout, with_gradient, (), first_stage=False)
    if layout.dp > 1 and {layout.data_rank(rank) for rank in ranks} == set(range(layout.dp)):
        return Origin(text=f"{what} on all workers", ranks=())
    where = f" on {'ranks' if ranks[1:] else 'rank'} {shortened(ranks, _TOLD)}" if ranks else ""
    return Origin(text=f"{what}{where}{_positions(step, losses or passed)}", ranks=ranks)


def _ranks(
    layout: ParallelLayout, found: Iterable[int], sent: Iterable[int], *, first_stage: bool
) -> tuple[int, ...]:
    """Return the ranks that had the number first: other pipeline ranks got it from another stage.

    ``found`` are ranks with losses or gradients that are not finite, ``sent`` are ranks with such
    outputs. Outputs go to later stages in a forward pass, and to earlier ones in a backward pass.
    """
    data_ranks = {layout.data_rank(rank) for rank in found}
    by_data: dict[int, list[int]] = {}
    for rank in {*found, *sent}:
        if layout.data_rank(rank) in data_ranks:
            by_data.setdefault(layout.data_rank(rank), []).append(rank)
    choose = min if first_stage else max
    kept: list[int] = []
    for ranks in by_data.values():
        stage = choose(layout.coordinates(rank)["pp"] for rank in ranks)
        kept += (rank for rank in ranks if layout.coordinates(rank)["pp"] == stage)
    return tuple(sorted(kept))


def _positions(step: Reduced, found: Sequence[int]) -> str:
    if len(found) != 1:
        return ""
    start, stop = step.order_range
    size = (stop - start) // step.num_micro_batches
    first = start + found[0] * size
    what = f"position {first}" if size == 1 else f"positions {first} to {first + size - 1}"
    return f" ({what} of the data order)"


def described_numbers(found: Sequence[int], num: int) -> str:
    """Return micro-batches for people, counted from 1."""
    named = shortened((at + 1 for at in found), _TOLD)
    return f"micro-batch{'es' if found[1:] else ''} {named} of {num}"
