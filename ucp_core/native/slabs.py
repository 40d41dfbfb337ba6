"""Any checkpoint as a stream of slabs: whole tensors in order, in bounded memory.

While the caller uses one group of slabs, a thread reads the next one into the other of two buffers.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ucp_core.geometry import DTYPE_BYTES, Box, Extent, TensorEntry, slabs
from ucp_core.native.opening import Checkpoint, check_memory, reading
from ucp_core.numerics import grouped
from ucp_core.reading import Part, Source, execute, plan, touched, verify_extents

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Sequence
    from concurrent.futures import Future

    from ucp_core.reading import ReadPlan

#: Alignment of a box in its buffer: a cache line.
_ALIGNMENT_BYTES = 64


class TensorBox(NamedTuple):
    """A box of a tensor."""

    entry: TensorEntry
    box: Box

    @property
    def num_bytes(self) -> int:
        """Return the size of the box."""
        return self.box.num_elements * DTYPE_BYTES[self.entry.dtype]


class Slab(NamedTuple):
    """A box and its bytes, C-contiguous; valid until the next slab is taken."""

    piece: TensorBox
    data: memoryview


def pieces_of(entries: Iterable[TensorEntry], slab_bytes: int) -> Iterator[TensorBox]:
    """Yield every tensor in pieces of at most ``slab_bytes`` (or one element)."""
    for entry in entries:
        bound = max(1, slab_bytes // DTYPE_BYTES[entry.dtype])
        for box in slabs(Box.full(entry.shape), bound):
            yield TensorBox(entry, box)


def stream(
    checkpoint: Checkpoint,
    entries: Iterable[TensorEntry],
    *,
    memory_bytes: int,
    piece_bytes_max: int | None = None,
) -> Generator[Slab, None, None]:
    """Yield the bytes of every tensor in order; an empty one yields nothing.

    Args:
        checkpoint: The source, in any format.
        memory_bytes: Limit for the buffers; at least ``MEMORY_BYTES_MIN``.
        piece_bytes_max: Slabs are at most this large.

    Raises:
        UcpError: The limit is too small, or the source is damaged.
    """
    slab_bytes = _slab_bytes(memory_bytes)
    pieces = pieces_of(entries, min(slab_bytes, piece_bytes_max or slab_bytes))
    yield from _stream(checkpoint, pieces, slab_bytes)


def stream_box(
    checkpoint: Checkpoint, entry: TensorEntry, box: Box, *, memory_bytes: int
) -> Iterator[Slab]:
    """Yield the bytes of a box of one tensor in order, like ``stream``."""
    slab_bytes = _slab_bytes(memory_bytes)
    boxes = slabs(box, max(1, slab_bytes // DTYPE_BYTES[entry.dtype]))
    yield from _stream(checkpoint, (TensorBox(entry, one) for one in boxes), slab_bytes)


def _slab_bytes(memory_bytes: int) -> int:
    check_memory(memory_bytes)
    # Two buffers, the scratch memory for reading, and as much for the caller's output.
    return memory_bytes // 4


def _stream(checkpoint: Checkpoint, pieces: Iterable[TensorBox], slab_bytes: int) -> Iterator[Slab]:
    verified: set[tuple[str, Extent]] = set()
    readers = [SlabReader(checkpoint, slab_bytes, verified) for _ in range(2)]
    # In this order: the lock is released once no thread reads.
    with reading(checkpoint), ThreadPoolExecutor(1, thread_name_prefix="ucp-ahead") as pool:
        ahead: Future[list[Slab]] | None = None
        # Small tensors are read together.
        groups = grouped(pieces, lambda piece: aligned(piece.num_bytes), slab_bytes)
        for number, group in enumerate(groups):
            ready = ahead.result() if ahead is not None else []
            # The caller has used up the slabs of the buffer that is filled now.
            ahead = pool.submit(readers[number % 2].read, group)
            yield from ready
        if ahead is not None:
            yield from ahead.result()


def aligned(num_bytes: int) -> int:
    """Return the size of a box in a buffer."""
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


class SlabReader:
    """Reads boxes of one checkpoint into memory that the next call reuses.

    It verifies a record of a foreign file when the first of its bytes is needed; readers that share
    ``verified`` verify it once together.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        slab_bytes: int,
        verified: set[tuple[str, Extent]] | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._verified = set() if verified is None else verified
        self._state_map = checkpoint.state_map
        self._source = Source(
            checkpoint.store, checkpoint.directory, checkpoint.state_map.block_bytes
        )
        self._span_bytes = max(1, slab_bytes // 2)
        self._buffer = memoryview(b"")

    def read(self, pieces: Sequence[TensorBox]) -> list[Slab]:
        """Return the bytes of the pieces, verified where the source has checksums."""
        offsets: list[int] = []
        total = 0
        for piece in pieces:
            offsets.append(total)
            total += aligned(piece.num_bytes)
        if total > len(self._buffer):
            self._buffer = np.empty(total, dtype=np.uint8).data
        targets = [
            self._buffer[offset : offset + piece.num_bytes]
            for offset, piece in zip(offsets, pieces, strict=True)
        ]
        parts = [Part(p.entry.key, p.entry.dtype, p.entry.shape, p.box) for p in pieces]
        reads = plan(parts, [self._state_map], span_bytes_max=self._span_bytes)
        if self._state_map.extents:
            self._verify(reads)
        execute(reads, [self._source], targets, threads=1, batch_bytes=self._span_bytes)
        return [Slab(piece, data) for piece, data in zip(pieces, targets, strict=True)]

    def _verify(self, reads: ReadPlan) -> None:
        new = {
            file: [extent for extent in extents if (file, extent) not in self._verified]
            for file, extents in touched(reads, self._state_map).items()
        }
        verify_extents(self._source.store, self._source.directory, self._state_map, new)
        self._verified.update((file, extent) for file in new for extent in new[file])
