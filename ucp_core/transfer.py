"""Executes read plans: coalesced reads, bounded memory, threads, every byte verified.

Bytes that lie alike in the file and in memory are read straight into the target and verified
there; the rest passes through scratch memory. A target may hold unverified bytes while
``execute`` runs and after it raised, never after it returned.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ucp_core.checksums import crc32
from ucp_core.errors import ChecksumMismatchError
from ucp_core.statemap import DTYPE_BYTES, Fragment
from ucp_core.storage.base import ReadRange, Store, join

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ucp_core.plan import Copy, ReadPlan

#: A second thread pays from here on: starting one costs 0.1 ms, reading 4 MiB 0.3 ms.
THREAD_BYTES_MIN = 4 << 20
#: Bytes between two reads up to which one longer read is cheaper.
_GAP_BYTES_MAX = 64 << 10


class Source(NamedTuple):
    """Where the files of one map are.

    Attributes:
        store: Their store.
        directory: Their directory in it.
        block_bytes: The blocks of their checksums.
    """

    store: Store
    directory: str
    block_bytes: int


class _Check(NamedTuple):
    """Bytes that were read, and what they have to be. They begin at a block of the fragment."""

    data: memoryview
    fragment: Fragment
    start_byte: int


class _Move(NamedTuple):
    """Bytes to take from scratch to the target once they are verified."""

    copy: Copy
    data: memoryview
    start_byte: int


class _Scratch:
    """Memory that a thread uses batch after batch: fresh pages cost 10 times the copy."""

    def __init__(self, size_bytes: int) -> None:
        # Not zeroed: every byte is read over.
        self._memory = np.empty(size_bytes, dtype=np.uint8).data
        self._used_bytes = 0

    def reset(self) -> None:
        """Take everything back, which nobody may use any more."""
        self._used_bytes = 0

    def take(self, size_bytes: int) -> memoryview:
        """Return memory that is aligned for every dtype; more than there is, is made."""
        low = -(-self._used_bytes // 8) * 8
        if low + size_bytes > len(self._memory):
            return np.empty(size_bytes, dtype=np.uint8).data
        self._used_bytes = low + size_bytes
        return self._memory[low : self._used_bytes]


@dataclass(slots=True)
class _Batch:
    """What is read from one file in one call."""

    scratch: _Scratch
    ranges: list[tuple[int, list[memoryview]]] = field(default_factory=list)
    checks: list[_Check] = field(default_factory=list)
    moves: list[_Move] = field(default_factory=list)
    stop_byte: int = -1
    num_bytes: int = 0

    def read(self, offset_bytes: int, data: memoryview) -> None:
        """Add ``data`` to be filled from ``offset_bytes``, in one range with its neighbour."""
        gap = offset_bytes - self.stop_byte
        if self.ranges and 0 <= gap <= _GAP_BYTES_MAX:
            if gap:
                self.ranges[-1][1].append(memoryview(bytearray(gap)))
            self.ranges[-1][1].append(data)
        else:
            self.ranges.append((offset_bytes, [data]))
        self.stop_byte = offset_bytes + len(data)
        self.num_bytes += len(data)


def execute(
    plan: ReadPlan,
    sources: Sequence[Source],
    targets: Sequence[memoryview],
    *,
    threads: int,
    batch_bytes: int,
) -> None:
    """Fill the target of every part of the plan.

    Args:
        plan: What to copy; its sources are indices into ``sources``.
        sources: Where the bytes are.
        targets: One for each part: its bytes, writable.
        threads: At most so many read at once; small plans use fewer.
        batch_bytes: Copies are read together up to so many bytes. A thread holds that, or the
            plan's span if it is larger, and a block at either end, in scratch memory.

    Raises:
        ChecksumMismatchError: Names tensor, box, file and byte range.
        StorageError: A file is missing, shorter than the plan says, or cannot be read.
    """
    num_lists = max(1, min(threads, plan.read_bytes // THREAD_BYTES_MIN))
    work = plan.work_lists(num_lists)
    if len(work) <= 1:
        for copies in work:
            _run(plan, sources, targets, copies, batch_bytes)
        return
    with ThreadPoolExecutor(len(work), thread_name_prefix="ucp-read") as pool:
        done = [pool.submit(_run, plan, sources, targets, w, batch_bytes) for w in work]
        for future in done:
            future.result()


def _run(
    plan: ReadPlan,
    sources: Sequence[Source],
    targets: Sequence[memoryview],
    copies: Sequence[Copy],
    batch_bytes: int,
) -> None:
    scratch = _Scratch(min(batch_bytes, sum(c.stop_byte - c.start_byte for c in copies)))
    for group in _groups(copies, batch_bytes):
        source = sources[group[0].source]
        scratch.reset()
        batch = _Batch(scratch)
        for copy in group:
            _add(batch, copy, targets[copy.part], source.block_bytes)
        path = join(source.directory, group[0].fragment.file)
        ranges = [ReadRange(offset, tuple(buffers)) for offset, buffers in batch.ranges]
        source.store.read_ranges(path, ranges)
        for check in batch.checks:
            _verify(plan, check, source.block_bytes, path, group)
        for move in batch.moves:
            _move(plan, move, targets[move.copy.part])


def _groups(copies: Sequence[Copy], batch_bytes: int) -> Iterator[list[Copy]]:
    """Yield runs of copies from one file whose bytes fit a batch (one copy always does)."""
    group: list[Copy] = []
    num_bytes = 0
    for copy in copies:
        size = copy.stop_byte - copy.start_byte
        other = group and (
            (copy.source, copy.fragment.file) != (group[0].source, group[0].fragment.file)
            or num_bytes + size > batch_bytes
        )
        if other:
            yield group
            group, num_bytes = [], 0
        group.append(copy)
        num_bytes += size
    if group:
        yield group


def _add(batch: _Batch, copy: Copy, target: memoryview, block_bytes: int) -> None:
    """Add the whole blocks that hold the copy's bytes: straight to the target where they fit."""
    fragment = copy.fragment
    low = copy.start_byte // block_bytes * block_bytes
    high = min(-(-copy.stop_byte // block_bytes) * block_bytes, fragment.num_bytes)
    if copy.target_byte < 0:
        _add_scratch(batch, copy, low, high)
        return
    # Blocks of which the part needs every byte.
    inner_low = low if low == copy.start_byte else low + block_bytes
    inner_high = high if high == copy.stop_byte else (high - 1) // block_bytes * block_bytes
    if inner_low >= inner_high:
        _add_scratch(batch, copy, low, high)
        return
    if low < inner_low:
        _add_scratch(batch, copy, low, inner_low)
    shift = copy.target_byte - copy.start_byte
    data = target[inner_low + shift : inner_high + shift]
    batch.read(fragment.offset_bytes + inner_low, data)
    batch.checks.append(_Check(data, fragment, inner_low))
    if inner_high < high:
        _add_scratch(batch, copy, inner_high, high)


def _add_scratch(batch: _Batch, copy: Copy, low: int, high: int) -> None:
    data = batch.scratch.take(high - low)
    batch.read(copy.fragment.offset_bytes + low, data)
    batch.checks.append(_Check(data, copy.fragment, low))
    batch.moves.append(_Move(copy, data, low))


def _verify(
    plan: ReadPlan, check: _Check, block_bytes: int, path: str, group: Sequence[Copy]
) -> None:
    data, fragment = check.data, check.fragment
    index = check.start_byte // block_bytes
    for low in range(0, len(data), block_bytes):
        if crc32(data[low : low + block_bytes]) != fragment.blocks[index]:
            copy = next(copy for copy in group if copy.fragment is fragment)
            start = fragment.offset_bytes + check.start_byte + low
            stop = min(start + block_bytes, fragment.offset_bytes + fragment.num_bytes)
            key = plan.parts[copy.part].key
            raise ChecksumMismatchError(
                f"{key}: box {fragment.box} is damaged in bytes {start} to {stop} of {path}; "
                "use an older checkpoint",
                fqn=key.fqn,
                slot=key.slot,
                box=fragment.box,
                path=path,
                start_byte=start,
                stop_byte=stop,
            )
        index += 1


def _move(plan: ReadPlan, move: _Move, target: memoryview) -> None:
    """Take the copy's elements out of verified scratch bytes."""
    copy = move.copy
    if copy.target_byte >= 0:
        low = max(copy.start_byte, move.start_byte)
        high = min(copy.stop_byte, move.start_byte + len(move.data))
        shift = copy.target_byte - copy.start_byte
        target[low + shift : high + shift] = move.data[
            low - move.start_byte : high - move.start_byte
        ]
        return
    part = plan.parts[copy.part]
    dtype = np.dtype(f"u{DTYPE_BYTES[part.dtype]}")
    outer = copy.fragment.box
    strides: list[int] = []
    stride = dtype.itemsize
    for extent in reversed(outer.shape):
        strides.insert(0, stride)
        stride *= extent
    source = np.ndarray(
        copy.box.shape,
        dtype,
        buffer=move.data,
        offset=copy.start_byte - move.start_byte,
        strides=strides,
    )
    whole = np.ndarray(part.box.shape, dtype, buffer=target)
    inner = copy.box.relative_to(part.box)
    whole[tuple(map(slice, inner.start, inner.stop))] = source
