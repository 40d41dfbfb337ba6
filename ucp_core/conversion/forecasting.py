"""What a conversion or a load would cost, before it is done: arithmetic, and one short try."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple, Self

from ucp_core.conversion.job import Conversion
from ucp_core.conversion.run import MEMORY_BYTES_MIN, default_processes
from ucp_core.conversion.work_items import Item, Worker
from ucp_core.conversion.workers import Writer
from ucp_core.errors import StorageError, UcpError
from ucp_core.geometry import DTYPE_BYTES
from ucp_core.language import Rules, builtin_rules, family_of, shapes_of, target_map
from ucp_core.reading import Holders, is_plain, plan
from ucp_core.storage import LocalStore, MemoryStore, open_store, temporary_name

if TYPE_CHECKING:
    from ucp_core.layout import ParallelLayout
    from ucp_core.native import Checkpoint

#: Long enough to tell a disk from the page cache, short enough to wait for.
_TRY_S = 0.3
#: Memory that the try and the work lists are made with; it changes neither.
_MEMORY_BYTES = 64 << 20
assert _MEMORY_BYTES >= MEMORY_BYTES_MIN


class Forecast(NamedTuple):
    """What would be done.

    Attributes:
        tensors: Of the state.
        fragments: That hold them.
        files: That hold those.
        size_bytes: Of the state.
        read_bytes: Read by a conversion, replicas and padding of records included.
        gathered_bytes: Of those, what has to be put together element by element.
        written_bytes: Written by a conversion.
        target_files: So many files with tensors.
        read_bytes_per_s: Tried, by one process.
        write_bytes_per_s: Tried; None without a destination.
        processes: That a conversion would use.
        convert_s: It would take about so long; None without a destination.
        layout: Of the load, or nothing.
        load_bytes: Read by all its ranks.
        load_bytes_max: Read by the rank that reads most.
        load_s: It would take about so long, if each rank reads as fast as the try.
    """

    tensors: int
    fragments: int
    files: int
    size_bytes: int
    read_bytes: int
    gathered_bytes: int
    written_bytes: int
    target_files: int
    read_bytes_per_s: float
    write_bytes_per_s: float | None
    processes: int
    convert_s: float | None
    layout: str = ""
    load_bytes: int = 0
    load_bytes_max: int = 0
    load_s: float = 0.0


def forecast(
    checkpoint: Checkpoint,
    *,
    layout: ParallelLayout | None = None,
    rules: Rules | None = None,
    destination: str | None = None,
) -> Forecast:
    """Return what converting ``checkpoint``, and loading it under ``layout``, would cost.

    Args:
        checkpoint: Of any format.
        layout: Of a run that would load it.
        rules: How its ranks hold tensors; without, each name has to be known to the rules that
            ship, or be held whole.
        destination: Local directory whose speed is tried with a file that is deleted again.

    Raises:
        CheckpointCorruptError: The checkpoint cannot be converted.
        PatternError: ``layout`` does not fit the tensors.
        StorageError: The destination cannot be written.
    """
    conversion = Conversion(
        checkpoint, MemoryStore(), "forecast", memory_bytes=_MEMORY_BYTES, workers=1
    )
    entries = checkpoint.state_map.entries.values()
    targets = conversion.job.targets
    read_rate, write_rate = _try(conversion, destination)
    written_bytes = sum(target.num_bytes for target in targets)
    read_bytes = sum(f.num_bytes for entry in entries for f in entry.fragments)
    read_bytes += sum(high - low for _, low, high in conversion.job.extents.gaps)
    processes = default_processes(checkpoint, _MEMORY_BYTES * 8)
    found = Forecast(
        tensors=len(checkpoint.state_map.entries),
        fragments=sum(len(entry.fragments) for entry in entries),
        files=len(conversion.job.files),
        size_bytes=checkpoint.state_map.num_bytes,
        read_bytes=read_bytes,
        gathered_bytes=_gathered_bytes(checkpoint),
        written_bytes=written_bytes,
        target_files=len(targets),
        read_bytes_per_s=read_rate,
        write_bytes_per_s=write_rate,
        processes=processes,
        convert_s=None
        if write_rate is None
        else (read_bytes / read_rate + written_bytes / write_rate) / processes,
    )
    if layout is None:
        return found
    loads = [
        _load_bytes(checkpoint, layout, rank, rules or _shipped(checkpoint))
        for rank in range(layout.world_size)
    ]
    return found._replace(
        layout=str(layout),
        load_bytes=sum(loads),
        load_bytes_max=max(loads),
        load_s=max(loads) / read_rate,
    )


def _shipped(checkpoint: Checkpoint) -> Rules:
    """Return the rules of the family whose names the checkpoint has, or none."""
    family = family_of({key.fqn for key in checkpoint.state_map.entries})
    return Rules() if family is None else builtin_rules(family)


def _load_bytes(checkpoint: Checkpoint, layout: ParallelLayout, rank: int, rules: Rules) -> int:
    """Return what one rank would read: whole blocks around what it needs."""
    parts = target_map(shapes_of(checkpoint.state_map), rules, layout, rank)
    return plan(parts, [checkpoint.state_map], span_bytes_max=_MEMORY_BYTES).read_bytes


def _gathered_bytes(checkpoint: Checkpoint) -> int:
    """Return the bytes of fragments that do not lie in the target as they lie in the source."""
    total = 0
    for entry in checkpoint.state_map.entries.values():
        if not is_plain(entry):
            total += entry.num_bytes
        elif len(entry.fragments) > 1:
            size = entry.num_bytes // DTYPE_BYTES[entry.dtype]
            runs = Holders(entry).runs(0, size)
            scattered = sum(run.num_elements for run in runs if run.target < 0)
            total += scattered * DTYPE_BYTES[entry.dtype]
    return total


def _try(conversion: Conversion, destination: str | None) -> tuple[float, float | None]:
    """Return the bytes a second at which items are gathered, and written to ``destination``."""
    worker = Worker(conversion.job)
    chunks_bytes = 0
    read_s = write_s = 0.0
    with _TryFile(destination) as file:
        for item in _spread(conversion.items):
            begun = perf_counter()
            for chunk in worker.chunks(item):
                now = perf_counter()
                read_s += now - begun
                file.write(chunks_bytes, chunk)
                begun = perf_counter()
                write_s += begun - now
                chunks_bytes += len(chunk)
            if read_s + write_s > _TRY_S:
                break
    worker.close()
    size = max(chunks_bytes, 1)
    return size / max(read_s, 1e-6), None if destination is None else size / max(write_s, 1e-6)


def _spread(items: tuple[Item, ...]) -> list[Item]:
    """Return items in an order that soon has some of everywhere."""
    return [item for start in range(7) for item in items[start::7]]


class _TryFile:
    """A file that is written to try it, and deleted."""

    def __init__(self, directory: str | None) -> None:
        self._path = None
        self._writer = None
        if directory is not None:
            store, path = open_store(directory)
            if not isinstance(store, LocalStore):
                raise UcpError(f"{directory} is not local: only a local directory can be tried")
            folder = Path(path)
            while not folder.is_dir():
                folder = folder.parent
            self._path = folder / temporary_name("try")
            store.write_atomic(str(self._path), b"", fsync=False)
            self._writer = Writer([str(self._path)])

    def __enter__(self) -> Self:
        return self

    def write(self, offset_bytes: int, chunk: memoryview) -> None:
        """Write, if there is a file."""
        if self._writer is not None:
            self._writer.write(0, offset_bytes, chunk)

    def __exit__(self, *_: object) -> None:
        if self._writer is not None and self._path is not None:
            self._writer.close()
            try:
                self._path.unlink()
            except OSError as error:
                raise StorageError(
                    f"{self._path} cannot be deleted: {error.strerror}", path=str(self._path)
                ) from error
