"""Compares a rank's part of a parameter with the weights in a flat buffer.

A buffer's fp32 weights round to the model's. It compares a few elements at either end of each
chunk.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple

from ucp_core.formats.shared import grouped_experts, rounded
from ucp_core.geometry import DTYPE_BYTES, Fragment, TensorEntry
from ucp_core.storage import join

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucp_core.formats.dcp import Container
    from ucp_core.geometry import Box

#: Elements to compare at either end of a chunk.
_SAMPLE = 64


class HeldChunk(NamedTuple):
    """A chunk of the model's tensor on one rank, and the place of its weights."""

    key: str
    dtype: str
    fragment: Fragment


class Param(NamedTuple):
    """One rank's part of a parameter: its chunks, one after the other along dim 0."""

    key: str
    pieces: tuple[HeldChunk, ...]
    is_replica: bool

    @property
    def num_elements(self) -> int:
        """Return the number of elements that the rank holds."""
        return sum(piece.fragment.box.num_elements for piece in self.pieces)

    @property
    def boxes(self) -> list[Box]:
        """Return the boxes of the pieces in the model's tensor."""
        return [piece.fragment.box for piece in self.pieces]

    @property
    def may_be_grouped(self) -> bool:
        """Return whether the part may be several experts in one parameter, in another order."""
        return grouped_experts.may_be_grouped(self.key, self.boxes)


class Buffer:
    """One flat tensor and its chunks by position."""

    def __init__(self, entry: TensorEntry) -> None:
        self.entry = entry
        (self.num_elements,) = entry.shape
        self._starts = [fragment.box.start[0] for fragment in entry.fragments]

    def cut(self, start: int, stop: int) -> list[tuple[int, int, str, int]]:
        """Return the parts of ``[start, stop)``: bounds, file, and byte of the first element."""
        parts: list[tuple[int, int, str, int]] = []
        itemsize = DTYPE_BYTES[self.entry.dtype]
        index = max(0, bisect_right(self._starts, start) - 1)
        for fragment in self.entry.fragments[index:]:
            low, high = max(start, fragment.box.start[0]), min(stop, fragment.box.stop[0])
            if fragment.box.start[0] >= stop:
                break
            if low < high:
                at = fragment.offset_bytes + (low - fragment.box.start[0]) * itemsize
                parts.append((low, high, fragment.file, at))
        return parts


def holds(container: Container, buffer: Buffer, start: int, param: Param) -> bool:
    """Return whether the buffer has the parameter's weights, in either order."""
    if start + param.num_elements > buffer.num_elements:
        return False
    return holds_plain(container, buffer, start, param) or (
        param.may_be_grouped and holds_grouped(container, buffer, start, param)
    )


def holds_plain(container: Container, buffer: Buffer, start: int, param: Param) -> bool:
    """Return whether the buffer has the weights at both ends of each chunk, in order."""
    low = start
    for piece in param.pieces:
        count = piece.fragment.box.num_elements
        sample = min(_SAMPLE, count)
        for skip in {0, count - sample}:
            if not _is_alike(container, buffer, low + skip, piece, (skip, sample, 1)):
                return False
        low += count
    return True


def holds_grouped(container: Container, buffer: Buffer, start: int, param: Param) -> bool:
    """Return whether the buffer has the weights in the order of grouped experts."""
    return all(
        _is_alike(container, buffer, start + position, param.pieces[index], (first, count, step))
        for index, position, count, first, step in grouped_experts.samples(param.boxes, _SAMPLE)
    )


def _is_alike(
    container: Container, buffer: Buffer, low: int, piece: HeldChunk, where: tuple[int, int, int]
) -> bool:
    """Return whether masters from ``low`` on round to weights: first, number and distance."""
    first, count, step = where
    master = _read(container, buffer.cut(low, low + count), buffer.entry)
    if len(master) != count * DTYPE_BYTES[buffer.entry.dtype]:
        return False
    itemsize = DTYPE_BYTES[piece.dtype]
    weights = _weights(container, piece, first, (count - 1) * step + 1)
    apart = [weights[at : at + itemsize] for at in range(0, len(weights), step * itemsize)]
    expected = weights if step == 1 else b"".join(apart)
    return rounded(master, buffer.entry.dtype, piece.dtype) == expected


def _read(
    container: Container, parts: Sequence[tuple[int, int, str, int]], entry: TensorEntry
) -> bytes:
    itemsize = DTYPE_BYTES[entry.dtype]
    return b"".join(
        container.store.read_range(join(container.directory, file), at, (high - low) * itemsize)
        for low, high, file, at in parts
    )


def _weights(container: Container, piece: HeldChunk, skip: int, count: int) -> bytes:
    fragment, itemsize = piece.fragment, DTYPE_BYTES[piece.dtype]
    path = join(container.directory, fragment.file)
    return container.store.read_range(
        path, fragment.offset_bytes + skip * itemsize, count * itemsize
    )
