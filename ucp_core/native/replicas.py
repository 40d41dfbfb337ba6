"""Let replicas load together: each reads a share of what all need and sends it to the others.

``n`` ranks that need the same tensors read ``1/n`` of the bytes each (the redundancy-bypassing load
of the Universal Checkpointing paper). All make the same plan without communication, read and verify
their share, and send it in chunks. Every chunk says whether its sender could read it, so no rank
waits for one that failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from struct import Struct
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from ucp_core.errors import CheckpointCorruptError, UcpError
from ucp_core.geometry import DTYPE_BYTES
from ucp_core.native.opening import (
    Checkpoint,
    LoadResult,
    LocalTensor,
    load,
    parts_of,
    reading,
    targets_of,
)
from ucp_core.numerics import crc32
from ucp_core.reading import (
    Copy,
    Mean,
    ReadPlan,
    Source,
    execute,
    gap_bytes_max,
    plan,
    read_bytes_of,
    run_gap_bytes_min,
    view_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

#: Bytes that a rank receives at a time from all ranks together; more is not faster.
CHUNKS_BYTES = 64 << 20
_CHUNK_BYTES_MIN = 1 << 20
#: Head of a chunk: whether its sender failed, and the crc32.
_HEAD = Struct("<?3xI")
_ALIGNMENT_BYTES = 8


class Transport(Protocol):
    """The ranks that load together."""

    rank: int  #: This rank, ``0 <= rank < size``.
    size: int

    def all_gather(self, mine: memoryview, held: Sequence[memoryview]) -> None:
        """Fill ``held[r]`` with ``mine`` of rank ``r``, for every rank.

        Every rank calls it, in the same order, with buffers of one size. It blocks until all have
        arrived, and raises if a rank is lost.
        """


class Share(NamedTuple):
    """The part of a plan that one rank reads."""

    copies: tuple[Copy, ...]
    means: tuple[Mean, ...]


def shares(reads: ReadPlan, num_shares: int) -> list[Share]:
    """Split the plan into disjoint shares of about equal bytes; some may be empty.

    Each share is contiguous in the plan's order, so neighbours in a file stay together.
    """
    steps: list[Copy | Mean] = [*reads.copies, *reads.means]
    items = [(step, read_bytes_of(step)) for step in steps]
    total = sum(num_bytes for _, num_bytes in items)
    found: list[list[Copy | Mean]] = [[] for _ in range(num_shares)]
    done = 0
    for item, num_bytes in items:
        # By the middle of the item: it goes to the share that has most of it.
        number = (2 * done + num_bytes) * num_shares // (2 * total) if total else 0
        found[min(number, num_shares - 1)].append(item)
        done += num_bytes
    return [
        Share(
            tuple(item for item in share if isinstance(item, Copy)),
            tuple(item for item in share if isinstance(item, Mean)),
        )
        for share in found
    ]


def load_together(
    checkpoint: Checkpoint,
    need: Sequence[LocalTensor],
    transport: Transport,
    *,
    threads: int = 2,
) -> LoadResult:
    """Fill the data of every tensor in ``need``; each rank reads only a share.

    Every rank of the transport must call it with tensors of the same names and boxes; it waits for
    the slowest.

    Args:
        checkpoint: The source, the same on all ranks.
        need: Boxes and writable memory.
        transport: The ranks with the same need.
        threads: Most readers on this rank.

    Raises:
        CheckpointCorruptError: A rank cannot read its share, or needs something else. All ranks
            raise it; do not use ``need``. ``facts["peer"]`` is the rank if it is not this one.
        StorageError: A file of this rank's share cannot be read; the others raise as well.
    """
    if transport.size == 1:
        return load(checkpoint, need, threads=threads)
    begun = perf_counter()
    chunk_bytes = max(_CHUNK_BYTES_MIN, CHUNKS_BYTES // transport.size)
    failure: UcpError | None = None
    reads = ReadPlan(parts=(), copies=(), needed_bytes=0, read_bytes=0)
    with ExitStack() as stack:
        try:
            stack.enter_context(reading(checkpoint))
            reads = plan(
                parts_of(need),
                [checkpoint.state_map],
                span_bytes_max=chunk_bytes,
                direct_bytes_max=min(chunk_bytes, checkpoint.store.request_bytes),
                gap_bytes_max=gap_bytes_max(checkpoint.store),
                run_gap_bytes_min=run_gap_bytes_min(checkpoint.store),
            )
        except UcpError as error:
            failure = error
        _agree(transport, reads, failure)
        loader = _Loader(checkpoint, reads, targets_of(need), threads)
        work = [_chunks(reads, share, chunk_bytes) for share in shares(reads, transport.size)]
        _rounds(loader, work, transport)
    block_bytes = checkpoint.state_map.block_bytes
    return LoadResult(
        size_bytes=reads.needed_bytes,
        read_bytes=sum(chunk.read_bytes(block_bytes) for chunk in work[transport.rank]),
        seconds=perf_counter() - begun,
    )


class _Fill(NamedTuple):
    """A step of the plan and the box of its part that it fills."""

    step: Copy | Mean
    num_bytes: int


class _MessageChunk(NamedTuple):
    """Bytes that are read, then sent in one message."""

    items: tuple[_Fill, ...]

    @property
    def num_bytes(self) -> int:
        """Return the size of the message, without its head."""
        return sum(_aligned(item.num_bytes) for item in self.items)

    def plan(self, reads: ReadPlan, block_bytes: int) -> ReadPlan:
        """Return the part of ``reads`` that fills the chunk."""
        return replace(
            reads,
            copies=tuple(item.step for item in self.items if isinstance(item.step, Copy)),
            means=tuple(item.step for item in self.items if isinstance(item.step, Mean)),
            read_bytes=self.read_bytes(block_bytes),
        )

    def read_bytes(self, block_bytes: int) -> int:
        """Return how many bytes to read for it."""
        return sum(read_bytes_of(item.step, block_bytes) for item in self.items)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _chunks(reads: ReadPlan, share: Share, chunk_bytes: int) -> list[_MessageChunk]:
    """Return a share as messages of at most ``chunk_bytes``, or of one step."""
    chunks: list[_MessageChunk] = []
    items: list[_Fill] = []
    num_bytes = 0
    steps: list[Copy | Mean] = [*share.copies, *share.means]
    for step in steps:
        itemsize = DTYPE_BYTES[reads.parts[step.part].dtype]
        size = step.box.num_elements * itemsize
        if isinstance(step, Copy) and step.target_byte >= 0:
            size = step.stop_byte - step.start_byte
        if items and num_bytes + _aligned(size) > chunk_bytes:
            chunks.append(_MessageChunk(tuple(items)))
            items, num_bytes = [], 0
        items.append(_Fill(step, size))
        num_bytes += _aligned(size)
    if items:
        chunks.append(_MessageChunk(tuple(items)))
    return chunks


class _Loader:
    """Reads chunks into this rank's memory; packs and unpacks messages."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        reads: ReadPlan,
        targets: Sequence[memoryview],
        threads: int,
    ) -> None:
        self._source = Source(
            checkpoint.store, checkpoint.directory, checkpoint.state_map.block_bytes
        )
        self._reads = reads
        self._targets = targets
        self._threads = threads

    def read(self, chunk: _MessageChunk) -> None:
        """Read and verify a chunk into the targets."""
        execute(
            chunk.plan(self._reads, self._source.block_bytes),
            [self._source],
            self._targets,
            threads=self._threads,
            batch_bytes=self._source.store.request_bytes,
        )

    def pack(self, chunk: _MessageChunk, message: memoryview) -> None:
        """Copy what a chunk filled into a message."""
        for inside, outside in self._pairs(chunk, message):
            outside[...] = inside

    def unpack(self, chunk: _MessageChunk, message: memoryview) -> None:
        """Copy a message of another rank to where the chunk belongs."""
        for inside, outside in self._pairs(chunk, message):
            inside[...] = outside

    def _pairs(
        self, chunk: _MessageChunk, message: memoryview
    ) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """Yield each item's elements in the target and in the message."""
        low = 0
        for item in chunk.items:
            step, part = item.step, self._reads.parts[item.step.part]
            target = self._targets[step.part]
            if isinstance(step, Copy) and step.target_byte >= 0:
                inside: NDArray[Any] = np.frombuffer(target, np.uint8)
                inside = inside[step.target_byte : step.target_byte + item.num_bytes]
            else:
                inside = view_of(part, target, step.box)
            yield inside, np.ndarray(inside.shape, inside.dtype, buffer=message, offset=low)
            low += _aligned(item.num_bytes)


def _agree(transport: Transport, reads: ReadPlan, failure: UcpError | None) -> None:
    """Check that all ranks made the same plan."""
    steps = [
        (step.fragment.file, step.fragment.offset_bytes, step.start_byte, step.stop_byte)
        for step in reads.copies
    ]
    boxes = [(mean.part, mean.box) for mean in reads.means]
    text = repr((reads.parts, steps, boxes)).encode()
    heads = _Messages(transport, 0).exchange(failure is not None, crc32(text))
    if failure is not None:
        raise failure
    for rank, (failed, value) in enumerate(heads):
        if failed or value != crc32(text):
            what = "cannot load what it needs" if failed else "needs other tensors or boxes"
            raise CheckpointCorruptError(
                f"rank {rank} of those that load together {what}", peer=rank
            )


class _Messages:
    """A buffer to send and one for each rank to receive, each with a head."""

    def __init__(self, transport: Transport, num_bytes: int) -> None:
        size = _HEAD.size + num_bytes
        self._transport = transport
        self._mine = np.empty(size, np.uint8)
        self._held = np.empty((transport.size, size), np.uint8)
        self.mine = self._mine.data[_HEAD.size :]
        self.held = [row.data[_HEAD.size :] for row in self._held]

    def exchange(self, failed: bool, value: int) -> list[tuple[bool, int]]:  # noqa: FBT001
        """Send ``mine`` to every rank; return the heads of all messages."""
        _HEAD.pack_into(self._mine.data, 0, failed, value)
        self._transport.all_gather(self._mine.data, [row.data for row in self._held])
        return [_HEAD.unpack_from(row.data) for row in self._held]


def _rounds(loader: _Loader, work: Sequence[Sequence[_MessageChunk]], transport: Transport) -> None:
    """Read this rank's chunks, each during the exchange of the one before.

    A rank that fails says so in the next message, and all stop after it. An empty last message
    therefore follows the last chunks.
    """
    mine = work[transport.rank]
    messages = _Messages(transport, max((c.num_bytes for w in work for c in w), default=0))
    failure: BaseException | None = None
    with ThreadPoolExecutor(1, thread_name_prefix="ucp-ahead") as pool:
        ahead = pool.submit(loader.read, mine[0]) if mine else None
        for number in range(max(map(len, work))):
            failure, value = failure or (ahead.exception() if ahead else None), 0
            ahead = None
            if failure is None and number < len(mine):
                if number + 1 < len(mine):
                    ahead = pool.submit(loader.read, mine[number + 1])
                loader.pack(mine[number], messages.mine)
                value = crc32(messages.mine[: mine[number].num_bytes])
            heads = messages.exchange(failure is not None, value)
            _stop_if_failed(transport.rank, heads, failure)
            for rank, chunks in enumerate(work):
                if number < len(chunks) and rank != transport.rank:
                    taken = _take(loader, rank, heads[rank][1], chunks[number], messages.held[rank])
                    failure = failure or taken
    heads = _Messages(transport, 0).exchange(failure is not None, 0)
    _stop_if_failed(transport.rank, heads, failure)


def _stop_if_failed(
    own: int, heads: Sequence[tuple[bool, int]], failure: BaseException | None
) -> None:
    """Raise this rank's failure, or another one that was reported to all ranks."""
    if failure is not None:
        raise failure
    for rank, (failed, _) in enumerate(heads):
        if failed and rank != own:
            raise CheckpointCorruptError(
                f"rank {rank} of those that load together could not read its share, or got a "
                "damaged one",
                peer=rank,
            )


def _take(
    loader: _Loader, rank: int, value: int, chunk: _MessageChunk, held: memoryview
) -> CheckpointCorruptError | None:
    """Unpack another rank's message; return what is wrong with it."""
    if crc32(held[: chunk.num_bytes]) != value:
        return CheckpointCorruptError(
            f"a message of rank {rank}, one of those that load together, arrived damaged", peer=rank
        )
    loader.unpack(chunk, held)
    return None
