"""Streams of a checkpoint's elements in any order: whole tensors, flat ranges, one rank's shards.

A stream needs two buffers of ``SLAB_BYTES_MAX``, independent of its ranges.
"""

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from operator import add, sub
from typing import NamedTuple, TypeAlias

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


class Source(NamedTuple):
    """A tensor of the source, or the part of it that a tensor of the target holds."""

    entry: TensorEntry
    shape: tuple[int, ...]
    #: Boxes of the part and their places in the whole tensor, which may have more dims in front;
    #: all other elements are zero.
    pieces: tuple[ShardPiece, ...]

    @property
    def dtype(self) -> str:
        """Return the dtype in the source."""
        return self.entry.dtype


#: Elements ``start <= i < stop`` of a flattened tensor, or as many zeros.
Range: TypeAlias = tuple[Source | None, int, int]


def whole(entry: TensorEntry) -> Source:
    """Return all elements of a tensor."""
    return Source(entry, entry.shape, (ShardPiece(Box.full(entry.shape), (0,) * len(entry.shape)),))


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
    for source, start, stop in ranges:
        if source is None:
            bound = max(1, slab_bytes // DTYPE_BYTES[dtype])
            for low in range(start, stop, bound):
                yield _Box(dtype, (min(bound, stop - low),), ())
            continue
        if source.dtype != dtype and not {source.dtype, dtype} <= set(FLOATS):
            raise UcpError(f"{source.entry.key}: {source.dtype} cannot be written as {dtype}")
        bound = max(1, slab_bytes // max(DTYPE_BYTES[source.dtype], DTYPE_BYTES[dtype]))
        for outer in flat_range(source.shape, start, stop):
            for box in slabs(outer, bound):
                yield _Box(source.dtype, box.shape, tuple(_pieces(source, box)))


def _pieces(source: Source, box: Box) -> Iterator[tuple[TensorBox, Box]]:
    """Yield the boxes of the whole tensor that lie in ``box`` of the part, with their places."""
    for piece in source.pieces:
        inner = box.intersect(piece.local)
        if inner is not None:
            lead = piece.start[: len(piece.start) - len(inner.start)]
            start = (
                *lead,
                *map(add, piece.start[len(lead) :], map(sub, inner.start, piece.local.start)),
            )
            extents = *(1 for _ in lead), *inner.shape
            moved = Box(start, tuple(map(add, start, extents)))
            yield TensorBox(source.entry, moved), inner.relative_to(box)


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
