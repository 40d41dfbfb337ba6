"""Cut a state into replica shares: ranks that hold it save disjoint shares of equal size. Pure.

Each of n data-parallel replicas saves 1/n of the state. They compute the same shares without
communication, because they cut the same boxes in the same order.

Source: sharded parallel saving of REFT (arXiv 2310.12670), by rows of every tensor instead of
ranges of one flat buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from ucp_core.geometry import Box
from ucp_core.layout import ParallelLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaShare:
    """The share of the state that a rank saves among the replicas that hold the same state."""

    num_shares: int = 1
    share: int = 0  #: The share that this rank saves, ``0 <= share < num_shares``.
    #: ``(rank, share)`` of other replicas whose shares this rank also saves.
    guarded: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, replicas: Sequence[int], rank: int, guards: Sequence[int] = ()) -> ReplicaShare:
        """Return the share of ``rank``, and of the ``guards`` among its ``replicas``.

        ``replicas`` are the ranks that hold the same state, including itself; empty if no other
        does.
        """
        ranks = tuple(replicas) or (rank,)
        guarded = tuple((other, ranks.index(other)) for other in guards)
        return cls(num_shares=len(ranks), share=ranks.index(rank), guarded=guarded)


def replicas_of(layout: ParallelLayout, rank: int) -> tuple[int, ...]:
    """Return the ranks that hold the same state as ``rank``, including it, in order of shares."""
    return layout.ranks_along(rank, ["dp_replicate"])


def cut(parts: Sequence[tuple[Box, int]], num_shares: int) -> list[list[tuple[int, Box]]]:
    """Return the shares of a state, each as ``(number of the part, box)`` of its rows.

    A part is its box and the bytes of one element. Each part is cut into runs of rows of nearly
    equal length; the smallest shares so far get one row more. So two shares differ by at most one
    row, of the part with the largest rows. A part with fewer rows than shares is only in some
    shares, a 0-d part in one.
    """
    shares: list[list[tuple[int, Box]]] = [[] for _ in range(num_shares)]
    sizes = [0] * num_shares
    for number, (box, item_bytes) in enumerate(parts):
        if box.is_empty:
            continue
        num_rows = box.stop[0] - box.start[0] if box.start else 1
        row_bytes = prod(box.shape[1:]) * item_bytes
        small, extra = divmod(num_rows, num_shares)
        larger = frozenset(sorted(range(num_shares), key=sizes.__getitem__)[:extra])
        low = 0
        for share in range(num_shares):
            high = low + small + (share in larger)
            if high > low:
                shares[share].append((number, _rows(box, low, high)))
                sizes[share] += (high - low) * row_bytes
            low = high
    return shares


def _rows(box: Box, low: int, high: int) -> Box:
    """Return rows ``[low, high)`` of a box, counted from its start."""
    if not box.start:
        return box
    return box.with_dim(0, box.start[0] + low, box.start[0] + high)
