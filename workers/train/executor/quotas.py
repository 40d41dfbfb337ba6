"""Decide which rank computes which micro-batches, and in which order gradients are added.

Pure arithmetic. A step has ``num_micro_batches`` for any number of workers. Each data-parallel
rank gets a contiguous block of them. Blocks may differ in length; one is empty if there are more
ranks than micro-batches.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One forward and backward pass. All ranks run their passes at the same time."""

    #: The micro-batch to compute. A rank with none left repeats one with weight zero, because
    #: its peers wait for it in the collectives of the pass.
    micro_batch: int
    counts: bool  #: Whether the result counts.
    syncs: bool  #: Whether gradients are reduced after the pass; the same on every rank.


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """One rank's passes of a step."""

    passes: tuple[Pass, ...]  #: The passes in order; every rank has as many.
    #: Per reduction, what each rank contributes: a node ``(level, index)`` of the binary tree
    #: over micro-batches, the sum of the micro-batches ``index << level <= m < (index + 1) <<
    #: level``; None for nothing.
    nodes: tuple[tuple[tuple[int, int] | None, ...], ...]


def blocks(num_micro_batches: int, num_ranks: int) -> tuple[tuple[int, int], ...]:
    """Return the half-open range of micro-batches of every rank; sizes differ by at most 1."""
    assert num_micro_batches >= 1, "a step needs at least one micro-batch"
    return tuple(
        (num_micro_batches * rank // num_ranks, num_micro_batches * (rank + 1) // num_ranks)
        for rank in range(num_ranks)
    )


def quota(
    num_micro_batches: int,
    num_ranks: int,
    rank: int,
    *,
    fixed_tree: bool,
    every_pass: bool = False,
    round_of: int = 1,
) -> Quota:
    """Return the quota of ``rank``.

    Args:
        fixed_tree: Whether sums must be nodes of one binary tree. If not, each rank adds up its
            gradients, and they are reduced once, after the last pass. If so, they are reduced
            after every pass, or after two passes if all ranks have siblings of the tree there.
        every_pass: Whether to reduce gradients after every pass even without a tree.
        round_of: Passes come in equal rounds of at least this many, as the schedule of interleaved
            stages needs them; repeated passes fill the rounds.
    """
    parts = blocks(num_micro_batches, num_ranks)
    num_passes = max(stop - start for start, stop in parts)
    while num_passes % max(1, num_passes // round_of):
        num_passes += 1
    first = 0 if every_pass else num_passes - 1
    syncs = _tree_syncs(parts, num_passes) if fixed_tree else frozenset(range(first, num_passes))
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
    return Quota(passes=passes, nodes=_nodes(parts, syncs) if fixed_tree else ())


def _tree_syncs(parts: tuple[tuple[int, int], ...], num_passes: int) -> frozenset[int]:
    syncs: set[int] = set()
    number = 0
    while number < num_passes:
        # Every rank has a micro-batch and its right sibling there, or nothing.
        firsts = [(start + number, stop) for start, stop in parts]
        paired = number + 1 < num_passes and all(
            first >= stop or (first % 2 == 0 and first + 1 < stop) for first, stop in firsts
        )
        number += 2 if paired else 1
        syncs.add(number - 1)
    return frozenset(syncs)


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
