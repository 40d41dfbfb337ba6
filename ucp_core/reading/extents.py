"""Verify foreign files by their own checksums; each covers one extent, a record of the file.

An extent is verified whole or not at all. A load verifies the extents that it touches before it
reads parts of them (``touched``, ``verify_extents``). A conversion reads every byte only once: its
workers note the crc32 of what they read (``plan_extents``, ``joined_notes``), and a ``Collector``
combines the notes of an extent in any order, from any worker.
"""

from __future__ import annotations

import mmap
import sys
from bisect import bisect_left, bisect_right
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from ucp_core.errors import ChecksumMismatchError
from ucp_core.geometry import Extent
from ucp_core.numerics import combine, crc32, shortened
from ucp_core.reading.gather import is_plain
from ucp_core.storage import Store, join

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ucp_core.geometry import StateMap
    from ucp_core.reading.planning import ReadPlan

#: A second thread pays off from this size: starting one costs 0.1 ms, reading 4 MiB 0.3 ms.
THREAD_BYTES_MIN = 4 << 20


def crc32_of(store: Store, path: str, low: int, num_bytes: int) -> int:
    """Read bytes of a file and return their crc32."""
    chunk_bytes = min(store.request_bytes, num_bytes)
    if not chunk_bytes:
        return 0
    buffer = memoryview(mmap.mmap(-1, chunk_bytes))
    value = 0
    for start in range(0, num_bytes, chunk_bytes):
        data = buffer[: num_bytes - start]
        store.read_ranges(path, [(low + start, (data,))])
        value = crc32(data, value)
    return value


def _mismatch(
    state_map: StateMap, directory: str, file: str, extent: Extent
) -> ChecksumMismatchError:
    path, low = join(directory, file), extent.offset_bytes
    high = low + extent.num_bytes
    keys = sorted(
        str(key)
        for key, entry in state_map.entries.items()
        if any(
            f.file == file and f.offset_bytes < high and f.offset_bytes + f.num_bytes > low
            for f in entry.fragments
        )
    )
    whose = f"{shortened(keys, 1)}: " if keys else ""
    return ChecksumMismatchError(
        f"{whose}file {path} is damaged in bytes {low} to {high}; use another checkpoint",
        path=path,
        start_byte=low,
        stop_byte=high,
        tensors=tuple(keys),
    )


def touched(plan: ReadPlan, state_map: StateMap) -> dict[str, list[Extent]]:
    """Return the extents of which the plan reads bytes without a checksum of their own."""
    ordered: dict[str, list[Extent]] = {}
    found: dict[str, set[Extent]] = {}
    of_means = (term.copies for mean in plan.means for term in mean.terms)
    for copy in chain(plan.copies, *of_means):
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
    """Yield the extents that hold any of the bytes. Extents must not overlap."""
    number = max(0, bisect_right(ordered, low, key=lambda extent: extent.offset_bytes) - 1)
    while number < len(ordered) and ordered[number].offset_bytes < high:
        if ordered[number].offset_bytes + ordered[number].num_bytes > low:
            yield ordered[number]
        number += 1


def verify_extents(
    store: Store,
    directory: str,
    state_map: StateMap,
    only: Mapping[str, Sequence[Extent]],
    *,
    threads: int = 1,
) -> int:
    """Read extents and compare their checksums; return how many bytes were read.

    Args:
        state_map: Describes their content, for errors.
        only: The extents to verify, by file.
        threads: At most this many readers; a few bytes take one.

    Raises:
        ChecksumMismatchError: Names the file, the bytes and the tensors in them.
    """

    def verify(place: tuple[str, Extent]) -> int:
        file, extent = place
        found = crc32_of(store, join(directory, file), extent.offset_bytes, extent.num_bytes)
        if found != extent.crc32:
            raise _mismatch(state_map, directory, file, extent)
        return extent.num_bytes

    places = [(file, extent) for file in sorted(only) for extent in only[file]]
    num_bytes = sum(extent.num_bytes for _, extent in places)
    threads = min(threads, num_bytes // THREAD_BYTES_MIN)
    if threads <= 1:
        return sum(map(verify, places))
    # It imports logging, which opening a checkpoint does not need.
    from concurrent.futures import ThreadPoolExecutor

    # Start with the largest, so that the readers finish together.
    places.sort(key=lambda place: -place[1].num_bytes)
    with ThreadPoolExecutor(threads, thread_name_prefix="ucp-verify") as pool:
        return sum(pool.map(verify, places))


class Check(NamedTuple):
    """Bytes of a source file whose crc32 is known."""

    file: int  #: Index of the file.
    offset_bytes: int
    num_bytes: int
    crc32: int


class Note(NamedTuple):
    """Bytes of a ``Check`` that a worker read at once, with their crc32."""

    check: Check
    offset_bytes: int
    num_bytes: int
    crc32: int

    @property
    def stop_byte(self) -> int:
        """Return the end of the bytes."""
        return self.offset_bytes + self.num_bytes


class ExtentPlan(NamedTuple):
    """How a conversion verifies the extents that hold tensors."""

    checks: tuple[Check, ...]  #: All of them, in order.
    #: Those whose bytes the conversion reads exactly once, gaps aside. The others are read a second
    #: time, because their tensors are strided, averaged or overlapping.
    streamed: frozenset[Check]
    #: ``(file, start, stop)`` of the bytes to read beside the tensors.
    gaps: tuple[tuple[int, int, int], ...]

    def at(self, file: int, offset_bytes: int) -> Check | None:
        """Return the check that covers the byte, or None."""
        index = bisect_right(self.checks, (file, offset_bytes, sys.maxsize)) - 1
        check = self.checks[index] if index >= 0 else None
        if check is None or check.file != file:
            return None
        return check if offset_bytes < check.offset_bytes + check.num_bytes else None


def plan_extents(state_map: StateMap, files: Sequence[str]) -> ExtentPlan:
    """Return how to verify the extents of ``state_map`` that hold tensors."""
    spans = _spans(state_map)
    checks: list[Check] = []
    streamed: set[Check] = set()
    gaps: list[tuple[int, int, int]] = []
    for number, file in enumerate(files):
        held = sorted(spans.get(file, ()))
        for extent in sorted(state_map.extents.get(file, ())):
            low, high = extent.offset_bytes, extent.offset_bytes + extent.num_bytes
            # A fragment never leaves its record, so its start is enough.
            inside = held[bisect_left(held, (low,)) : bisect_left(held, (high,))]
            if not inside:
                continue
            check = Check(number, *extent)
            checks.append(check)
            rest = _gaps(inside, low, high)
            if rest is None:
                gaps.append((number, low, high))
            else:
                streamed.add(check)
                gaps += [(number, *gap) for gap in rest]
    return ExtentPlan(tuple(checks), frozenset(streamed), tuple(gaps))


def _spans(state_map: StateMap) -> dict[str, list[tuple[int, int, bool]]]:
    """Return ``(start, stop, is_read_once)`` for every fragment in a file with extents."""
    spans: dict[str, list[tuple[int, int, bool]]] = {}
    for entry in state_map.entries.values():
        plain = is_plain(entry)
        for fragment in entry.fragments:
            if fragment.file in state_map.extents and not fragment.box.is_empty:
                low = fragment.offset_bytes
                once = plain and fragment.crc32 is None
                spans.setdefault(fragment.file, []).append((low, low + fragment.num_bytes, once))
    return spans


def _gaps(
    inside: Iterable[tuple[int, int, bool]], low: int, high: int
) -> list[tuple[int, int]] | None:
    """Return what the spans leave of an extent; None if they do not read each byte once."""
    gaps: list[tuple[int, int]] = []
    for start, stop, once in inside:
        if not once or start < low:
            return None
        if start > low:
            gaps.append((low, start))
        low = stop
    if low > high:
        return None
    return [*gaps, (low, high)] if low < high else gaps


def joined_notes(notes: Iterable[Note]) -> list[Note]:
    """Join the notes of adjacent bytes; leave out those that cover a whole check and match it."""
    found: list[Note] = []
    for note in sorted(notes):
        last = found[-1] if found else None
        if last and last.check == note.check and last.stop_byte == note.offset_bytes:
            value = combine(last.crc32, note.crc32, note.num_bytes)
            found[-1] = last._replace(num_bytes=last.num_bytes + note.num_bytes, crc32=value)
        else:
            found.append(note)
    return [n for n in found if (n.num_bytes, n.crc32) != (n.check.num_bytes, n.check.crc32)]


class Collector:
    """Combines the notes of all work items of a conversion."""

    def __init__(self, state_map: StateMap, directory: str, files: Sequence[str]) -> None:
        self._state_map = state_map
        self._directory = directory
        self._files = files
        self._notes: dict[Check, list[Note]] = {}
        self._left_bytes: dict[Check, int] = {}

    def add(self, notes: Iterable[Note]) -> None:
        """Add the notes of one item.

        Raises:
            ChecksumMismatchError: A check is complete and wrong; names file, bytes and tensors.
        """
        for note in notes:
            check = note.check
            self._notes.setdefault(check, []).append(note)
            left_bytes = self._left_bytes.pop(check, check.num_bytes) - note.num_bytes
            if left_bytes > 0:
                self._left_bytes[check] = left_bytes
            else:
                self._close(check)

    def _close(self, check: Check) -> None:
        for note in joined_notes(self._notes.pop(check)):
            assert note.num_bytes == check.num_bytes, f"{check} was not read once: {note}"
            file = self._files[check.file]
            raise _mismatch(self._state_map, self._directory, file, Extent(*check[1:]))

    def finish(self) -> None:
        """Check that every check with notes is complete."""
        assert not self._notes, f"not read whole: {next(iter(self._notes))}"
