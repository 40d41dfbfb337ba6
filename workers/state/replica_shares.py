"""What each of the ranks that hold the same state saves of it: disjoint shares of equal size.

Pure. Data-parallel replicas hold the same elements, so n of them save 1/n each, and together every
element once. All cut alike without a word, because they cut the same boxes in the same order.

Source: the sharded parallel saving of REFT (arXiv 2310.12670), by rows of every tensor instead of
by ranges of one flat buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from ucp_core.geometry import Box
from ucp_core.layout import ParallelLayout

__all__ = ["ReplicaShare", "cut", "replicas_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaShare:
    """A rank's place among the ranks that hold the same boxes as it does.

    Attributes:
        num_shares: How many they are.
        share: Which share of the state this rank saves, ``0 <= share < num_shares``.
        guarded: Of the ranks whose shares it saves too: rank and share.
    """

    num_shares: int = 1
    share: int = 0
    guarded: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, layout: ParallelLayout, rank: int, guards: Sequence[int] = ()) -> ReplicaShare:
        """Return the place of ``rank`` in ``layout``.

        Args:
            layout: Of the attempt.
            rank: Whose place.
            guards: Of the ranks that hold the same, those whose shares it saves too.
        """
        ranks = replicas_of(layout, rank)
        guarded = tuple((other, ranks.index(other)) for other in guards)
        return cls(num_shares=len(ranks), share=ranks.index(rank), guarded=guarded)


def replicas_of(layout: ParallelLayout, rank: int) -> tuple[int, ...]:
    """Return the ranks that hold the same state as ``rank``, itself too, by place of share."""
    place = layout.coordinates(rank)
    first = layout.rank({**place, "dp_replicate": 0})
    step = layout.rank({**place, "dp_replicate": 1}) - first if layout.dp_replicate > 1 else 1
    return tuple(first + step * number for number in range(layout.dp_replicate))


def cut(parts: Sequence[tuple[Box, int]], num_shares: int) -> list[list[tuple[int, Box]]]:
    """Return the shares of a state: of each, the boxes that it has, with the number of the part.

    A part is cut into runs of rows, as equal as can be; who gets a row more is who has least so
    far. So two shares differ by one row of one part at most, the largest that there is. A part of
    fewer rows than shares is in some of them only, and a 0-d part in one.

    Args:
        parts: The box of every part, and the bytes of one of its elements.
        num_shares: How many.
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
    """Return the rows ``[low, high)`` of a box, counted from its start."""
    if not box.start:
        return box
    return box.with_dim(0, box.start[0] + low, box.start[0] + high)
