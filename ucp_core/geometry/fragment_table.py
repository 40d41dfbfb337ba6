"""Fragments of many tensors as columns of numbers, which become objects when needed. Pure.

A checkpoint of 1,000 ranks has a million fragments, and one rank needs a few thousand of them. Rows
take a fifth of the memory of objects, and numpy handles a million rows in the time that Python
needs for ten thousand objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ucp_core.errors import CheckpointCorruptError
from ucp_core.geometry.boxes import Box
from ucp_core.geometry.statemap import (
    DTYPE_BYTES,
    Fragment,
    TableTensor,
    TensorEntry,
    TensorKey,
    copies_differ,
    prove_entry,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    Numbers = NDArray[np.int64]
    #: Part of a box in one fragment: index of the box, the fragment, the elements; its half-open
    #: range of bytes in the fragment, with gaps; its offset in the memory of the box if its bytes
    #: are contiguous in both, else -1.
    Found = tuple[int, Fragment, Box, int, int, int]

#: Columns of ``Table.places``.
FILE, OFFSET, NUM_BYTES, CRC, FIRST_BLOCK, NUM_BLOCKS = range(6)
START, STOP = range(2)
#: Limit of positions with all tensors laid end to end; the sum of two still fits int64.
_POSITION_MAX = 1 << 61


class TableTensors:
    """The tensors of one table or of several.

    Attributes:
        every: The tensors in order.
    """

    def __init__(self, tensors: Iterable[TableTensor]) -> None:
        self.every = tuple(tensors)

    @cached_property
    def numbers(self) -> Mapping[TensorKey, int]:
        """Return the number of every tensor by its key."""
        return {tensor.key: number for number, tensor in enumerate(self.every)}

    @cached_property
    def by_key(self) -> Mapping[TensorKey, TableTensor]:
        """Return the tensors by key."""
        return {tensor.key: tensor for tensor in self.every}

    @cached_property
    def is_sorted(self) -> bool:
        """Return whether the tensors are sorted by key."""
        return all(one.key < other.key for one, other in pairwise(self.every))

    @cached_property
    def ndims(self) -> Numbers:
        """Return the number of dims of every tensor."""
        return np.array([len(tensor.shape) for tensor in self.every], np.int64)

    @cached_property
    def ndim(self) -> int:
        """Return the largest number of dims of any tensor."""
        return int(self.ndims.max(initial=0))

    @cached_property
    def whole(self) -> Numbers:
        """Return the whole box of every tensor, padded with dims of extent 1."""
        return bounds_of([Box.full(tensor.shape) for tensor in self.every], self.ndim)

    @cached_property
    def itemsizes(self) -> Numbers:
        """Return the bytes per element of every tensor."""
        return np.array([DTYPE_BYTES[tensor.dtype] for tensor in self.every], np.int64)


class _Ranges(NamedTuple):
    """Tensors cut into ranges of their memory, for example by rows; most are."""

    #: By tensor: whether it is cut this way, which proves that every element is held once. Other
    #: tensors may be valid, too: tensor parallelism cuts columns.
    is_range: NDArray[np.bool_]
    bases: Numbers  #: By tensor: its first position with all tensors laid end to end.
    firsts: Numbers  #: By row: its first position. Rows of other tensors are empty.
    lasts: Numbers  #: By row: its end.


class Table:
    """Fragments without replicas, strides and copies: those of native checkpoints.

    Attributes:
        tensors: The tensors; tables of one pipeline stage share them.
        firsts: The fragments of tensor ``s`` are rows ``firsts[s]`` to ``firsts[s + 1]``, sorted by
            box.
        bounds: Bounds of the boxes, ``[row, START or STOP, dim]``, padded with dims of extent 1.
        places: Where the bytes are, by the columns above.
        files: Names by the numbers in column ``FILE``.
        blocks: crc32 of all blocks.
    """

    def __init__(
        self,
        tensors: TableTensors,
        firsts: Numbers,
        bounds: Numbers,
        places: Numbers,
        files: Sequence[str],
        blocks: NDArray[np.uint32],
    ) -> None:
        self.tensors = tensors
        self.firsts = firsts
        self.bounds = bounds
        self.places = places
        self.files = tuple(files)
        self.blocks = blocks

    @cached_property
    def tensor_of(self) -> Numbers:
        """Return the tensor of every row."""
        return np.repeat(np.arange(len(self.tensors.every)), np.diff(self.firsts))

    @cached_property
    def ranges(self) -> _Ranges:
        """Return which tensors are cut into ranges, and the ranges of their rows."""
        tensor, whole = self.tensor_of, self.tensors.whole
        total = whole[:, STOP].prod(axis=1)
        first, last, extent = spans(self.bounds, whole[tensor])
        begins = np.diff(tensor, prepend=-1) != 0
        ends = np.diff(tensor, append=-1) != 0
        expected = np.where(begins, 0, np.concatenate(([0], last))[: len(last)])
        is_wrong = (first != expected) | (last - first != extent) | (extent == 0)
        is_wrong |= ends & (last != total[tensor])
        is_range = total == 0
        is_range[tensor] = True
        is_range[tensor[is_wrong]] = False
        ends_of_tensors = list(accumulate(total.tolist(), initial=0))
        if ends_of_tensors[-1] > _POSITION_MAX:
            is_range[:] = False
            ends_of_tensors = [0] * len(ends_of_tensors)
        base = np.array(ends_of_tensors[:-1], np.int64)
        shift = base[tensor]
        is_in_run = is_range[tensor]
        return _Ranges(is_range, base, shift + first * is_in_run, shift + last * is_in_run)

    def pieces(
        self, tensors: Sequence[int], boxes: Sequence[Box]
    ) -> tuple[list[Found], list[bool]]:
        """Return where boxes of tensors are, and whether each box was found.

        A box is not found if its tensor is not cut into ranges, or if it exceeds the tensor.
        """
        number = np.array(tensors, np.int64)
        bounds = bounds_of(boxes, self.tensors.ndim)
        is_found = self.ranges.is_range[number]
        is_found &= (bounds[:, START] >= 0).all(axis=1)
        is_found &= (bounds[:, STOP] <= self.tensors.whole[number, STOP]).all(axis=1)
        place, row, inner = self._find(number, bounds, np.flatnonzero(is_found))
        start, stop, size = spans(inner, self.bounds[row])
        target, _, _ = spans(inner, bounds[place])
        itemsize = self.tensors.itemsizes[number[place]]
        # Bytes that are contiguous in a range of a tensor are contiguous in every box of it.
        target = np.where(stop - start == size, target * itemsize, -1)
        numbers = np.stack([start * itemsize, stop * itemsize, target], axis=1)
        found = [
            (index, fragment, Box(tuple(low[:ndim]), tuple(high[:ndim])), *rest)
            for index, fragment, ndim, (low, high), rest in zip(
                place.tolist(),
                self.fragments(row),
                self.tensors.ndims[number[place]].tolist(),
                inner.tolist(),
                numbers.tolist(),
                strict=True,
            )
        ]
        return found, is_found.tolist()

    def _find(
        self, tensors: Numbers, boxes: Numbers, wanted: Numbers
    ) -> tuple[Numbers, Numbers, Numbers]:
        """Return the parts of the wanted boxes in fragments: box, row, and bounds."""
        ranges, tensors = self.ranges, tensors[wanted]
        first, last, _ = spans(boxes[wanted], self.tensors.whole[tensors])
        low = np.searchsorted(ranges.lasts, ranges.bases[tensors] + first, side="right")
        high = np.searchsorted(ranges.firsts, ranges.bases[tensors] + last, side="left")
        counts = np.maximum(high - low, 0)
        box = np.repeat(wanted, counts)
        row = np.arange(len(box)) + np.repeat(low - np.cumsum(counts) + counts, counts)
        bounds, boxes = self.bounds[row], boxes[box]
        start = np.maximum(bounds[:, START], boxes[:, START])
        stop = np.minimum(bounds[:, STOP], boxes[:, STOP])
        is_met = (start < stop).all(axis=1)
        return box[is_met], row[is_met], np.stack([start, stop], axis=1)[is_met]

    def near(self, tensor: int, box: Box) -> list[Fragment]:
        """Return the fragments of a tensor that hold any element of a box."""
        ndim = len(box.start)
        rows = np.arange(*self.firsts[tensor : tensor + 2].tolist())
        bounds = self.bounds[rows, :, :ndim]
        is_met = (bounds[:, START] < np.array(box.stop)) & (bounds[:, STOP] > np.array(box.start))
        return self.fragments(rows[is_met.all(axis=1)])

    def fragments(self, rows: slice | Numbers) -> list[Fragment]:
        """Return the fragments of rows."""
        ndims = self.tensors.ndims[self.tensor_of[rows]].tolist()
        places, bounds = self.places[rows].tolist(), self.bounds[rows].tolist()
        files, blocks = self.files, self.blocks
        return [
            Fragment(
                Box(tuple(start[:ndim]), tuple(stop[:ndim])),
                files[file],
                offset_bytes,
                num_bytes,
                crc32,
                (crc32,) if num == 1 else tuple(blocks[block : block + num].tolist()),
            )
            for ndim, (start, stop), (file, offset_bytes, num_bytes, crc32, block, num) in zip(
                ndims, bounds, places, strict=True
            )
        ]

    def entry(self, tensor: int) -> TensorEntry:
        """Return a tensor with all its fragments."""
        key, dtype, shape = self.tensors.every[tensor]
        first, last = self.firsts[tensor : tensor + 2].tolist()
        fragments = tuple(self.fragments(slice(first, last)))
        return TensorEntry(key=key, dtype=dtype, shape=shape, fragments=fragments)

    def prove_coverage(self) -> None:
        """Prove coverage as ``StateMap.prove_coverage`` does, with its errors."""
        for tensor in np.flatnonzero(~self.ranges.is_range).tolist():
            prove_entry(self.entry(tensor))


class TableEntries(Mapping[TensorKey, TensorEntry]):
    """The tensors of a table, as a ``StateMap`` needs them; created on demand."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self._made: dict[TensorKey, TensorEntry] = {}

    def __getitem__(self, key: TensorKey) -> TensorEntry:
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = self.table.entry(self.table.tensors.numbers[key])
        return found

    def __contains__(self, key: object) -> bool:
        return key in self.table.tensors.numbers

    def __iter__(self) -> Iterator[TensorKey]:
        return iter(self.table.tensors.numbers)

    def __len__(self) -> int:
        return len(self.table.tensors.every)


def bounds_of(boxes: Sequence[Box], ndim: int) -> Numbers:
    """Return the bounds of boxes, padded to ``ndim`` dims."""
    zeros, ones = (0,) * ndim, (1,) * ndim
    sides = chain.from_iterable(
        ((box.start + zeros)[:ndim] + (box.stop + ones)[:ndim]) for box in boxes
    )
    return np.fromiter(sides, np.int64, 2 * ndim * len(boxes)).reshape(len(boxes), 2, ndim)


def spans(inner: Numbers, outer: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """Return flat positions of boxes within larger ones: first, end, and size.

    A non-empty box is contiguous in the larger one if its size equals end minus first.
    """
    first = np.zeros(len(inner), np.int64)
    last = np.zeros(len(inner), np.int64)
    size = np.ones(len(inner), np.int64)
    for dim in range(inner.shape[2]):
        low, extent = outer[:, START, dim], outer[:, STOP, dim] - outer[:, START, dim]
        first = first * extent + inner[:, START, dim] - low
        last = last * extent + inner[:, STOP, dim] - 1 - low
        size = size * (inner[:, STOP, dim] - inner[:, START, dim])
    return first, last + 1, size


def merged(tables: Sequence[Table]) -> Table:
    """Return one table of all fragments, with tensors sorted by key.

    Raises:
        CheckpointCorruptError: Two tables disagree on the dtype or shape of a tensor.
    """
    tensors, numbers = _merged_tensors(tables)
    num_files = np.cumsum([0, *(len(table.files) for table in tables)])
    num_blocks = np.cumsum([0, *(len(table.blocks) for table in tables)])
    shifts = np.zeros((len(tables), NUM_BLOCKS + 1), np.int64)
    shifts[:, FILE], shifts[:, FIRST_BLOCK] = num_files[:-1], num_blocks[:-1]
    tensor = np.concatenate([n[t.tensor_of] for t, n in zip(tables, numbers, strict=True)])
    bounds = np.concatenate([_filled_up(table.bounds, tensors.ndim) for table in tables])
    # By tensor, and then by box.
    order = np.lexsort((*reversed(columns_of(bounds)), tensor))
    places = np.concatenate([t.places + shift for t, shift in zip(tables, shifts, strict=True)])
    return Table(
        tensors,
        np.searchsorted(tensor[order], np.arange(len(tensors.every) + 1)),
        bounds[order],
        places[order],
        tuple(chain.from_iterable(table.files for table in tables)),
        np.concatenate([table.blocks for table in tables]),
    )


def without_repeats(table: Table, may_differ: Collection[str]) -> Table:
    """Return a merged table that has each box once: from the table that came first.

    Args:
        may_differ: Names of tensors of which the first values count.

    Raises:
        CheckpointCorruptError: Two tables have different values of a box of any other tensor.
    """
    tensor, bounds = table.tensor_of, table.bounds
    is_new = np.diff(tensor, prepend=-1) != 0
    is_new[1:] |= (bounds[1:] != bounds[:-1]).any(axis=(1, 2))
    if is_new.all():
        return table
    first = np.maximum.accumulate(np.where(is_new, np.arange(len(is_new)), 0))
    for row in np.flatnonzero(table.places[:, CRC] != table.places[first, CRC]).tolist():
        key = table.tensors.every[tensor[row]].key
        if key.fqn not in may_differ:
            one, other = table.fragments(np.array([first[row], row]))
            raise copies_differ(key, one.box, one.file, other.file)
    return Table(
        table.tensors,
        np.searchsorted(tensor[is_new], np.arange(len(table.tensors.every) + 1)),
        bounds[is_new],
        table.places[is_new],
        table.files,
        table.blocks,
    )


def columns_of(bounds: Numbers) -> list[Numbers]:
    """Return the bounds of boxes as columns, in the order in which boxes compare."""
    return [bounds[:, side, dim] for side in (START, STOP) for dim in range(bounds.shape[2])]


def _merged_tensors(tables: Sequence[Table]) -> tuple[TableTensors, list[Numbers]]:
    """Return the tensors of all tables, sorted, and the numbers that each table's tensors get."""
    first = tables[0].tensors
    if first.is_sorted and all(table.tensors is first for table in tables):
        return first, [np.arange(len(first.every))] * len(tables)
    known: dict[TensorKey, TableTensor] = {}
    for place, table in enumerate(tables):
        if place and table.tensors is tables[place - 1].tensors:
            continue
        for tensor in table.tensors.every:
            other = known.setdefault(tensor.key, tensor)
            if other != tensor:
                raise CheckpointCorruptError(
                    f"{tensor.key}: a rank saved {tensor.dtype}{list(tensor.shape)} to "
                    f"{', '.join(table.files)}, another rank {other.dtype}{list(other.shape)}",
                    fqn=tensor.key.fqn,
                    slot=tensor.key.slot,
                )
    tensors = TableTensors(known[key] for key in sorted(known))
    found: list[Numbers] = []
    for place, table in enumerate(tables):
        if place and table.tensors is tables[place - 1].tensors:
            found.append(found[-1])
        else:
            places = [tensors.numbers[tensor.key] for tensor in table.tensors.every]
            found.append(np.array(places, np.int64))
    return tensors, found


def _filled_up(bounds: Numbers, ndim: int) -> Numbers:
    missing = ndim - bounds.shape[2]
    if not missing:
        return bounds
    more = np.zeros((len(bounds), 2, missing), np.int64)
    more[:, STOP] = 1
    return np.concatenate((bounds, more), axis=2)
