"""The cost of a conversion or a load, computed from the source's map."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ucp_core.conversion.job import Conversion
from ucp_core.geometry import DTYPE_BYTES
from ucp_core.language import Rules, builtin_rules, family_of, shapes_of, target_map
from ucp_core.reading import Holders, is_plain, plan
from ucp_core.storage import MemoryStore

if TYPE_CHECKING:
    from ucp_core.layout import ParallelLayout
    from ucp_core.native import Checkpoint

#: The memory to plan for; the forecast does not depend on it.
_MEMORY_BYTES = 64 << 20


class Forecast(NamedTuple):
    """The work of a conversion and of a load under a layout."""

    tensors: int
    fragments: int
    files: int
    size_bytes: int
    read_bytes: int  #: Bytes that a conversion reads, including replicas and padding of records.
    gathered_bytes: int  #: The part of these that is assembled element by element.
    written_bytes: int  #: Bytes that a conversion writes.
    target_files: int  #: Files with tensors that a conversion writes.
    layout: str = ""  #: Layout of the load, if one was given.
    load_bytes: int = 0  #: Bytes that all its ranks read.
    load_bytes_max: int = 0  #: Most bytes that one rank reads.


def forecast(
    checkpoint: Checkpoint, *, layout: ParallelLayout | None = None, rules: Rules | None = None
) -> Forecast:
    """Return what it costs to convert ``checkpoint`` and to load it under ``layout``.

    Args:
        layout: Layout of a run that would load it.
        rules: How the run's ranks cut tensors. Default: the built-in rules of the family that
            matches the names; tensors outside of it are whole on every rank.

    Raises:
        CheckpointCorruptError: The checkpoint cannot be converted.
        PatternError: ``layout`` does not fit the tensors.
    """
    conversion = Conversion(
        checkpoint, MemoryStore(), "forecast", memory_bytes=_MEMORY_BYTES, workers=1
    )
    entries = checkpoint.state_map.entries.values()
    targets = conversion.job.targets
    read_bytes = sum(f.num_bytes for entry in entries for f in entry.fragments)
    read_bytes += sum(high - low for _, low, high in conversion.job.extents.gaps)
    loads = [0]
    if layout is not None:
        family = family_of({key.fqn for key in checkpoint.state_map.entries})
        rules = rules or (builtin_rules(family) if family else Rules())
        ranks = range(layout.world_size)
        shapes, have = shapes_of(checkpoint.state_map), [checkpoint.state_map]
        needs = (target_map(shapes, rules, layout, rank) for rank in ranks)
        # Whole blocks around what each rank needs.
        loads = [plan(need, have, span_bytes_max=_MEMORY_BYTES).read_bytes for need in needs]
    return Forecast(
        tensors=len(checkpoint.state_map.entries),
        fragments=sum(len(entry.fragments) for entry in entries),
        files=len(conversion.job.files),
        size_bytes=checkpoint.state_map.num_bytes,
        read_bytes=read_bytes,
        gathered_bytes=_gathered_bytes(checkpoint),
        written_bytes=sum(target.num_bytes for target in targets),
        target_files=len(targets),
        layout="" if layout is None else str(layout),
        load_bytes=sum(loads),
        load_bytes_max=max(loads),
    )


def _gathered_bytes(checkpoint: Checkpoint) -> int:
    """Return the bytes that are strided, averaged, or not contiguous in the target."""
    total = 0
    for entry in checkpoint.state_map.entries.values():
        if not is_plain(entry):
            total += entry.num_bytes
        elif len(entry.fragments) > 1:
            itemsize = DTYPE_BYTES[entry.dtype]
            runs = Holders(entry).runs(0, entry.num_bytes // itemsize)
            total += sum(run.num_elements for run in runs if run.target < 0) * itemsize
    return total
