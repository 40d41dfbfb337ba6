"""Find the bytes of fragments that make up a flat range of a tensor. Pure.

The elements of a box have the same order in the whole tensor and in the box's own memory. A flat
range therefore takes one run of bytes from each C-contiguous fragment, however the tensor is cut,
and consecutive ranges read each byte of a file once.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from ucp_core.geometry import DTYPE_BYTES, Box, Fragment, TensorEntry, flat_range, is_packed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class ElementRun(NamedTuple):
    """Elements to take from one fragment."""

    fragment: Fragment
    first: int  #: The first element, counted in the fragment.
    num_elements: int  #: Their number; they are adjacent in the fragment.
    #: Place of the first, relative to the start of the range; -1 if the elements are not adjacent
    #: there.
    target: int


def is_plain(entry: TensorEntry) -> bool:
    """Return whether flat ranges of the tensor are runs: no strides, no averages."""
    itemsize = DTYPE_BYTES[entry.dtype]
    return entry.copies == 1 and all(
        fragment.strides is None or is_packed(fragment.box.shape, fragment.strides, itemsize)
        for fragment in entry.fragments
    )


class Holders:
    """The fragments of one plain tensor, or its replicas, searchable by flat position."""

    def __init__(self, entry: TensorEntry, *, replicas: bool = False) -> None:
        self.entry = entry
        shape = self._shape = entry.shape
        held = [f for f in entry.fragments if f.replica is replicas and not f.box.is_empty]
        found = sorted(
            ((position(fragment.box, shape, 0), fragment) for fragment in held),
            key=lambda pair: pair[0],
        )
        self._fragments = [fragment for _, fragment in found]
        self._firsts = [first for first, _ in found]
        self._sizes = [fragment.box.num_elements for fragment in self._fragments]
        self._lasts = [
            position(fragment.box, shape, size - 1)
            for fragment, size in zip(self._fragments, self._sizes, strict=True)
        ]
        # No fragment up to index i ends after ``_reach[i]``.
        self._reach = list(accumulate(self._lasts, max))

    def runs(self, start: int, stop: int) -> list[ElementRun]:
        """Return the runs of the elements ``[start, stop)``."""
        low = bisect_left(self._reach, start)
        high = bisect_right(self._firsts, stop - 1)
        found: list[ElementRun] = []
        for number in range(low, high):
            fragment = self._fragments[number]
            first, count = 0, self._sizes[number]
            begin, last = self._firsts[number], self._lasts[number]
            if begin < start or last >= stop:
                first = count_before(fragment.box, self._shape, start)
                count = count_before(fragment.box, self._shape, stop) - first
                if count <= 0:
                    continue
                begin = position(fragment.box, self._shape, first)
                last = position(fragment.box, self._shape, first + count - 1)
            target = begin - start if last + 1 - begin == count else -1
            found.append(ElementRun(fragment, first, count, target))
        return found


def count_before(box: Box, shape: Sequence[int], flat: int) -> int:
    """Return how many elements of ``box`` lie before position ``flat`` of the tensor."""
    rest = prod(shape)
    size = box.num_elements
    if flat >= rest:
        return size
    count = 0
    for low, high, extent in zip(box.start, box.stop, shape, strict=True):
        rest //= extent
        index, flat = divmod(flat, rest)
        size //= high - low
        if index < low:
            return count
        if index >= high:
            return count + (high - low) * size
        count += (index - low) * size
    return count


def position(box: Box, shape: Sequence[int], number: int) -> int:
    """Return the flat position in the tensor of element ``number`` of ``box``."""
    flat = 0
    stride = 1
    for low, high, extent in zip(
        reversed(box.start), reversed(box.stop), reversed(shape), strict=True
    ):
        number, index = divmod(number, high - low)
        flat += (low + index) * stride
        stride *= extent
    return flat


def scattered(run: ElementRun, shape: Sequence[int], start: int) -> Iterator[tuple[int, Box, int]]:
    """Yield ``(place, box, target)`` in order, for every box of a run that is not contiguous.

    ``place`` is the start of the box in the run, ``box`` is in coordinates of the whole tensor, and
    ``target`` is the place of its first element, relative to position ``start`` of the tensor.
    """
    box = run.fragment.box
    done = 0
    for inner in flat_range(box.shape, run.first, run.first + run.num_elements):
        moved = Box(
            tuple(a + b for a, b in zip(inner.start, box.start, strict=True)),
            tuple(a + b for a, b in zip(inner.stop, box.start, strict=True)),
        )
        yield done, moved, position(moved, shape, 0) - start
        done += moved.num_elements
