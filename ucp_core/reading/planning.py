"""Plan which bytes to read for which boxes. Pure.

``plan`` covers every needed box with fragments and takes each element from one source;
``ucp_core.reading.transfer`` executes the plan.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from ucp_core.errors import CheckpointCorruptError, UncoveredRegionError
from ucp_core.geometry import (
    DTYPE_BYTES,
    Box,
    Fragment,
    StateMap,
    TensorEntry,
    TensorKey,
    is_packed,
    reach,
    slabs,
    span,
    sweep_dim,
)

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

    from ucp_core.geometry import Table, TableTensor

#: With fewer fragments, checking each one is cheaper than a search.
_SEARCH_FRAGMENTS_MIN = 16
#: Up to this gap one longer read is cheaper: reading 64 KiB from the page cache takes 3 us, as long
#: as planning and starting another read.
GAP_BYTES_MAX = 64 << 10
#: The fields of fragments that are equal for tensors cut alike.
_CUT = itemgetter(*map(Fragment._fields.index, ("box", "num_bytes", "replica", "strides")))
#: How many boxes' copies to remember for tensors cut alike.
_KNOWN_MAX = 256
#: With more fragments, comparing how two tensors are cut takes longer than a search.
_ALIKE_FRAGMENTS_MAX = 64
#: Elements of a mean to compute at a time: their float64 sums stay in the cache.
_MEAN_ELEMENTS_MAX = 1 << 18

#: A store's ``ReadRange``; plans do not know stores.
_ReadRange: TypeAlias = tuple[int, tuple[memoryview, ...]]
#: Runs in one call of a store; opening the file takes as long as five of them.
_RUNS_MAX = 1024


class Part(NamedTuple):
    """A needed box of a tensor, with C-contiguous memory of its own."""

    key: TensorKey
    dtype: str
    shape: tuple[int, ...]
    box: Box


class Copy(NamedTuple):
    """Elements to copy from one fragment to one part."""

    part: int  #: Index into the plan's parts.
    source: int  #: Index into the maps given to ``plan``.
    fragment: Fragment  #: Where the bytes are.
    #: The elements, in coordinates of the whole tensor. If ``target_byte`` is not -1, the bytes may
    #: be a part of them.
    box: Box
    start_byte: int  #: First byte, relative to the fragment's first element.
    stop_byte: int  #: End of the last byte; other elements may lie in between.
    #: Offset in the part if the bytes are contiguous in fragment and part; -1 if they must be
    #: gathered.
    target_byte: int
    #: Total size of the runs if they are read one by one; -1 to read all bytes from ``start_byte``
    #: to ``stop_byte``.
    run_bytes: int = -1


class Mean(NamedTuple):
    """Elements whose value is the mean of copies that were updated independently."""

    part: int  #: Index into the plan's parts.
    box: Box  #: The elements, in coordinates of the whole tensor; they are contiguous in the part.
    terms: tuple[ReadPlan, ...]  #: A plan for each copy, whose only part is the box.


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPlan:
    """Copies to make and the reads they need."""

    parts: tuple[Part, ...]  #: The needed parts.
    copies: tuple[Copy, ...]  #: In order of source, file and offset.
    needed_bytes: int  #: Size of all parts.
    read_bytes: int  #: Bytes to read, counting whole blocks.
    means: tuple[Mean, ...] = ()  #: Parts that are averages.

    def work_lists(self, num_lists: int) -> list[tuple[Copy, ...]]:
        """Split the copies into at most ``num_lists`` lists of about equal bytes, in order."""
        if num_lists == 1:
            return [self.copies] if self.copies else []
        total = sum(map(read_bytes_of, self.copies))
        lists: list[tuple[Copy, ...]] = []
        current: list[Copy] = []
        done = 0
        for copy in self.copies:
            current.append(copy)
            done += read_bytes_of(copy)
            if done * num_lists >= total * (len(lists) + 1):
                lists.append(tuple(current))
                current = []
        if current:
            lists.append(tuple(current))
        return lists


class _Limits(NamedTuple):
    """Limits on one copy."""

    span_bytes: int
    direct_bytes: int  #: Limit for a copy whose bytes are contiguous in fragment and part.
    gap_bytes: int  #: Limit for a gap between its elements.
    block_bytes: int  #: Block size of the checksums.
    run_gap_bytes: int  #: Smallest gap between runs that are read one by one.


def plan(
    need: Sequence[Part],
    have: Sequence[StateMap],
    *,
    span_bytes_max: int,
    direct_bytes_max: int | None = None,
    gap_bytes_max: int = GAP_BYTES_MAX,
    run_gap_bytes_min: int = sys.maxsize,
) -> ReadPlan:
    """Return how to get every part from the maps; for each box, prefer the earlier map.

    Args:
        have: Sources, cheapest first.
        span_bytes_max: Most bytes of a fragment that a copy may span; bounds the scratch memory.
        direct_bytes_max: The same for copies that need no scratch memory. Default: the former.
        gap_bytes_max: Elements further apart than this get separate copies.
        run_gap_bytes_min: Runs without checksums and at least this far apart form one copy and are
            read one by one. Default: none.

    Raises:
        UncoveredRegionError: No map holds a needed box.
        CheckpointCorruptError: A map has a tensor with another dtype or shape.
    """
    direct_bytes = direct_bytes_max or span_bytes_max
    limits = [
        _Limits(span_bytes_max, direct_bytes, gap_bytes_max, each.block_bytes, run_gap_bytes_min)
        for each in have
    ]
    return _Planner(have, limits).plan(need)


class _Planner:
    """Makes plans against the same maps.

    It remembers the fragments of one tensor only: a map can make its entries on demand, and those
    of a large model would not fit.
    """

    def __init__(self, have: Sequence[StateMap], limits: Sequence[_Limits]) -> None:
        self._have = have
        self._limits = limits
        self._key: TensorKey | None = None
        self._indices: dict[int, list[_Index]] = {}
        self._known: dict[Hashable, list[tuple[int, Copy]]] = {}

    def plan(self, need: Sequence[Part]) -> ReadPlan:
        """Return how to get every part."""
        copies: list[Copy] = []
        means: list[Mean] = []
        wanted = [(number, part) for number, part in enumerate(need) if not part.box.is_empty]
        needed_bytes = sum(part.box.num_elements * DTYPE_BYTES[part.dtype] for _, part in wanted)
        table = getattr(self._have[0].entries, "table", None) if len(self._have) == 1 else None
        if table is not None:
            wanted = self._from_table(wanted, table, copies)
        for number, part in wanted:
            if not self._like_another(number, part, copies):
                self._part(number, part, copies, means)
        read_bytes = self._read_bytes(copies) + sum(map(read_bytes_of, means))
        return _plan_of(need, copies, means, needed_bytes, read_bytes)

    def _from_table(
        self, wanted: Sequence[tuple[int, Part]], table: Table, copies: list[Copy]
    ) -> list[tuple[int, Part]]:
        """Cover parts as ``_part`` does, all at once; return those that the table does not have."""
        known: list[tuple[int, Part]] = []
        unknown: list[tuple[int, Part]] = []
        tensors: list[int] = []
        for number, part in wanted:
            tensor = table.tensors.numbers.get(part.key)
            if tensor is None:
                unknown.append((number, part))
            else:
                _check_same(part, table.tensors.every[tensor])
                known.append((number, part))
                tensors.append(tensor)
        limits = self._limits[0]
        pieces, is_found = table.pieces(tensors, [part.box for _, part in known])
        for index, fragment, box, start, stop, target in pieces:
            number, part = known[index]
            if target >= 0 and stop - start <= limits.direct_bytes:
                copies.append(Copy(number, 0, fragment, box, start, stop, target))
            else:
                copies += _copies(number, part, 0, fragment, box, limits)
        for index in (index for index, flag in enumerate(is_found) if not flag):
            number, part = known[index]
            near = _Index(table.near(tensors[index], part.box), len(part.shape))
            left = self._cover(number, part, 0, near, [part.box], copies)
            if left:
                raise _uncovered(part, left[0], f"box {left[0]} is in no file")
        return unknown

    def _like_another(self, number: int, part: Part, copies: list[Copy]) -> bool:
        """Cover a part by the plan of tensors that are cut alike; return whether it could."""
        entry = self._have[0].entries.get(part.key) if len(self._have) == 1 else None
        if entry is None or entry.copies > 1 or len(entry.fragments) > _ALIKE_FRAGMENTS_MAX:
            return False
        _check_same(part, entry)
        fragments = entry.fragments
        is_checked = tuple([fragment.crc32 is not None for fragment in fragments])
        cut = part.dtype, part.shape, part.box, tuple(map(_CUT, fragments)), is_checked
        known = self._known.get(cut)
        if known is None:
            own: list[Copy] = []
            self._part(number, part, own, [])
            copies += own
            places = {fragment: place for place, fragment in enumerate(fragments)}
            if len(self._known) == _KNOWN_MAX:
                self._known.clear()
            self._known[cut] = [(places[copy.fragment], copy) for copy in own]
        else:
            copies += [Copy(number, 0, fragments[place], *copy[3:]) for place, copy in known]
        return True

    def _part(self, number: int, part: Part, copies: list[Copy], means: list[Mean]) -> None:
        """Cover the part's box with fragments of the first maps that have them."""
        left = [part.box]
        for source, state_map in enumerate(self._have):
            entry = state_map.entries.get(part.key)
            if entry is None:
                continue
            _check_same(part, entry)
            indices = self._index(source, entry)
            if entry.copies > 1:
                # Every copy covers the tensor, or the map is damaged.
                for box in left:
                    means += self._means(number, part._replace(box=box), source, indices)
                return
            left = self._cover(number, part, source, indices[0], left, copies)
            if not left:
                return
        known = any(part.key in state_map.entries for state_map in self._have)
        what = f"box {left[0]} is in no file" if known else "is not in the checkpoint"
        raise _uncovered(part, left[0], what)

    def _cover(
        self,
        number: int,
        part: Part,
        source: int,
        index: _Index,
        left: list[Box],
        copies: list[Copy],
    ) -> list[Box]:
        """Cover the boxes ``left`` with fragments; return the boxes that remain."""
        for fragment in index.near(part.box):
            rest: list[Box] = []
            for box in left:
                inner = box.intersect(fragment.box)
                if inner is None:
                    rest.append(box)
                    continue
                copies += _copies(number, part, source, fragment, inner, self._limits[source])
                if inner != box:
                    rest += box.subtract(inner)
            left = rest
            if not left:
                break
        return left

    def _means(
        self, number: int, part: Part, source: int, indices: Sequence[_Index]
    ) -> Iterator[Mean]:
        for box in slabs(part.box, _MEAN_ELEMENTS_MAX):
            piece = part._replace(box=box)
            terms: list[ReadPlan] = []
            for copy, index in enumerate(indices):
                copies: list[Copy] = []
                left = self._cover(0, piece, source, index, [box], copies)
                if left:
                    raise _uncovered(part, left[0], f"box {left[0]} of copy {copy} is in no file")
                needed_bytes = box.num_elements * DTYPE_BYTES[part.dtype]
                read_bytes = self._read_bytes(copies)
                terms.append(_plan_of([piece], copies, [], needed_bytes, read_bytes))
            yield Mean(number, box, tuple(terms))

    def _index(self, source: int, entry: TensorEntry) -> list[_Index]:
        """Return the fragments of each copy of a tensor."""
        if entry.key != self._key:
            self._key = entry.key
            self._indices.clear()
        found = self._indices.get(source)
        if found is None:
            copies: list[list[Fragment]] = [[] for _ in range(entry.copies)]
            for fragment in entry.fragments:
                copies[fragment.copy].append(fragment)
            found = [_Index(fragments, len(entry.shape)) for fragments in copies]
            self._indices[source] = found
        return found

    def _read_bytes(self, copies: Sequence[Copy]) -> int:
        return sum(read_bytes_of(copy, self._limits[copy.source].block_bytes) for copy in copies)


def readable(copy: Copy, block_bytes: int) -> tuple[int, int]:
    """Return the bytes of the fragment to read for a copy: whole blocks if they have checksums."""
    if copy.fragment.crc32 is None:
        return copy.start_byte, copy.stop_byte
    low = copy.start_byte // block_bytes * block_bytes
    high = -(-copy.stop_byte // block_bytes) * block_bytes
    return low, min(high, copy.fragment.num_bytes)


def read_bytes_of(step: Copy | Mean, block_bytes: int = 1) -> int:
    """Return what one step of a plan reads."""
    if isinstance(step, Mean):
        return sum(term.read_bytes for term in step.terms)
    if step.run_bytes >= 0:
        return step.run_bytes
    low, high = readable(step, block_bytes)
    return high - low


class _Index:
    """The fragments of one copy of a tensor, sorted by place, replicas last."""

    def __init__(self, fragments: Sequence[Fragment], ndim: int) -> None:
        primary = [fragment for fragment in fragments if not fragment.replica]
        self._replicas = [fragment for fragment in fragments if fragment.replica]
        self._dim = -1
        if ndim and len(primary) >= _SEARCH_FRAGMENTS_MIN:
            dim = self._dim = sweep_dim([fragment.box for fragment in primary], ndim)
            primary.sort(key=lambda f: f.box.start[dim])
            self._starts = [f.box.start[dim] for f in primary]
            self._extent_max = max(f.box.stop[dim] - f.box.start[dim] for f in primary)
        self._primary = primary

    def near(self, box: Box) -> Iterator[Fragment]:
        """Yield every fragment that may overlap ``box``, and few others."""
        if self._dim < 0:
            yield from self._primary
        else:
            # Fragments that start below this cannot reach the box.
            low = bisect_left(self._starts, box.start[self._dim] - self._extent_max + 1)
            high = bisect_left(self._starts, box.stop[self._dim])
            yield from self._primary[low:high]
        yield from self._replicas


def _plan_of(
    need: Sequence[Part],
    copies: list[Copy],
    means: Sequence[Mean],
    needed_bytes: int,
    read_bytes: int,
) -> ReadPlan:
    copies.sort(key=lambda c: (c.source, c.fragment.file, c.fragment.offset_bytes + c.start_byte))
    return ReadPlan(
        parts=tuple(need),
        copies=tuple(copies),
        needed_bytes=needed_bytes,
        read_bytes=read_bytes,
        means=tuple(means),
    )


def _uncovered(part: Part, box: Box, what: str) -> UncoveredRegionError:
    return UncoveredRegionError(
        f"{part.key}: {what}; the model that loads must have the tensors of the one that saved",
        fqn=part.key.fqn,
        slot=part.key.slot,
        box=box,
    )


def _check_same(part: Part, entry: TensorEntry | TableTensor) -> None:
    if part.dtype != entry.dtype or part.shape != entry.shape:
        raise CheckpointCorruptError(
            f"{part.key}: the checkpoint has {entry.dtype}{list(entry.shape)}, the model needs "
            f"{part.dtype}{list(part.shape)}; load it with the model that saved it",
            fqn=part.key.fqn,
            slot=part.key.slot,
        )


def _copies(
    number: int, part: Part, source: int, fragment: Fragment, box: Box, limits: _Limits
) -> Iterator[Copy]:
    """Yield copies of one box, each within ``limits``."""
    itemsize = DTYPE_BYTES[part.dtype]
    strides = fragment.byte_strides(itemsize)
    start_byte, stop_byte = reach(box, fragment.box, strides, itemsize)
    low, high = span(box, part.box)
    shape = box.shape
    if high - low == box.num_elements and is_packed(shape, strides, itemsize):
        yield from _direct(
            Copy(number, source, fragment, box, start_byte, stop_byte, low * itemsize), limits
        )
        return
    # Along the dim with the longest stride, reads go through the file in order.
    dim = max((d for d, extent in enumerate(shape) if extent > 1), key=lambda d: strides[d])
    size = box.num_elements * itemsize
    if fragment.crc32 is None and _rows_of(fragment, box, part).gap_bytes >= limits.run_gap_bytes:
        # In pieces that threads can share.
        for piece in box.split(dim, min(-(-size // limits.direct_bytes), shape[dim])):
            low, high = reach(piece, fragment.box, strides, itemsize)
            size = piece.num_elements * itemsize
            yield Copy(number, source, fragment, piece, low, high, -1, size)
        return
    start = box.start[dim]
    inner = reach(box.with_dim(dim, start, start + 1), fragment.box, strides, itemsize)
    gap_bytes = limits.gap_bytes
    if fragment.crc32 is not None:
        # The read includes the blocks at both ends.
        gap_bytes += 2 * limits.block_bytes
    if strides[dim] - (inner[1] - inner[0]) > gap_bytes:
        pieces = box.split(dim, shape[dim])
    elif stop_byte - start_byte > limits.span_bytes:
        pieces = box.split(dim, 2)
    else:
        yield Copy(number, source, fragment, box, start_byte, stop_byte, -1)
        return
    for piece in pieces:
        yield from _copies(number, part, source, fragment, piece, limits)


def _direct(copy: Copy, limits: _Limits) -> Iterator[Copy]:
    """Yield a contiguous copy, split if it is too large."""
    if copy.stop_byte - copy.start_byte <= limits.direct_bytes:
        yield copy
        return
    # Split at the ends of blocks, so that no block is read twice.
    unit = 1 if copy.fragment.crc32 is None else limits.block_bytes
    start_byte, shift = copy.start_byte, copy.target_byte - copy.start_byte
    while copy.stop_byte - start_byte > limits.direct_bytes:
        cut = (start_byte + limits.direct_bytes) // unit * unit
        if cut <= start_byte:
            break
        yield copy._replace(start_byte=start_byte, stop_byte=cut, target_byte=start_byte + shift)
        start_byte = cut
    yield copy._replace(start_byte=start_byte, target_byte=start_byte + shift)


class _Dim(NamedTuple):
    """A dim along which runs repeat; strides in bytes."""

    extent: int
    source: int
    target: int


class _Rows(NamedTuple):
    """The contiguous runs of a box's elements, in a fragment and in a part."""

    run_bytes: int  #: Size of a run.
    dims: tuple[_Dim, ...]  #: The dims along which runs repeat, outermost first.

    @property
    def gap_bytes(self) -> int:
        """Return the smallest gap between runs in the file; negative if they interleave."""
        return min((dim.source for dim in self.dims), default=self.run_bytes) - self.run_bytes

    def runs(
        self, source_byte: int, target_byte: int, target: memoryview
    ) -> Iterator[list[_ReadRange]]:
        """Yield ranges to read, in order of the dims.

        Args:
            source_byte: Offset of the first run in the file.
            target_byte: Its offset in the part.
            target: The part's memory.
        """
        starts, places = [source_byte], [target_byte]
        for dim in self.dims:
            starts = [low + i * dim.source for low in starts for i in range(dim.extent)]
            places = [low + i * dim.target for low in places for i in range(dim.extent)]
        size = self.run_bytes
        for low in range(0, len(places), _RUNS_MAX):
            some = slice(low, low + _RUNS_MAX)
            pairs = zip(starts[some], places[some], strict=True)
            yield [(start, (target[place : place + size],)) for start, place in pairs]


def _rows_of(fragment: Fragment, box: Box, part: Part) -> _Rows:
    """Return the runs of ``box``, which lies in both the fragment and the part."""
    run_bytes = inner = DTYPE_BYTES[part.dtype]
    strides = fragment.byte_strides(inner)
    dims: list[_Dim] = []
    for dim in reversed(range(len(box.shape))):
        extent = box.shape[dim]
        if not dims and strides[dim] == inner == run_bytes:
            run_bytes *= extent
        elif extent > 1:
            dims.append(_Dim(extent, strides[dim], inner))
        inner *= part.box.shape[dim]
    return _Rows(run_bytes, tuple(reversed(dims)))


def runs_of(copy: Copy, part: Part, target: memoryview) -> Iterator[list[_ReadRange]]:
    """Yield ranges to read for a copy whose runs are read one by one."""
    low, _ = span(copy.box, part.box)
    rows = _rows_of(copy.fragment, copy.box, part)
    source_byte = copy.fragment.offset_bytes + copy.start_byte
    return rows.runs(source_byte, low * DTYPE_BYTES[part.dtype], target)
