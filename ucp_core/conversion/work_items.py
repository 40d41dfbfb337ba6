"""The work of a conversion's worker: read a range of a target file, verify it, hash it.

A block is read, hashed and written before the next one, so it stays in the processor's cache.

A load (``ucp_core.reading.execute``) reads whole blocks around boxes; a conversion reads whole
tensors, each byte once, whatever the source's blocks are. By a load's plans, 0.8 GiB took 1.2 to
1.3 times the processor time: from ZeRO-1 and ZeRO-3 files, even without verifying their records,
and from native files of 1 and 3 ranks.
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ucp_core.errors import CheckpointCorruptError
from ucp_core.formats import TargetFile
from ucp_core.geometry import (
    DTYPE_BYTES,
    Box,
    Fragment,
    StateMap,
    TensorEntry,
    flat_range,
    packed_strides,
)
from ucp_core.numerics import BLOCK_BYTES, combine, crc32
from ucp_core.reading import (
    Check,
    ElementRun,
    ExtentPlan,
    Holders,
    Note,
    is_plain,
    joined_notes,
    scattered,
)
from ucp_core.storage import Store, join, kept_open

#: A process may have 1024 files open, and its other parts need some of them.
_OPEN_FILES_MAX = 200


class WorkItem(NamedTuple):
    """A range of a target file to write, or of a source file to verify."""

    target: int  #: Index of the target file; -1 if the range is only verified.
    source: int  #: Index of the source file in that case; else -1.
    start: int  #: First byte in that file.
    stop: int  #: One past the last byte.


class Result(NamedTuple):
    """The result of a worker."""

    item: WorkItem
    blocks: tuple[int, ...]  #: crc32 of every block of the target's tensors in the item, in order.
    notes: tuple[Note, ...]  #: The parts that were read of incomplete or wrong checks.
    read_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The part of a conversion that all workers share."""

    store: Store
    directory: str
    state_map: StateMap
    files: tuple[str, ...]  #: The source's files; items and checks refer to them by index.
    targets: tuple[TargetFile, ...]
    extents: ExtentPlan  #: How to verify the source's own checksums.
    chunk_bytes: int  #: How many bytes to gather at a time, in whole blocks.
    general_bytes: int  #: The same, for tensors that are averaged or strided.
    file_index: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.file_index.update({name: index for index, name in enumerate(self.files)})


class Files:
    """Reads the source's files and keeps them open."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._open: dict[str, ExitStack] = {}
        self.read_bytes = 0

    def read(self, file: str, offset_bytes: int, target: memoryview) -> None:
        """Fill ``target``."""
        self.read_bytes += len(target)
        path = join(self._job.directory, file)
        if file not in self._open:
            if len(self._open) >= _OPEN_FILES_MAX:
                self._open.pop(next(iter(self._open))).close()
            self._open[file] = ExitStack()
            self._open[file].enter_context(kept_open(self._job.store, path))
        self._job.store.read_ranges(path, [(offset_bytes, (target,))])

    def close(self) -> None:
        """Close every file."""
        while self._open:
            self._open.popitem()[1].close()


class ItemWorker:
    """Does items one at a time; every thread or process has its own."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._files = Files(job)
        #: The fragments and the replicas of the tensor at hand, if it is plain.
        self._holders: tuple[Holders, Holders] | None = None
        self._notes: list[Note] = []
        self._blocks: list[int] = []
        self._scratch: memoryview | None = None
        # Fresh pages, aligned for every dtype and for the kernel.
        self._buffer = memoryview(mmap.mmap(-1, job.chunk_bytes))
        self._general: memoryview | None = None

    def close(self) -> None:
        """Close the source's files."""
        self._files.close()

    def chunks(self, item: WorkItem) -> Iterator[memoryview]:
        """Yield the bytes of the target in order. Each chunk is valid until the next one.

        Call ``result`` after the last chunk. Items that only verify yield nothing.

        Raises:
            CheckpointCorruptError: Replicas differ.
        """
        self._notes = []
        self._blocks = []
        self._files.read_bytes = 0
        if item.target < 0:
            self._verify(item)
            return
        file = self._job.targets[item.target]
        first = bisect_right(file.tensors, item.start, key=lambda t: t.offset_bytes) - 1
        for entry, offset_bytes in file.tensors[first:]:
            if offset_bytes >= item.stop:
                break
            low = max(item.start - offset_bytes, 0)
            high = min(item.stop - offset_bytes, entry.num_bytes)
            if low < high:
                yield from self._tensor(entry, low, high)

    def result(self, item: WorkItem) -> Result:
        """Return the result of ``item``, the last one whose chunks were taken."""
        return Result(
            item, tuple(self._blocks), tuple(joined_notes(self._notes)), self._files.read_bytes
        )

    def _tensor(self, entry: TensorEntry, low: int, high: int) -> Iterator[memoryview]:
        """Yield bytes ``[low, high)`` of a tensor; ``low`` is the start of a block."""
        if self._holders is None or self._holders[0].entry is not entry:
            found = (Holders(entry), Holders(entry, replicas=True)) if is_plain(entry) else None
            self._holders = found
        if self._holders is None:
            yield from self._general_chunks(entry, low, high)
            return
        holders, replicas = self._holders
        itemsize = DTYPE_BYTES[entry.dtype]
        step = len(self._buffer)
        for start in range(low, high, step):
            stop = min(start + step, high)
            chunk = self._buffer[: stop - start]
            known = -1
            for run in holders.runs(start // itemsize, stop // itemsize):
                value = self._take(entry, run, chunk, start)
                if run.num_elements * itemsize == len(chunk):
                    known = value
            self._compare(replicas, chunk, start)
            self._hash(chunk, known)
            yield chunk

    def _hash(self, chunk: memoryview, known: int = -1) -> None:
        if known >= 0 and len(chunk) <= BLOCK_BYTES:
            self._blocks.append(known)
            return
        for low in range(0, len(chunk), BLOCK_BYTES):
            self._blocks.append(crc32(chunk[low : low + BLOCK_BYTES]))

    def _take(self, entry: TensorEntry, run: ElementRun, chunk: memoryview, start: int) -> int:
        """Read a run to its place in ``chunk``; return the crc32 of its bytes.

        ``start`` is the chunk's first byte in the tensor.
        """
        itemsize = DTYPE_BYTES[entry.dtype]
        num_bytes = run.num_elements * itemsize
        if run.target >= 0:
            low = run.target * itemsize
            return self._read(run.fragment, run.first * itemsize, chunk[low : low + num_bytes])
        if self._scratch is None:
            self._scratch = memoryview(mmap.mmap(-1, len(self._buffer)))
        data = self._scratch[:num_bytes]
        value = self._read(run.fragment, run.first * itemsize, data)
        _scatter(entry, run, data, chunk, start // itemsize)
        return value

    def _read(self, fragment: Fragment, low: int, target: memoryview) -> int:
        """Read bytes of a fragment from ``low`` on and note them; return their crc32."""
        self._files.read(fragment.file, fragment.offset_bytes + low, target)
        file = self._job.file_index[fragment.file]
        if fragment.crc32 is not None:
            return self._note_blocks(fragment, file, low, target)
        value = crc32(target)
        offset_bytes = fragment.offset_bytes + low
        check = self._job.extents.at(file, offset_bytes)
        if check in self._job.extents.streamed:
            self._notes.append(Note(check, offset_bytes, len(target), value))
        return value

    def _note_blocks(self, fragment: Fragment, file: int, low: int, target: memoryview) -> int:
        """Note which parts of the fragment's blocks were read."""
        block_bytes = self._job.state_map.block_bytes
        value = 0
        done = 0
        while done < len(target):
            index, inside = divmod(low + done, block_bytes)
            part = target[done : done + block_bytes - inside]
            start = fragment.offset_bytes + index * block_bytes
            size = min(block_bytes, fragment.num_bytes - index * block_bytes)
            found = crc32(part)
            check = Check(file, start, size, fragment.blocks[index])
            if len(part) < size or found != check.crc32:
                self._notes.append(Note(check, start + inside, len(part), found))
            value = combine(value, found, len(part))
            done += len(part)
        return value

    def _compare(self, replicas: Holders, chunk: memoryview, start: int) -> None:
        """Check that replicas hold the bytes of ``chunk``."""
        entry = replicas.entry
        itemsize = DTYPE_BYTES[entry.dtype]
        for run in replicas.runs(start // itemsize, (start + len(chunk)) // itemsize):
            # A bytearray compares by memcmp, views byte by byte.
            other = bytearray(chunk)
            self._take(entry, run, memoryview(other), start)
            if other != chunk:
                raise _differs(entry, run.fragment)

    def _general_chunks(self, entry: TensorEntry, low: int, high: int) -> Iterator[memoryview]:
        """Yield bytes of a tensor that is averaged or strided, with one plan per slab."""
        if self._general is None:
            self._general = memoryview(mmap.mmap(-1, self._job.general_bytes))
        itemsize = DTYPE_BYTES[entry.dtype]
        for start in range(low, high, len(self._general)):
            slab = self._general[: min(len(self._general), high - start)]
            boxes = flat_range(entry.shape, start // itemsize, (start + len(slab)) // itemsize)
            self._load(entry, boxes, slab)
            for fragment in entry.fragments:
                if fragment.replica:
                    self._compare_general(entry, fragment, boxes)
            self._hash(slab)
            yield slab

    def _load(self, entry: TensorEntry, boxes: Sequence[Box], target: memoryview) -> None:
        """Fill ``target`` with the boxes of a tensor, in order."""
        # Most conversions do not need numpy, which takes 60 ms to import.
        from ucp_core.reading import Part, Source, execute, plan

        job = self._job
        parts = [Part(entry.key, entry.dtype, entry.shape, box) for box in boxes]
        targets: list[memoryview] = []
        done = 0
        for box in boxes:
            size = box.num_elements * DTYPE_BYTES[entry.dtype]
            targets.append(target[done : done + size])
            done += size
        own = StateMap(entries={entry.key: entry}, block_bytes=job.state_map.block_bytes)
        reads = plan(parts, [own], span_bytes_max=job.general_bytes)
        source = Source(job.store, job.directory, own.block_bytes)
        execute(reads, [source], targets, threads=1, batch_bytes=job.general_bytes)
        self._files.read_bytes += reads.read_bytes

    def _compare_general(self, entry: TensorEntry, replica: Fragment, boxes: Sequence[Box]) -> None:
        """Check that a replica holds the same as the primary fragments of its copy."""
        primary = tuple(
            fragment._replace(copy=0)
            for fragment in entry.fragments
            if fragment.copy == replica.copy and not fragment.replica
        )
        other = (replica._replace(copy=0, replica=False),)
        for box in boxes:
            inner = box.intersect(replica.box)
            if inner is None:
                continue
            found: list[bytearray] = []
            for fragments in (primary, other):
                data = bytearray(inner.num_elements * DTYPE_BYTES[entry.dtype])
                one = replace(entry, fragments=fragments, copies=1)
                self._load(one, [inner], memoryview(data))
                found.append(data)
            if found[0] != found[1]:
                raise _differs(entry, replica)

    def _verify(self, item: WorkItem) -> None:
        """Read bytes that belong to no tensor, for the checksum of their extent."""
        check = self._job.extents.at(item.source, item.start)
        assert check is not None, f"{item} is in no checked range"
        for start in range(item.start, item.stop, len(self._buffer)):
            target = self._buffer[: min(len(self._buffer), item.stop - start)]
            self._files.read(self._job.files[item.source], start, target)
            self._notes.append(Note(check, start, len(target), crc32(target)))


def _differs(entry: TensorEntry, replica: Fragment) -> CheckpointCorruptError:
    primary = sorted({f.file for f in entry.fragments if not f.replica})
    return CheckpointCorruptError(
        f"{entry.key}: box {replica.box} in file {replica.file} is declared a replica, but "
        f"differs from {', '.join(primary[:4])}; if the first one shall count, say so in the "
        "rules (check: first)",
        fqn=entry.key.fqn,
        slot=entry.key.slot,
        box=replica.box,
        files=(replica.file, *primary),
    )


def _scatter(
    entry: TensorEntry, run: ElementRun, data: memoryview, chunk: memoryview, start: int
) -> None:
    """Put the elements of an interleaved run in their places."""
    # Tensors that are cut along their first dim do not need numpy, which takes 60 ms to import.
    import numpy as np

    itemsize = DTYPE_BYTES[entry.dtype]
    dtype = np.dtype(f"u{itemsize}")
    strides = packed_strides(entry.shape, itemsize)
    for done, box, target in scattered(run, entry.shape, start):
        source = np.ndarray(box.shape, dtype, buffer=data, offset=done * itemsize)
        goal = np.ndarray(box.shape, dtype, buffer=chunk, offset=target * itemsize, strides=strides)
        goal[...] = source
