"""Streams of a checkpoint's elements in any order: whole tensors, flat ranges, one rank's shards.

A stream needs two buffers of ``SLAB_BYTES_MAX``, independent of its ranges.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from operator import add
from typing import NamedTuple

import numpy as np

from ucp_core.errors import UcpError
from ucp_core.geometry import DTYPE_BYTES, Box, TensorEntry, flat_range, slabs
from ucp_core.language import ShardPiece
from ucp_core.native import Checkpoint, Slab, SlabReader, TensorBox
from ucp_core.numerics import FLOATS, cast, grouped

#: Reads and writes of this size are as fast as larger ones; casting more at once only costs memory.
SLAB_BYTES_MAX = 8 << 20
#: A slab, its scratch buffer, the gathered elements and the result of casting.
_BUFFERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StackPart(TensorEntry):
    """Rows of one matrix of a stack, as a tensor of its own."""

    whole: TensorEntry  #: The stack.
    corner: tuple[int, int, int]  #: Where the matrix part begins in the stack.


class RankShard(NamedTuple):
    """One model-parallel rank's shard of a tensor."""

    entry: TensorEntry
    shape: tuple[int, ...]
    #: Boxes of the shard and their places in the whole tensor; all other elements are zero.
    pieces: tuple[ShardPiece, ...] | None = None


class Range(NamedTuple):
    """Elements ``start <= i < stop`` of a flattened shard, or zeros if ``shard`` is None."""

    shard: RankShard | None
    start: int
    stop: int


class _Box(NamedTuple):
    """The next box of a shard: its shape, and pieces with their places in it."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[tuple[TensorBox, Box], ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


class FlatReader:
    """Reads one checkpoint as streams of elements, each within ``memory_bytes``."""

    def __init__(self, checkpoint: Checkpoint, memory_bytes: int) -> None:
        self._slab_bytes = min(SLAB_BYTES_MAX, memory_bytes // _BUFFERS)
        self._reader = SlabReader(checkpoint, self._slab_bytes)

    def stream(self, ranges: Iterable[Range], dtype: str) -> Iterator[memoryview]:
        """Yield the elements of all ranges as ``dtype``; a chunk is valid until the next one."""
        runs = _runs(ranges, dtype, self._slab_bytes)
        for group in grouped(runs, lambda run: run.num_bytes, self._slab_bytes):
            slabs = iter(self._reader.read([piece for run in group for piece, _ in run.pieces]))
            for run in group:
                yield _elements(run, slabs, dtype)


def _runs(ranges: Iterable[Range], dtype: str, slab_bytes: int) -> Iterator[_Box]:
    for item in ranges:
        if item.shard is None:
            bound = max(1, slab_bytes // DTYPE_BYTES[dtype])
            for low in range(item.start, item.stop, bound):
                yield _Box(dtype, (min(bound, item.stop - low),), ())
            continue
        shard = item.shard
        source = shard.entry.dtype
        if source != dtype and not {source, dtype} <= set(FLOATS):
            raise UcpError(f"{shard.entry.key}: {source} cannot be written as {dtype}")
        bound = max(1, slab_bytes // max(DTYPE_BYTES[source], DTYPE_BYTES[dtype]))
        for outer in flat_range(shard.shape, item.start, item.stop):
            for box in slabs(outer, bound):
                yield _Box(source, box.shape, _pieces(shard, box))


def _pieces(shard: RankShard, box: Box) -> tuple[tuple[TensorBox, Box], ...]:
    """Return the boxes of the whole tensor that lie in ``box`` of the shard, with their places."""
    if isinstance(shard.entry, StackPart):
        matrix, row, column = shard.entry.corner
        (top, left), (bottom, right) = box
        start, stop = (matrix, row + top, column + left), (matrix + 1, row + bottom, column + right)
        return ((TensorBox(shard.entry.whole, Box(start, stop)), box.relative_to(box)),)
    if shard.pieces is None:
        return ((TensorBox(shard.entry, box), box.relative_to(box)),)
    found: list[tuple[TensorBox, Box]] = []
    for piece in shard.pieces:
        inner = box.intersect(piece.local)
        if inner is None:
            continue
        shift = [s - a for s, a in zip(piece.start, piece.local.start, strict=True)]
        moved = Box(tuple(map(add, inner.start, shift)), tuple(map(add, inner.stop, shift)))
        found.append((TensorBox(shard.entry, moved), inner.relative_to(box)))
    return tuple(found)


def _elements(run: _Box, slabs: Iterator[Slab], dtype: str) -> memoryview:
    if not run.pieces:
        return memoryview(bytes(prod(run.shape) * DTYPE_BYTES[dtype]))
    if len(run.pieces) == 1 and run.pieces[0][1].shape == run.shape:
        return cast(next(slabs).data, run.dtype, dtype)
    unit = np.dtype(f"V{DTYPE_BYTES[run.dtype]}")
    gathered = np.zeros(run.shape, unit)
    for _, inner in run.pieces:
        place = tuple(slice(a, b) for a, b in zip(inner.start, inner.stop, strict=True))
        gathered[place] = np.frombuffer(next(slabs).data, unit).reshape(inner.shape)
    return cast(memoryview(gathered.reshape(-1).view(np.uint8).data), run.dtype, dtype)


def read_scalars(checkpoint: Checkpoint, entries: Sequence[TensorEntry]) -> list[bytes]:
    """Return the bytes of 0-d tensors, all read together."""
    reader = SlabReader(checkpoint, SLAB_BYTES_MAX)
    pieces = [TensorBox(entry, Box.full(entry.shape)) for entry in entries]
    return [bytes(slab.data) for slab in reader.read(pieces)]
