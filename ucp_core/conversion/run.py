"""Convert any checkpoint to a universal one: in parallel, in bounded memory, resumable.

The destination is planned before a byte moves. A work item is a range of a target file; its bytes
are read once, verified, hashed and written, block by block. A journal records finished items, so a
killed conversion can continue.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import TypeAlias

from ucp_core.conversion.job import GENERAL_BYTES_MAX, Conversion
from ucp_core.conversion.outputs import REMOTE_BATCH_ITEMS, LocalFiles
from ucp_core.conversion.streams import StreamedFiles
from ucp_core.conversion.work_items import Job, Result
from ucp_core.conversion.workers import Batch, may_fork, run_here, run_processes, run_threads
from ucp_core.errors import CheckpointCorruptError, StorageError, UcpError
from ucp_core.geometry import Box, is_contiguous
from ucp_core.native import MEMORY_BYTES_MIN, Checkpoint, check_memory, reading
from ucp_core.numerics import BLOCK_BYTES
from ucp_core.reading import is_plain
from ucp_core.storage import LocalStore, Store, is_local, tidied

#: From this size a second process pays off: starting one costs 5 ms.
_PROCESS_BYTES_MIN = 32 << 20
#: Memory of a worker beside its buffers: interpreter state that it writes to, and stacks.
_WORKER_BYTES = 8 << 20
#: Does batches anywhere and passes every result to its last argument.
Runner: TypeAlias = Callable[[Job, Sequence[Batch], Callable[[Result], None]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertResult:
    """The result of ``convert``."""

    size_bytes: int
    read_bytes: int  #: Bytes read from the source in this run.
    written_bytes: int  #: Bytes written to the destination in this run.
    resumed_bytes: int  #: Bytes taken over from an interrupted run.
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
        directory: New, empty, or left by an interrupted conversion.
        memory_bytes: Limit for the memory beside the caller's own, including worker processes; at
            least ``MEMORY_BYTES_MIN``.
        processes: At most this many at once; fewer if the memory or the state is small. Default:
            one per core. They are threads if the source or the destination is remote, or if this
            process already has threads.
        progress: Called with the bytes done and the bytes of the whole state.
        resume: Continue an interrupted conversion of the same source.
        fsync: Whether the result must survive a power loss before it is committed.
        runner: Does the work elsewhere, and returns once every result is taken.

    Raises:
        UcpError: The destination holds a checkpoint or other files, or the limit is too small.
        CheckpointCorruptError: The source is damaged; nothing is committed.
        StorageError: A storage refused a request.
    """
    begun = perf_counter()
    check_memory(memory_bytes)
    workers = _workers(checkpoint, memory_bytes, processes)
    conversion = Conversion(
        checkpoint,
        store,
        directory,
        memory_bytes=memory_bytes,
        workers=workers,
        progress=progress,
    )
    # Report values that are not JSON before anything is written.
    conversion.small_files()
    with tidied(store, directory), _kept(_files(conversion, resume=resume)) as files:
        conversion.resume(files.resumed())
        conversion.rename(files.targets)
        with reading(checkpoint):
            used = _work(conversion, files, workers, runner)
        small = conversion.small_files()
        manifest = conversion.manifest(small)
        files.finish(fsync=fsync)
        conversion.write_small(small, fsync=fsync)
        made = conversion.commit(manifest, fsync=fsync)
        # Readers ignore temporary files, so failing to delete them is not an error.
        with suppress(StorageError):
            files.remove()
    return ConvertResult(
        size_bytes=checkpoint.state_map.num_bytes,
        read_bytes=conversion.read_bytes,
        written_bytes=conversion.written_bytes + sum(map(len, small.values())),
        resumed_bytes=conversion.resumed_bytes,
        seconds=perf_counter() - begun,
        processes=used[0],
        threads=used[1],
        checkpoint=made,
    )


def _files(conversion: Conversion, *, resume: bool) -> LocalFiles | StreamedFiles:
    """Return where the conversion writes: in place if the destination is local."""
    targets, identity = conversion.job.targets, conversion.identity
    store, directory = conversion.store, conversion.directory
    if isinstance(store, LocalStore):
        return LocalFiles(targets, directory, identity, resume=resume)
    return StreamedFiles(targets, store, directory, identity, resume=resume)


@contextmanager
def _kept(files: LocalFiles | StreamedFiles) -> Iterator[LocalFiles | StreamedFiles]:
    """Keep what is done if anything fails, so that the next run continues from there."""
    try:
        yield files
    except CheckpointCorruptError:
        # No part of the result is usable.
        files.discard()
        raise
    finally:
        files.close()


def _work(
    conversion: Conversion,
    files: LocalFiles | StreamedFiles,
    workers: int,
    runner: Runner | None,
) -> tuple[int, int]:
    """Do all remaining items; return how many processes, and threads in each, did them."""
    job, left = conversion.job, conversion.left

    def take(result: Result) -> None:
        # In this order, so that a kill loses nothing that progress has reported.
        files.note(result)
        conversion.take(result)

    if runner is not None:
        runner(job, files.batches(left, REMOTE_BATCH_ITEMS), take)
        return workers, 1
    batches = files.batches(left, 1)
    if workers <= 1 or len(batches) <= 1:
        run_here(job, batches, take)
        return 1, 1
    if isinstance(files, LocalFiles) and is_local(job.store) and may_fork():
        run_processes(job, batches, take, workers, in_child=files.close)
        return workers, 1
    run_threads(job, batches, take, workers)
    return 1, workers


def memory_left(memory_bytes: int) -> int:
    """Return what the memory limit leaves for ``convert``; raise ``UcpError`` if too little."""
    used = _resident_bytes()
    if memory_bytes - used < MEMORY_BYTES_MIN:
        needed = -(-(used + MEMORY_BYTES_MIN) // BLOCK_BYTES)
        raise UcpError(
            f"{memory_bytes} bytes of memory are too few: this program alone uses {used}; give "
            f"at least {needed}MiB",
            memory_bytes=memory_bytes,
        )
    return memory_bytes - used


def _num_cores() -> int:
    """Return how many cores this process may use; on macOS, how many exist."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _workers(checkpoint: Checkpoint, memory_bytes: int, processes: int | None) -> int:
    """Return how many processes or threads to use: the least of asked, useful and affordable."""
    wanted = processes or _num_cores()
    useful = max(1, checkpoint.state_map.num_bytes // _PROCESS_BYTES_MIN)
    per_worker = _WORKER_BYTES
    if is_local(checkpoint.store) and may_fork():
        if _is_scattered(checkpoint):
            # Imported before this process's size is read, and once for all children.
            import_module("numpy")
        # A child shares this process's pages, but they count towards its size.
        per_worker += _resident_bytes()
        if not all(map(is_plain, checkpoint.state_map.entries.values())):
            per_worker += 2 * GENERAL_BYTES_MAX
    elif not is_local(checkpoint.store):
        per_worker += 4 * BLOCK_BYTES
    return int(max(1, min(wanted, useful, memory_bytes // per_worker)))


def _is_scattered(checkpoint: Checkpoint) -> bool:
    """Return whether elements must be placed one by one, or averaged."""
    entries = checkpoint.state_map.entries.values()
    # Most layers and slots are cut alike, so there are few different cuts.
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
