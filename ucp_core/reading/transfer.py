"""Execute read plans: coalesced reads, bounded memory, threads, every byte verified.

Bytes that are contiguous in file and memory are read straight into the target and verified there;
others pass through scratch memory. A target may hold unverified bytes while ``execute`` runs or
after it raises, never after it returns.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from ucp_core.errors import ChecksumMismatchError
from ucp_core.geometry import DTYPE_BYTES, Fragment
from ucp_core.numerics import crc32, decode, encode, grouped
from ucp_core.reading.extents import THREAD_BYTES_MIN
from ucp_core.reading.mapped import DamagedBlockError, mapped_file, take
from ucp_core.reading.planning import GAP_BYTES_MAX, read_bytes_of, readable, runs_of
from ucp_core.storage import ReadRange, Store, ask_ahead, join, kept_open

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

    from ucp_core.geometry import Box
    from ucp_core.reading.planning import Copy, Mean, Part, ReadPlan

#: Gaps up to this part of the store's request size are read as well.
_REQUEST_PER_GAP = 32
#: With larger gaps, reading runs one by one is cheaper. From the page cache a read takes 1 us plus
#: 0.06 to 0.2 us per KiB: with gaps of 16 KiB, reading all bytes takes up to 1.7 times as long.
_RUN_GAP_BYTES_MIN = 8 << 10
#: Largest request size of a store that needs no network.
_NEAR_REQUEST_BYTES_MAX = 4 << 20
#: Sizes of a cache line and of a huge page.
_LINE_BYTES = 64
_HUGE_BYTES = 2 << 20


class Source(NamedTuple):
    """Where the files of one map are."""

    store: Store
    directory: str
    block_bytes: int  #: Block size of their checksums.


class _Check(NamedTuple):
    """Bytes to verify; they start at a block of the fragment."""

    data: memoryview
    fragment: Fragment
    start_byte: int


class _Move(NamedTuple):
    """Bytes to copy from scratch memory to the target once they are verified."""

    copy: Copy
    data: memoryview
    start_byte: int


def gap_bytes_max(store: Store) -> int:
    """Return the largest gap at which one read is cheaper than two."""
    return max(GAP_BYTES_MAX, store.request_bytes // _REQUEST_PER_GAP)


def run_gap_bytes_min(store: Store) -> int:
    """Return the smallest gap at which reading runs one by one is cheaper."""
    is_near = store.request_bytes <= _NEAR_REQUEST_BYTES_MAX
    return _RUN_GAP_BYTES_MIN if is_near else store.request_bytes


@dataclass(slots=True)
class _ReadBatch:
    """The part of one file that one call reads for a group of copies."""

    group: Sequence[Copy]
    source: Source
    scratch: _Scratch
    gap_bytes: int
    ranges: list[tuple[int, list[memoryview]]] = field(default_factory=list)
    checks: list[_Check] = field(default_factory=list)
    moves: list[_Move] = field(default_factory=list)
    stop_byte: int = -1

    @property
    def path(self) -> str:
        """Return the path of the file."""
        return join(self.source.directory, self.group[0].fragment.file)

    def read(self, offset_bytes: int, data: memoryview) -> None:
        """Fill ``data`` from ``offset_bytes``; close neighbours share a range."""
        gap = offset_bytes - self.stop_byte
        if self.ranges and 0 <= gap <= self.gap_bytes:
            if gap:
                self.ranges[-1][1].append(self.scratch.unwanted(gap))
            self.ranges[-1][1].append(data)
        else:
            self.ranges.append((offset_bytes, [data]))
        self.stop_byte = offset_bytes + len(data)

    def add(self, copy: Copy, target: memoryview, block_bytes: int) -> None:
        """Add the blocks of a copy; read those inside the target straight into it."""
        fragment = copy.fragment
        low, high = readable(copy, block_bytes)
        if copy.target_byte < 0:
            self._add_scratch(copy, low, high)
            return
        inner_low, inner_high = _inner(copy, block_bytes)
        if inner_low >= inner_high:
            self._add_scratch(copy, low, high)
            return
        if low < inner_low:
            self._add_scratch(copy, low, inner_low)
        shift = copy.target_byte - copy.start_byte
        data = target[inner_low + shift : inner_high + shift]
        self.read(fragment.offset_bytes + inner_low, data)
        self.checks.append(_Check(data, fragment, inner_low))
        if inner_high < high:
            self._add_scratch(copy, inner_high, high)

    def _add_scratch(self, copy: Copy, low: int, high: int) -> None:
        data = self.scratch.take(high - low)
        self.read(copy.fragment.offset_bytes + low, data)
        self.checks.append(_Check(data, copy.fragment, low))
        self.moves.append(_Move(copy, data, low))


def execute(
    plan: ReadPlan,
    sources: Sequence[Source],
    targets: Sequence[memoryview],
    *,
    threads: int,
    batch_bytes: int,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Fill the target of every part of the plan.

    Args:
        plan: Its source indices refer to ``sources``.
        sources: Where the bytes are.
        targets: Writable memory of every part.
        threads: At most this many readers; small plans use fewer.
        batch_bytes: Copies are read together up to this size. The scratch memory of a thread is a
            batch, the span of one step of a gathered copy and two blocks; twice that for a store
            with ``ahead``, plus three float64 slabs for means.
        progress: Called with the size of every finished read, on the thread that made it.

    Raises:
        ChecksumMismatchError: Names tensor, box, file and byte range.
        StorageError: A file is missing, too short, or cannot be read.
        CheckpointCorruptError: A mean of a dtype that has none.
    """
    num_lists = max(1, min(threads, plan.read_bytes // THREAD_BYTES_MIN))
    work = plan.work_lists(num_lists)
    runs = [_Reader(plan, sources, targets, batch_bytes, progress) for _ in range(num_lists)]
    jobs = [partial(run.copies, copies) for run, copies in zip(runs, work, strict=False)]
    if plan.means:
        jobs += [partial(run.means, plan.means[i::num_lists]) for i, run in enumerate(runs)]
    if len(jobs) <= 1:
        for job in jobs:
            job()
        return
    with ThreadPoolExecutor(num_lists, thread_name_prefix="ucp-read") as pool:
        done = [pool.submit(job) for job in jobs]
        for future in done:
            future.result()


@dataclass(frozen=True, slots=True)
class _Reader:
    """Executes one thread's share of a plan."""

    plan: ReadPlan
    sources: Sequence[Source]
    targets: Sequence[memoryview]
    batch_bytes: int
    progress: Callable[[int], None] | None

    def copies(self, copies: Sequence[Copy]) -> None:
        """Read, verify and place ``copies``."""
        # In runs of copies from the same file.
        files = groupby(copies, key=lambda copy: (copy.source, copy.fragment.file))
        groups = (list(group) for _, group in files)
        left = [self._by_runs(group) for group in groups if not self._take(group)]
        size_bytes = sum(copy.stop_byte - copy.start_byte for group in left for copy in group)
        scratch_bytes = min(self.batch_bytes, size_bytes)
        scratch, asked, spare = _Scratch(scratch_bytes), None, None
        for group in chain.from_iterable(map(self._batches, left)):
            scratch.reset()
            first = group[0]
            if first.stop_byte - first.start_byte <= self.batch_bytes:
                batch = self._batch(group, scratch)
                sizes = [(offset, sum(map(len, buffers))) for offset, buffers in batch.ranges]
                if ask_ahead(batch.source.store, batch.path, sizes):
                    # The store fetches it while this thread verifies the previous batch.
                    self._finish(asked)
                    asked, scratch, spare = batch, spare or _Scratch(scratch_bytes), scratch
                else:
                    self._finish(batch)
                continue
            # Reads must follow the order of ``ask_ahead``.
            self._finish(asked)
            asked = None
            if first.target_byte < 0:
                self._stream(first, scratch)
            else:
                self._fill(first, scratch)
        self._finish(asked)

    def _batches(self, group: Sequence[Copy]) -> Iterator[list[Copy]]:
        """Yield the copies of one file that are read together."""
        if group:
            with self._kept_open(group[0]):
                yield from grouped(
                    group, lambda copy: copy.stop_byte - copy.start_byte, self.batch_bytes
                )

    def _kept_open(self, copy: Copy) -> AbstractContextManager[None]:
        source = self.sources[copy.source]
        return kept_open(source.store, join(source.directory, copy.fragment.file))

    def _take(self, group: Sequence[Copy]) -> bool:
        """Take copies from a mapped file; return whether the file is mapped."""
        source = self.sources[group[0].source]
        path = join(source.directory, group[0].fragment.file)
        mapped = mapped_file(source.store, path)
        if mapped is None:
            return False

        def gather(copy: Copy, data: memoryview, start_byte: int) -> None:
            self._move(_Move(copy, data, start_byte))

        try:
            take(group, mapped, source.block_bytes, self.targets, gather)
        except DamagedBlockError as damaged:
            self._refuse(damaged.copy, damaged.index, source.block_bytes, path)
        if self.progress is not None:
            self.progress(sum(map(read_bytes_of, group)))
        return True

    def _by_runs(self, group: Sequence[Copy]) -> list[Copy]:
        """Read the copies of one file whose runs are read one by one; return the others."""
        source = self.sources[group[0].source]
        path = join(source.directory, group[0].fragment.file)
        with_runs = [copy for copy in group if copy.run_bytes >= 0]
        if with_runs:
            with self._kept_open(with_runs[0]):
                for copy in with_runs:
                    for runs in runs_of(copy, self.plan.parts[copy.part], self.targets[copy.part]):
                        self._read(source, path, runs)
        return [copy for copy in group if copy.run_bytes < 0]

    def means(self, means: Sequence[Mean]) -> None:
        """Average copies that were updated independently: sum in float64, round once."""
        for mean in means:
            dtype = self.plan.parts[mean.part].dtype
            term = np.empty(mean.box.num_elements * DTYPE_BYTES[dtype], np.uint8).data
            total: NDArray[np.float64] | float = 0.0
            for plan in mean.terms:
                _Reader(plan, self.sources, [term], self.batch_bytes, self.progress).copies(
                    plan.copies
                )
                # The mean of infinities of opposite sign is NaN, without a warning.
                with np.errstate(invalid="ignore"):
                    total = total + decode(dtype, term)
            value = encode(dtype, np.asarray(total) / len(mean.terms))
            view = view_of(self.plan.parts[mean.part], self.targets[mean.part], mean.box)
            view[...] = value.view(view.dtype).reshape(view.shape)

    def _batch(self, group: Sequence[Copy], scratch: _Scratch) -> _ReadBatch:
        source = self.sources[group[0].source]
        batch = _ReadBatch(group, source, scratch, gap_bytes_max(source.store))
        for copy in group:
            batch.add(copy, self.targets[copy.part], source.block_bytes)
        return batch

    def _finish(self, batch: _ReadBatch | None) -> None:
        """Read, verify and place a batch, if there is one."""
        if batch is None:
            return
        path, block_bytes = batch.path, batch.source.block_bytes
        ranges = [(offset, tuple(buffers)) for offset, buffers in batch.ranges]
        self._read(batch.source, path, ranges)
        for check in batch.checks:
            self._verify(check, block_bytes, path, batch.group)
        for move in batch.moves:
            self._move(move)

    def _fill(self, copy: Copy, scratch: _Scratch) -> None:
        """Read a copy larger than a batch straight into its target.

        Without checksums this is one read, otherwise batches that are verified in the cache.
        """
        source, fragment = self.sources[copy.source], copy.fragment
        low, high = _inner(copy, source.block_bytes)
        shift = copy.target_byte - copy.start_byte
        edges = ((copy.start_byte, min(low, copy.stop_byte)), (max(low, high), copy.stop_byte))
        cut = [
            copy._replace(start_byte=first, stop_byte=last, target_byte=first + shift)
            for first, last in edges
            if first < last
        ]
        if cut:
            self._finish(self._batch(cut, scratch))
        path, target = join(source.directory, fragment.file), self.targets[copy.part]
        size = high - low
        if fragment.crc32 is not None:
            size = max(self.batch_bytes // source.block_bytes, 1) * source.block_bytes
        starts = range(low, high, max(size, 1))
        sizes = [(fragment.offset_bytes + start, min(size, high - start)) for start in starts]
        ask_ahead(source.store, path, sizes)
        for start in starts:
            data = target[start + shift : min(start + size, high) + shift]
            self._read(source, path, [(fragment.offset_bytes + start, (data,))])
            self._verify(_Check(data, fragment, start), source.block_bytes, path, [copy])

    def _stream(self, copy: Copy, scratch: _Scratch) -> None:
        """Gather a copy larger than a batch through scratch memory that fits the cache.

        It goes along the dim with the longest stride. The bytes of an incomplete step are kept for
        the next read, so no block is read twice.
        """
        source, fragment = self.sources[copy.source], copy.fragment
        path = join(source.directory, fragment.file)
        steps = _Steps(copy, self.plan.parts[copy.part], self.targets[copy.part])
        unit = 1 if fragment.crc32 is None else source.block_bytes
        chunk_bytes = max(self.batch_bytes // unit, 1) * unit
        held_low, stop = readable(copy, source.block_bytes)
        held_high = held_low
        # Bytes keep their offset in a cache line, so elements stay aligned.
        memory = scratch.take(_LINE_BYTES + steps.reach_bytes + chunk_bytes)
        base, first = held_low % _LINE_BYTES, 0
        while first < steps.num_steps:
            low = base + held_high - held_low
            data = memory[low : low + min(chunk_bytes, stop - held_high)]
            self._read(source, path, [(fragment.offset_bytes + held_high, (data,))])
            self._verify(_Check(data, fragment, held_high), source.block_bytes, path, [copy])
            held_high += len(data)
            last = steps.num_whole(held_high)
            if first < last:
                held = memory[base : base + held_high - held_low]
                steps.move(first, last, held, held_low)
            first = last
            keep = steps.start_byte(first)
            if keep >= held_high:
                held_low = held_high = max(held_high, keep // unit * unit)
                base = held_low % _LINE_BYTES
            else:
                rest = memory[base + keep - held_low : base + held_high - held_low]
                base, held_low = keep % _LINE_BYTES, keep
                memory[base : base + len(rest)] = rest

    def _read(self, source: Source, path: str, ranges: Sequence[ReadRange]) -> None:
        source.store.read_ranges(path, ranges)
        if self.progress is not None:
            self.progress(sum(len(buffer) for _, buffers in ranges for buffer in buffers))

    def _verify(self, check: _Check, block_bytes: int, path: str, group: Sequence[Copy]) -> None:
        data, fragment = check.data, check.fragment
        if fragment.crc32 is None:
            return
        index = check.start_byte // block_bytes
        for low in range(0, len(data), block_bytes):
            if crc32(data[low : low + block_bytes]) != fragment.blocks[index]:
                copy = next(copy for copy in group if copy.fragment is fragment)
                self._refuse(copy, index, block_bytes, path)
            index += 1

    def _refuse(self, copy: Copy, index: int, block_bytes: int, path: str) -> NoReturn:
        """Raise the error for a damaged block of the copy's fragment."""
        fragment, key = copy.fragment, self.plan.parts[copy.part].key
        start = fragment.offset_bytes + index * block_bytes
        stop = min(start + block_bytes, fragment.offset_bytes + fragment.num_bytes)
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

    def _move(self, move: _Move) -> None:
        """Copy the elements of a copy from verified scratch memory."""
        copy = move.copy
        if copy.target_byte >= 0:
            low = max(copy.start_byte, move.start_byte)
            high = min(copy.stop_byte, move.start_byte + len(move.data))
            shift = copy.target_byte - copy.start_byte
            self.targets[copy.part][low + shift : high + shift] = move.data[
                low - move.start_byte : high - move.start_byte
            ]
            return
        view = view_of(self.plan.parts[copy.part], self.targets[copy.part], copy.box)
        view[...] = np.ndarray(
            view.shape,
            view.dtype,
            buffer=move.data,
            offset=copy.start_byte - move.start_byte,
            strides=copy.fragment.byte_strides(view.dtype.itemsize),
        )


def _inner(copy: Copy, block_bytes: int) -> tuple[int, int]:
    """Return the range of blocks inside the copy; empty if ``low >= high``."""
    low, high = readable(copy, block_bytes)
    if low != copy.start_byte:
        low += block_bytes
    if high != copy.stop_byte:
        high = (high - 1) // block_bytes * block_bytes
    return low, high


def view_of(part: Part, target: memoryview, box: Box) -> NDArray[Any]:
    """Return a view of the elements of ``box`` in the memory of a part that holds it."""
    dtype = np.dtype(f"u{DTYPE_BYTES[part.dtype]}")
    whole: NDArray[Any] = np.ndarray(part.box.shape, dtype, buffer=target)
    inner = box.relative_to(part.box)
    # The ellipsis makes a single element an array.
    index: Any = (*map(slice, inner.start, inner.stop), ...)
    view: NDArray[Any] = whole[index]
    return view


class _Steps:
    """A gathered copy, as steps along the dim with the longest stride in the file."""

    def __init__(self, copy: Copy, part: Part, target: memoryview) -> None:
        view = view_of(part, target, copy.box)
        strides = copy.fragment.byte_strides(view.dtype.itemsize)
        dims = [dim for dim, extent in enumerate(view.shape) if extent > 1]
        dim = max(dims, key=lambda dim: strides[dim])
        self._view = np.moveaxis(view, dim, 0)
        self._strides = (strides[dim], *strides[:dim], *strides[dim + 1 :])
        self._copy_start_byte = copy.start_byte
        self.num_steps = view.shape[dim]
        self.reach_bytes = copy.stop_byte - copy.start_byte - (self.num_steps - 1) * strides[dim]

    def start_byte(self, step: int) -> int:
        """Return the first byte of a step in the fragment."""
        return self._copy_start_byte + step * self._strides[0]

    def num_whole(self, stop_byte: int) -> int:
        """Return how many steps lie before ``stop_byte``."""
        behind = stop_byte - self._copy_start_byte - self.reach_bytes
        return min(self.num_steps, behind // self._strides[0] + 1) if behind >= 0 else 0

    def move(self, first: int, last: int, data: memoryview, start_byte: int) -> None:
        """Copy steps ``first`` to ``last`` from bytes that start at ``start_byte``."""
        view = self._view[first:last]
        view[...] = np.ndarray(
            view.shape,
            view.dtype,
            buffer=data,
            offset=self.start_byte(first) - start_byte,
            strides=self._strides,
        )


class _Scratch:
    """Memory that a thread reuses for every batch: fresh pages cost 10 times the copy."""

    def __init__(self, size_bytes: int) -> None:
        self._memory = fresh_memory(size_bytes)
        self._used_bytes = 0
        self._unwanted = memoryview(b"")

    def reset(self) -> None:
        """Reuse all memory; earlier allocations must not be used afterwards."""
        self._used_bytes = 0

    def take(self, size_bytes: int) -> memoryview:
        """Return memory aligned for every dtype; allocate it if the scratch memory is too small."""
        low = -(-self._used_bytes // 8) * 8
        if low + size_bytes > len(self._memory):
            made = fresh_memory(size_bytes)
            if not self._used_bytes:
                self._memory, self._used_bytes = made, size_bytes
            return made
        self._used_bytes = low + size_bytes
        return self._memory[low : self._used_bytes]

    def unwanted(self, size_bytes: int) -> memoryview:
        """Return memory for bytes that are not needed; it is the same every time."""
        if len(self._unwanted) < size_bytes:
            self._unwanted = fresh_memory(size_bytes)
        return self._unwanted[:size_bytes]


def fresh_memory(size_bytes: int) -> memoryview:
    """Return uninitialised memory that starts at a huge page, or at a cache line if it is smaller.

    The kernel reads 7 % slower into unaligned memory. With huge pages the first touch of 2 MiB is
    several times as fast, and a copy into memory that was used before takes 19 % less time.
    """
    alignment = _HUGE_BYTES if size_bytes >= _HUGE_BYTES else _LINE_BYTES
    memory = np.empty(size_bytes + alignment, dtype=np.uint8)
    low = -memory.ctypes.data % alignment
    return memory.data[low : low + size_bytes]
