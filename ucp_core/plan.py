"""Which bytes to read to get which boxes: arithmetic only, done before any byte moves.

``plan`` covers every box that is needed from the fragments that are held, one source per element.
Counterpart: ``ucp_core.transfer`` executes the plan.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ucp_core.boxes import Box, span
from ucp_core.errors import CheckpointCorruptError, UncoveredRegionError
from ucp_core.statemap import DTYPE_BYTES, Fragment, StateMap, TensorEntry, TensorKey

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: Up to this many fragments a look at each is cheaper than a search.
_SEARCH_FRAGMENTS_MIN = 16


class Part(NamedTuple):
    """A box of a tensor that somebody needs; its bytes go C-contiguously to memory of its own."""

    key: TensorKey
    dtype: str
    shape: tuple[int, ...]
    box: Box


class Copy(NamedTuple):
    """Elements to take from one fragment to one part.

    Attributes:
        part: Index into the plan's parts.
        source: Index into the maps that were given to ``plan``.
        fragment: Where the bytes are.
        box: The elements, in coordinates of the whole tensor. Where ``target_byte`` is not -1,
            the bytes may be only a part of it.
        start_byte: First byte, counted from the fragment's start.
        stop_byte: Behind the last byte; other elements may lie between.
        target_byte: Where the bytes go, counted from the start of the part, if they lie side by
            side both in the fragment and in the part; -1 if they have to be gathered.
    """

    part: int
    source: int
    fragment: Fragment
    box: Box
    start_byte: int
    stop_byte: int
    target_byte: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPlan:
    """What to copy, and what it will cost.

    Attributes:
        parts: What was needed.
        copies: In order of source, file and offset.
        needed_bytes: Size of all parts.
        read_bytes: What will be read for them, whole blocks counted.
    """

    parts: tuple[Part, ...]
    copies: tuple[Copy, ...]
    needed_bytes: int
    read_bytes: int

    def work_lists(self, num_lists: int) -> list[tuple[Copy, ...]]:
        """Return the copies in at most ``num_lists`` lists of about equal bytes.

        Each list is a run of the plan's order, so that neighbours in a file stay together.
        """
        total = sum(copy.stop_byte - copy.start_byte for copy in self.copies)
        lists: list[tuple[Copy, ...]] = []
        current: list[Copy] = []
        done = 0
        for copy in self.copies:
            current.append(copy)
            done += copy.stop_byte - copy.start_byte
            if done * num_lists >= total * (len(lists) + 1):
                lists.append(tuple(current))
                current = []
        if current:
            lists.append(tuple(current))
        return lists


def plan(
    need: Sequence[Part],
    have: Sequence[StateMap],
    *,
    span_bytes_max: int,
    direct_bytes_max: int | None = None,
) -> ReadPlan:
    """Return how to get every part from the maps; an earlier map is preferred box by box.

    Args:
        need: What is needed.
        have: Where to take it from, cheapest first.
        span_bytes_max: A copy reaches over at most so many bytes of a fragment, unless a single
            element is larger; it bounds the memory of whoever executes the plan.
        direct_bytes_max: The same for copies that need no memory, because their bytes lie alike
            in the fragment and in the part; what is read at a time. Default: the former.

    Raises:
        UncoveredRegionError: No map holds a box that is needed.
        CheckpointCorruptError: A map holds a tensor of another dtype or shape than needed.
    """
    copies: list[Copy] = []
    needed_bytes = 0
    for index, part in enumerate(need):
        if part.box.is_empty:
            continue
        needed_bytes += part.box.num_elements * DTYPE_BYTES[part.dtype]
        for source, fragment, box in _sources(part, have):
            limits = (span_bytes_max, direct_bytes_max or span_bytes_max, have[source].block_bytes)
            copies += _copies(index, part, source, fragment, box, limits)
    copies.sort(key=lambda c: (c.source, c.fragment.file, c.fragment.offset_bytes + c.start_byte))
    return ReadPlan(
        parts=tuple(need),
        copies=tuple(copies),
        needed_bytes=needed_bytes,
        read_bytes=sum(_blocks_bytes(copy, have[copy.source].block_bytes) for copy in copies),
    )


def _sources(part: Part, have: Sequence[StateMap]) -> list[tuple[int, Fragment, Box]]:
    """Cover the part's box with fragments, each element by the first that has it."""
    found: list[tuple[int, Fragment, Box]] = []
    left: list[Box] = [part.box]
    for source, state_map in enumerate(have):
        entry = state_map.entries.get(part.key)
        if entry is None:
            continue
        _check_same(part, entry)
        for fragment in _near(entry, part.box):
            rest: list[Box] = []
            for box in left:
                inner = box.intersect(fragment.box)
                if inner is None:
                    rest.append(box)
                    continue
                found.append((source, fragment, inner))
                if inner != box:
                    rest += box.subtract(inner)
            left = rest
            if not left:
                return found
    known = any(part.key in state_map.entries for state_map in have)
    what = f"box {left[0]} is in no file" if known else "is not in the checkpoint"
    raise UncoveredRegionError(
        f"{part.key}: {what}; the model that loads must have the tensors of the one that saved",
        fqn=part.key.fqn,
        slot=part.key.slot,
        box=left[0],
    )


def _check_same(part: Part, entry: TensorEntry) -> None:
    if part.dtype != entry.dtype or part.shape != entry.shape:
        raise CheckpointCorruptError(
            f"{part.key}: the checkpoint has {entry.dtype}{list(entry.shape)}, "
            f"needed is {part.dtype}{list(part.shape)}; load it with the model that saved it",
            fqn=part.key.fqn,
            slot=part.key.slot,
        )


def _near(entry: TensorEntry, box: Box) -> Sequence[Fragment]:
    """Return the fragments that can meet ``box``, by a search along dim 0 if there are many."""
    fragments = entry.fragments
    if len(fragments) < _SEARCH_FRAGMENTS_MIN or not entry.shape:
        return fragments
    # Fragments are in order of their start, so those that start too early or too late are cut.
    extent_max = max(fragment.box.stop[0] - fragment.box.start[0] for fragment in fragments)
    low = bisect_left(fragments, box.start[0] - extent_max, key=lambda f: f.box.start[0])
    high = bisect_left(fragments, box.stop[0], key=lambda f: f.box.start[0])
    return fragments[low:high]


def _copies(
    index: int,
    part: Part,
    source: int,
    fragment: Fragment,
    box: Box,
    limits: tuple[int, int, int],
) -> Iterator[Copy]:
    """Yield the copies of one box, cut so that none spans more than ``limits`` allow.

    ``limits`` are the bytes that a gathered and a direct copy may span, and those of a block.
    """
    span_bytes_max, direct_bytes_max, block_bytes = limits
    itemsize = DTYPE_BYTES[part.dtype]
    first, last = span(box, fragment.box)
    start_byte, stop_byte = first * itemsize, last * itemsize
    num_elements = box.num_elements
    low, high = span(box, part.box)
    if last - first == high - low == num_elements:
        # Bytes can be cut anywhere; at the ends of blocks, no block is read twice.
        target = low * itemsize - start_byte
        while stop_byte - start_byte > direct_bytes_max:
            cut = (start_byte + direct_bytes_max) // block_bytes * block_bytes
            if cut <= start_byte:
                break
            yield Copy(index, source, fragment, box, start_byte, cut, target + start_byte)
            start_byte = cut
        yield Copy(index, source, fragment, box, start_byte, stop_byte, target + start_byte)
    elif stop_byte - start_byte > span_bytes_max and num_elements > 1:
        dim = next(d for d, extent in enumerate(box.shape) if extent > 1)
        for half in box.split(dim, 2):
            yield from _copies(index, part, source, fragment, half, limits)
    else:
        yield Copy(index, source, fragment, box, start_byte, stop_byte, -1)


def _blocks_bytes(copy: Copy, block_bytes: int) -> int:
    low = copy.start_byte // block_bytes * block_bytes
    high = -(-copy.stop_byte // block_bytes) * block_bytes
    return min(high, copy.fragment.num_bytes) - low
