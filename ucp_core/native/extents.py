"""Checks foreign files by their own checksums, record by record.

A record is verified whole or not at all, so whoever needs parts of many lets the ranks that need
the others verify disjoint shares, and agrees afterwards that all were sound.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ucp_core.errors import ChecksumMismatchError
from ucp_core.numerics import crc32
from ucp_core.reading import THREAD_BYTES_MIN
from ucp_core.storage import join

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ucp_core.geometry import Extent, StateMap
    from ucp_core.native.opening import Checkpoint
    from ucp_core.reading import Copy, ReadPlan


class _Place(NamedTuple):
    file: str
    extent: Extent


def verify_extents(
    checkpoint: Checkpoint,
    *,
    share: tuple[int, int] = (0, 1),
    threads: int = 2,
    only: Mapping[str, Sequence[Extent]] | None = None,
) -> int:
    """Read the extents of a checkpoint's foreign files and compare their checksums.

    Args:
        checkpoint: The checkpoint; without extents there is nothing to do.
        share: ``(rank, world_size)``: verify that part of the extents, about equal in bytes; all
            ranks together verify each extent once.
        threads: Readers at most.
        only: These extents, by file, instead of all that the checkpoint has.

    Returns:
        The bytes that were read and are sound.

    Raises:
        ChecksumMismatchError: Names the file, the bytes and the tensors in them.
        StorageError: A file cannot be read.
    """
    rank, world_size = share
    assert 0 <= rank < world_size, f"rank {rank} is not in a world of {world_size}"
    extents = checkpoint.state_map.extents if only is None else only
    places = [_Place(file, extent) for file in sorted(extents) for extent in extents[file]]
    mine = _shares(places, world_size)[rank]
    num_bytes = sum(place.extent.num_bytes for place in mine)
    num_lists = max(1, min(threads, num_bytes // THREAD_BYTES_MIN))
    if num_lists == 1:
        _verify(checkpoint, mine)
        return num_bytes
    with ThreadPoolExecutor(num_lists, thread_name_prefix="ucp-verify") as pool:
        for done in [pool.submit(_verify, checkpoint, w) for w in _shares(mine, num_lists)]:
            done.result()
    return num_bytes


def touched(plan: ReadPlan, state_map: StateMap) -> dict[str, list[Extent]]:
    """Return the extents of which the plan reads bytes that have no checksum of their own."""
    ordered: dict[str, list[Extent]] = {}
    found: dict[str, set[Extent]] = {}
    for copy in _copies(plan):
        file = copy.fragment.file
        if copy.fragment.crc32 is not None or file not in state_map.extents:
            continue
        if file not in ordered:
            ordered[file] = sorted(state_map.extents[file])
        low = copy.fragment.offset_bytes + copy.start_byte
        high = copy.fragment.offset_bytes + copy.stop_byte
        found.setdefault(file, set()).update(_between(ordered[file], low, high))
    return {file: sorted(extents) for file, extents in found.items()}


def _between(ordered: Sequence[Extent], low: int, high: int) -> Iterator[Extent]:
    """Yield the extents that hold any of the bytes; none of them overlap."""
    number = max(0, bisect_right(ordered, low, key=lambda extent: extent.offset_bytes) - 1)
    while number < len(ordered) and ordered[number].offset_bytes < high:
        if ordered[number].offset_bytes + ordered[number].num_bytes > low:
            yield ordered[number]
        number += 1


def _copies(plan: ReadPlan) -> Iterator[Copy]:
    yield from plan.copies
    for mean in plan.means:
        for term in mean.terms:
            yield from term.copies


def _shares(places: Sequence[_Place], num_shares: int) -> list[list[_Place]]:
    """Return ``places`` in lists of about equal bytes, each in order of the files.

    The largest first, each to whom has least: at most 4/3 of the best that is possible (Graham).
    """
    shares: list[list[_Place]] = [[] for _ in range(num_shares)]
    loads = [(0, number) for number in range(num_shares)]
    for place in sorted(places, key=lambda p: (-p.extent.num_bytes, p)):
        num_bytes, number = heapq.heappop(loads)
        shares[number].append(place)
        heapq.heappush(loads, (num_bytes + place.extent.num_bytes, number))
    return [sorted(found) for found in shares]


def _verify(checkpoint: Checkpoint, places: Sequence[_Place]) -> None:
    largest = max((place.extent.num_bytes for place in places), default=0)
    buffer = np.empty(min(checkpoint.store.request_bytes, largest), np.uint8).data
    for file, extent in places:
        path = join(checkpoint.directory, file)
        value, stop_byte = 0, extent.offset_bytes + extent.num_bytes
        for low in range(extent.offset_bytes, stop_byte, max(1, len(buffer))):
            data = buffer[: stop_byte - low]
            checkpoint.store.read_ranges(path, [(low, (data,))])
            value = crc32(data, value)
        if value != extent.crc32:
            raise _mismatch(checkpoint.state_map, path, file, extent)


def _mismatch(state_map: StateMap, path: str, file: str, extent: Extent) -> ChecksumMismatchError:
    start_byte = extent.offset_bytes
    stop_byte = start_byte + extent.num_bytes
    keys = sorted(
        str(key)
        for key, entry in state_map.entries.items()
        if any(
            f.file == file
            and f.offset_bytes < stop_byte
            and f.offset_bytes + f.num_bytes > start_byte
            for f in entry.fragments
        )
    )
    more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
    whose = f"{keys[0]}{more}: " if keys else ""
    return ChecksumMismatchError(
        f"{whose}bytes {start_byte} to {stop_byte} of {path} are damaged; use an older checkpoint",
        path=path,
        start_byte=start_byte,
        stop_byte=stop_byte,
        tensors=tuple(keys),
    )
