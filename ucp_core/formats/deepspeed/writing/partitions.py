"""How DeepSpeed's ZeRO stages cut flattened parameters among data-parallel ranks.

Pure arithmetic on numbers of elements, as in DeepSpeed 0.19 (``runtime/zero/stage_1_and_2.py`` and
``stage3.py``) without ``parameter_alignment`` and ``round_robin_gradients``.
"""

from collections.abc import Sequence
from typing import NamedTuple

#: Stages 1 and 2 pad a group to a multiple of this times the ranks: in 16 bit, every rank's range
#: begins at a multiple of four bytes.
_ALIGNMENT = 2

#: The ``tensor`` of a span of zeros.
PADDING = -1


class Span(NamedTuple):
    """Elements ``start <= i < stop`` of one flattened tensor, or this many zeros."""

    tensor: int  #: Index of the tensor in its group, or ``PADDING``.
    start: int  #: First element.
    stop: int  #: One past the last element.

    @property
    def num_elements(self) -> int:
        """Return how many elements it has."""
        return self.stop - self.start


def group_spans(numels: Sequence[int], dp: int, rank: int) -> tuple[Span, ...]:
    """Return the spans of a group that ``rank`` holds in stages 1 and 2, side by side.

    The tensors are flattened one after the other, padded at the end, and cut into ``dp`` equal
    ranges; a range may begin and end anywhere in a tensor.
    """
    total = sum(numels)
    extent = -(-total // (_ALIGNMENT * dp)) * _ALIGNMENT
    low, high = rank * extent, (rank + 1) * extent
    spans: list[Span] = []
    begin = 0
    for index, numel in enumerate(numels):
        start, stop = max(low, begin), min(high, begin + numel)
        if start < stop:
            spans.append(Span(index, start - begin, stop - begin))
        begin += numel
    padding = high - max(low, min(high, total))
    if padding:
        spans.append(Span(PADDING, 0, padding))
    return tuple(spans)


def tensor_spans(numels: Sequence[int], dp: int, rank: int) -> tuple[Span, ...]:
    """Return the spans of a sub-group that ``rank`` holds in stage 3, which cuts each tensor.

    A tensor of n elements gives every rank ``ceil(n / dp)`` elements, the last ones with padding.
    """
    spans: list[Span] = []
    for index, numel in enumerate(numels):
        extent = -(-numel // dp)
        start, stop = min(rank * extent, numel), min((rank + 1) * extent, numel)
        parts = (Span(index, start, stop), Span(PADDING, 0, extent - (stop - start)))
        spans += filter(lambda span: span.num_elements, parts)
    return tuple(spans)


def sub_groups(numels: Sequence[int], dp: int, sub_group_size: int) -> list[list[int]]:
    """Return the indices of a group's tensors by sub-group of stage 3.

    A sub-group ends where its tensors' parts on one rank reach ``sub_group_size`` elements.
    """
    parts = [-(-numel // dp) for numel in numels]
    if sub_group_size >= sum(parts):
        return [list(range(len(parts)))]
    groups: list[list[int]] = [[]]
    filled = 0
    for index, part in enumerate(parts):
        groups[-1].append(index)
        filled += part
        if filled >= sub_group_size and index + 1 < len(parts):
            groups.append([])
            filled = 0
    return groups
