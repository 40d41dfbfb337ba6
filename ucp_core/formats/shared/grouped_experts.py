"""Orders the elements of a rank's experts that are one parameter (Megatron's ``GroupedMLP``). Pure.

The model's tensor holds each expert as ``[out, in]``, gate above up. The parameter and its flat
buffer are transposed: ``[experts, in, out]``, gate beside up. The boxes here are the parts of the
model's tensor that a rank holds; their last three dims are experts, out and in.

Source: ``GroupedMLP.sharded_state_dict`` in ``megatron/core/transformer/moe/experts.py``, 0.5 to
0.16.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from ucp_core.geometry import Box, flat_range

_KEY = re.compile(r".*\.experts\.linear_fc[12]\.weight")
_DIMS = 3


class Segment(NamedTuple):
    """Elements of a box of the model's tensor, and their places in the parameter."""

    box: Box
    position: int  #: First element in the flattened parameter.
    #: Distance in the parameter between neighbours along each dim of the box.
    strides: tuple[int, ...]


class Sample(NamedTuple):
    """Elements that are side by side in the parameter."""

    piece: int  #: Number of their box.
    position: int  #: First element in the flattened parameter.
    size: int  #: Number of elements.
    start: int  #: First element in the flattened box; the next are ``step`` apart.
    step: int  #: Distance in the box between neighbours.


def may_be_grouped(key: str, boxes: Sequence[Box]) -> bool:
    """Return whether a rank's boxes of a tensor can come from such a parameter."""
    if _KEY.fullmatch(key) is None or len(boxes[0].start) < _DIMS:
        return False
    return len({(box.shape[-3], box.shape[-1]) for box in boxes}) == 1


def strides(rows: int, width: int) -> tuple[int, int, int]:
    """Return the distances in the parameter between experts, rows (out) and columns."""
    return rows * width, 1, rows


def segments(boxes: Sequence[Box], start: int, stop: int) -> Iterator[Segment]:
    """Yield the segments at flat positions ``[start, stop)`` of the parameter."""
    experts, _, width = boxes[0].shape[-_DIMS:]
    edges = list(accumulate((box.shape[-2] for box in boxes), initial=0))
    total = edges[-1]
    for part in flat_range((experts, width, total), start, stop):
        for box, low in zip(boxes, edges, strict=False):
            own = Box((0, 0, low), (experts, width, low + box.shape[-2])).intersect(part)
            if own is None:
                continue
            expert, column, row = own.start
            lead, lead_stop = box.start[:-_DIMS], box.stop[:-_DIMS]
            corner = box.start[-_DIMS:]
            first = (corner[0] + expert, corner[1] + row - low, corner[2] + column)
            size = (own.shape[0], own.shape[2], own.shape[1])
            last = tuple(a + n for a, n in zip(first, size, strict=True))
            yield Segment(
                box=Box((*lead, *first), (*lead_stop, *last)),
                position=(expert * width + column) * total + row,
                strides=(*([experts * width * total] * len(lead)), *strides(total, width)),
            )


def samples(boxes: Sequence[Box], count: int) -> Iterator[Sample]:
    """Yield up to ``count`` elements at either end of each box, in the parameter's order."""
    experts, _, width = boxes[0].shape[-_DIMS:]
    edges = list(accumulate((box.shape[-2] for box in boxes), initial=0))
    for piece, (box, low) in enumerate(zip(boxes, edges, strict=False)):
        rows = box.shape[-2]
        size = min(count, rows)
        ends = ((0, 0, 0), (experts - 1, rows - size, width - 1))
        for expert, row, column in dict.fromkeys(ends):
            yield Sample(
                piece=piece,
                position=(expert * width + column) * edges[-1] + low + row,
                size=size,
                start=(expert * rows + row) * width + column,
                step=width,
            )
