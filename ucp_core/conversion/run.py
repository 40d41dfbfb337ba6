"""Turns any checkpoint into a universal one: parallel, bounded in memory, resumable.

The destination is laid out before a byte moves. A work item is a range of a target file; what it
consists of is read once, verified, hashed and written, block by block. Finished items are noted
in a journal, so a conversion that was killed goes on; the manifest, written last, commits it.
"""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, TypeAlias

from ucp_core.conversion.job import GENERAL_BYTES_MAX, Conversion
from ucp_core.conversion.outputs import REMOTE_BATCH_ITEMS, LocalFiles, StreamedFiles
from ucp_core.conversion.work_items import Item, Job, Result
from ucp_core.conversion.workers import Batch, may_fork, run_here, run_processes, run_threads
from ucp_core.errors import CheckpointCorruptError, StorageError, UcpError
from ucp_core.geometry import Box, is_contiguous
from ucp_core.native import Checkpoint, reading
from ucp_core.numerics import BLOCK_BYTES
from ucp_core.reading import is_plain
from ucp_core.storage import LocalStore, Store, is_local, tidied

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

#: Below this, slabs would be smaller than the blocks that are read for them.
MEMORY_BYTES_MIN = 8 * BLOCK_BYTES
#: From here on a second process pays: starting one costs 5 ms.
_PROCESS_BYTES_MIN = 32 << 20
#: What a worker needs beside its slabs: interpreter state that is written to, stacks.
_WORKER_BYTES = 8 << 20
#: Does batches anywhere and gives every result to its last argument.
Runner: TypeAlias = "Callable[[Job, Sequence[Batch], Callable[[Result], None]], None]"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertResult:
    """What ``convert`` did.

    Attributes:
        size_bytes: Of the whole state.
        read_bytes: Read of the source in this run.
        written_bytes: Written to the destination in this run.
        resumed_bytes: Taken over from a run that was killed.
        seconds: Of this run.
        processes: How many worked.
        threads: How many worked in each.
        checkpoint: What was made.
    """

    size_bytes: int
    read_bytes: int
    written_bytes: int
    resumed_bytes: int
    seconds: float
    processes: int
    threads: int
    checkpoint: Checkpoint = field(repr=False)


def convert(  # noqa: PLR0913 - each is an option of the command
    checkpoint: Checkpoint,
    store: Store,
    directory: str,
    *,
    memory_bytes: int,
    processes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    resume: bool = True,
    fsync: bool = False,
    runner: Runner | None = None,
) -> ConvertResult:
    """Write a universal checkpoint of any source; its manifest, written last, commits it.

    Args:
        checkpoint: The source: native, universal or foreign.
        store: Where to.
        directory: New, empty, or left behind by a conversion that was interrupted.
        memory_bytes: Bound of what is used beside the caller's own memory, worker processes
            included; at least ``MEMORY_BYTES_MIN``.
        processes: Work at once at most; fewer if the memory or the size says so. Default: one a
            processor. Threads, where the source is remote or this process may not fork.
        progress: Called with the bytes done and the bytes of the whole state.
        resume: Go on with what a killed conversion of the same source left behind.
        fsync: Whether the result must survive a loss of power before it is committed.
        runner: Does the work elsewhere, and returns when every result is taken.

    Raises:
        UcpError: The destination holds a checkpoint or other files, or the bound is too small.
        CheckpointCorruptError: The source is damaged; nothing is committed.
        StorageError: A storage refused.
    """
    begun = perf_counter()
    if memory_bytes < MEMORY_BYTES_MIN:
        raise UcpError(
            f"memory_bytes={memory_bytes} is too small: give at least {MEMORY_BYTES_MIN}",
            memory_bytes=memory_bytes,
        )
    workers = _workers(checkpoint, memory_bytes, processes)
    conversion = Conversion(
        checkpoint, store, directory, memory_bytes=memory_bytes, workers=workers
    )
    small = conversion.small_files()
    with tidied(store, directory), _kept(_files(conversion, resume=resume)) as files:
        run = _Run(conversion, files, progress)
        run.resume()
        with reading(checkpoint):
            processes, threads = run.work(workers, runner)
        manifest = conversion.manifest(small)
        files.finish(fsync=fsync)
        made = conversion.commit(manifest, small, fsync=fsync)
        # What is temporary is ignored by every reader: to fail now would be wrong.
        with suppress(StorageError):
            files.remove()
    return ConvertResult(
        size_bytes=checkpoint.state_map.num_bytes,
        read_bytes=run.read_bytes,
        written_bytes=run.written_bytes + sum(map(len, small.values())),
        resumed_bytes=run.resumed_bytes,
        seconds=perf_counter() - begun,
        processes=processes,
        threads=threads,
        checkpoint=made,
    )


def _files(conversion: Conversion, *, resume: bool) -> LocalFiles | StreamedFiles:
    """Return where the conversion writes: in place if it can."""
    targets, identity = conversion.job.targets, conversion.identity
    store, directory = conversion.store, conversion.directory
    if isinstance(store, LocalStore):
        return LocalFiles(targets, directory, identity, resume=resume)
    return StreamedFiles(targets, store, directory, identity, resume=resume)


@contextmanager
def _kept(files: LocalFiles | StreamedFiles) -> Iterator[LocalFiles | StreamedFiles]:
    """Keep what is done if anything fails, so that the next run goes on from there."""
    try:
        yield files
    except CheckpointCorruptError:
        # Nothing of it can be used, whatever is done to the source.
        files.discard()
        raise
    finally:
        files.close()


class _Run:
    """Runs the items of a conversion on this machine."""

    def __init__(
        self,
        conversion: Conversion,
        files: LocalFiles | StreamedFiles,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._conversion = conversion
        self._files = files
        self._progress = progress
        self._done_bytes = 0
        self.read_bytes = 0
        self.written_bytes = 0
        self.resumed_bytes = 0

    def resume(self) -> None:
        """Take over what an earlier run did."""
        known = set(self._conversion.items)
        for result in self._files.resumed():
            if result.item in known:
                self._conversion.take(result)
                self._count(result.item)
                if result.item.target >= 0:
                    self.resumed_bytes += result.item.stop - result.item.start

    def _count(self, item: Item) -> None:
        self._done_bytes += item.stop - item.start
        if self._progress is not None:
            self._progress(self._done_bytes, self._conversion.total_bytes)

    def take(self, result: Result) -> None:
        """Note that an item is done."""
        self._conversion.take(result)
        self._files.note(result)
        self.read_bytes += result.read_bytes
        if result.item.target >= 0:
            self.written_bytes += result.item.stop - result.item.start
        self._count(result.item)

    def work(self, workers: int, runner: Runner | None) -> tuple[int, int]:
        """Do all items that are left; return how many processes, and threads in each, did them."""
        job, left, files = self._conversion.job, self._conversion.left, self._files
        if runner is not None:
            runner(job, files.batches(left, REMOTE_BATCH_ITEMS), self.take)
            return workers, 1
        batches = files.batches(left, 1)
        if workers <= 1 or len(batches) <= 1:
            run_here(job, batches, self.take)
            return 1, 1
        if isinstance(files, LocalFiles) and is_local(job.store) and may_fork():
            run_processes(job, batches, self.take, workers, in_child=files.release)
            return workers, 1
        run_threads(job, batches, self.take, workers)
        return 1, workers


def memory_left(memory_bytes: int) -> int:
    """Return what a bound of the whole process leaves for ``convert``.

    Raises:
        UcpError: Too little.
    """
    used = _resident_bytes()
    if memory_bytes - used < MEMORY_BYTES_MIN:
        needed = -(-(used + MEMORY_BYTES_MIN) // BLOCK_BYTES)
        raise UcpError(
            f"{memory_bytes} bytes of memory are too few: this program alone has {used}; give at "
            f"least {needed}MiB",
            memory_bytes=memory_bytes,
        )
    return memory_bytes - used


def _num_cores() -> int:
    """Return how many cores this process may use; macOS tells only how many there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _workers(checkpoint: Checkpoint, memory_bytes: int, processes: int | None) -> int:
    """Return how many processes or threads to use: what is asked for, useful, and fits."""
    wanted = processes or _num_cores()
    useful = max(1, checkpoint.state_map.num_bytes // _PROCESS_BYTES_MIN)
    per_worker = _WORKER_BYTES
    if is_local(checkpoint.store) and may_fork():
        if _is_scattered(checkpoint):
            # Before its size is looked at, and once for all children.
            import_module("numpy")
        # A child shares this process's pages, but they count in its size as long as it lives.
        per_worker += _resident_bytes()
        if not all(map(is_plain, checkpoint.state_map.entries.values())):
            per_worker += 2 * GENERAL_BYTES_MAX
    elif not is_local(checkpoint.store):
        per_worker += 4 * BLOCK_BYTES
    return int(max(1, min(wanted, useful, memory_bytes // per_worker)))


def _is_scattered(checkpoint: Checkpoint) -> bool:
    """Return whether elements have to be put in place one by one, or averaged."""
    entries = checkpoint.state_map.entries.values()
    # Layers and slots are cut alike.
    cuts = {(entry.shape, tuple([f.box for f in entry.fragments])) for entry in entries}
    return not all(map(is_plain, entries)) or not all(
        box.is_empty or is_contiguous(box, Box.full(shape))
        for shape, boxes in cuts
        for box in boxes
    )


def _resident_bytes() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return 64 << 20
    return pages * os.sysconf("SC_PAGE_SIZE")
