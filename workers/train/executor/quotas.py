"""Who computes which micro-batches of a step, and in which order gradients are added.

Pure arithmetic. A step has ``num_micro_batches`` whatever the number of workers; every
data-parallel rank gets a contiguous block of them, of uneven length where it must be, empty
where there are more ranks than micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Pass", "Schedule", "blocks", "schedule"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One forward and backward pass, which every rank makes at the same time.

    Attributes:
        micro_batch: What this rank computes. Where it has none left it repeats one with weight
            zero, because its peers wait for it in the collectives of the pass.
        counts: Whether the result counts.
        syncs: Whether gradients are reduced after the pass; the same on every rank.
    """

    micro_batch: int
    counts: bool
    syncs: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The passes of a step.

    Attributes:
        passes: This rank's passes in order; equally many on every rank.
        nodes: Per reduction, what each rank hands in: a node ``(level, index)`` of the binary
            tree over micro-batches, which is the sum of micro-batches
            ``index << level <= m < (index + 1) << level``; None where it hands in nothing.
    """

    passes: tuple[Pass, ...]
    nodes: tuple[tuple[tuple[int, int] | None, ...], ...]


def blocks(num_micro_batches: int, num_ranks: int) -> tuple[tuple[int, int], ...]:
    """Return the half-open range of micro-batches of every rank; sizes differ by at most 1."""
    assert num_micro_batches >= 1, "a step needs at least one micro-batch"
    return tuple(
        (num_micro_batches * rank // num_ranks, num_micro_batches * (rank + 1) // num_ranks)
        for rank in range(num_ranks)
    )


def schedule(num_micro_batches: int, num_ranks: int, rank: int, *, fixed_tree: bool) -> Schedule:
    """Return the passes of ``rank``.

    Args:
        num_micro_batches: Over all ranks.
        num_ranks: Data-parallel ranks.
        rank: Which one.
        fixed_tree: Whether sums must be the nodes of one binary tree. If not, every rank adds up
            all it has and gradients are reduced once, after the last pass. If so, they are
            reduced after every pass, but for two that are siblings in the tree: a rank adds
            those up by itself, provided that all ranks have siblings at that point.
    """
    parts = blocks(num_micro_batches, num_ranks)
    num_passes = max(stop - start for start, stop in parts)
    syncs = _tree_syncs(parts, num_passes) if fixed_tree else _last_only(num_passes)
    start, stop = parts[rank]
    spare = min(max(stop - 1, start), num_micro_batches - 1)
    passes = tuple(
        Pass(
            micro_batch=start + number if start + number < stop else spare,
            counts=start + number < stop,
            syncs=number in syncs,
        )
        for number in range(num_passes)
    )
    return Schedule(passes=passes, nodes=_nodes(parts, syncs) if fixed_tree else ())


def _last_only(num_passes: int) -> frozenset[int]:
    return frozenset({num_passes - 1})


def _tree_syncs(parts: tuple[tuple[int, int], ...], num_passes: int) -> frozenset[int]:
    """Return after which passes to reduce."""
    syncs: set[int] = set()
    number = 0
    while number < num_passes:
        paired = number + 1 < num_passes and all(
            _siblings_or_none(start + number, stop) for start, stop in parts
        )
        number += 2 if paired else 1
        syncs.add(number - 1)
    return frozenset(syncs)


def _siblings_or_none(micro_batch: int, stop: int) -> bool:
    """Return whether a rank at ``micro_batch`` has it and its right sibling, or nothing at all."""
    return micro_batch >= stop or (micro_batch % 2 == 0 and micro_batch + 1 < stop)


def _nodes(
    parts: tuple[tuple[int, int], ...], syncs: frozenset[int]
) -> tuple[tuple[tuple[int, int] | None, ...], ...]:
    reductions: list[tuple[tuple[int, int] | None, ...]] = []
    first = 0
    for sync in sorted(syncs):
        level = sync - first
        reductions.append(
            tuple(
                (level, (start + first) >> level) if start + first < stop else None
                for start, stop in parts
            )
        )
        first = sync + 1
    return tuple(reductions)
