"""Checksums that a source has of its own bytes, verified from pieces as they stream by. Pure.

A piece is what one work item read of one checked range; the crc32 of the pieces of a range
combine to that of the range, whoever read them and in whatever order.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple

from ucp_core.errors import ChecksumMismatchError
from ucp_core.numerics import combine
from ucp_core.reading import is_plain

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ucp_core.geometry import Extent, StateMap


class Check(NamedTuple):
    """A range of a source file whose crc32 is known.

    Attributes:
        file: Index of the source file.
        offset_bytes: Its first byte.
        num_bytes: Its size.
        crc32: What it has to be.
    """

    file: int
    offset_bytes: int
    num_bytes: int
    crc32: int


class Piece(NamedTuple):
    """Bytes of a checked range that were read at once."""

    check: Check
    offset_bytes: int
    num_bytes: int
    crc32: int


class ExtentTable(NamedTuple):
    """The checked ranges of one file, by offset."""

    offsets: tuple[int, ...]
    checks: tuple[Check, ...]

    def at(self, offset_bytes: int) -> Check | None:
        """Return the range that holds the byte, or None."""
        index = bisect_right(self.offsets, offset_bytes) - 1
        if index < 0:
            return None
        check = self.checks[index]
        return check if offset_bytes < check.offset_bytes + check.num_bytes else None


class ExtentPlan(NamedTuple):
    """How the extents that hold tensors get verified.

    Attributes:
        streamed: By file: extents whose bytes gathering reads exactly once, gaps aside.
        separate: By file: extents whose bytes are read again, because they are strided,
            averaged, or held by several tensors.
        gaps: ``(file, start, stop)`` of what has to be read beside gathering.
    """

    streamed: Mapping[int, ExtentTable]
    separate: Mapping[int, ExtentTable]
    gaps: tuple[tuple[int, int, int], ...]


def plan_extents(state_map: StateMap, files: Sequence[str]) -> ExtentPlan:
    """Return how to verify the extents of ``state_map`` that hold any of its tensors."""
    spans = _spans(state_map)
    streamed: dict[int, ExtentTable] = {}
    separate: dict[int, ExtentTable] = {}
    gaps: list[tuple[int, int, int]] = []
    for number, file in enumerate(files):
        extents = sorted(state_map.extents.get(file, ()))
        once: list[Check] = []
        again: list[Check] = []
        held = sorted(spans.get(file, ()))
        starts = [span[0] for span in held]
        for extent in extents:
            check = Check(number, extent.offset_bytes, extent.num_bytes, extent.crc32)
            inside = _inside(held, starts, extent)
            if not inside:
                continue
            rest = _gaps(inside, extent)
            if rest is None:
                again.append(check)
                gaps.append((number, extent.offset_bytes, extent.offset_bytes + extent.num_bytes))
            else:
                once.append(check)
                gaps += [(number, low, high) for low, high in rest]
        streamed[number] = _table(once)
        separate[number] = _table(again)
    return ExtentPlan(streamed, separate, tuple(gaps))


def _table(checks: Sequence[Check]) -> ExtentTable:
    return ExtentTable(tuple(check.offset_bytes for check in checks), tuple(checks))


def _spans(state_map: StateMap) -> dict[str, list[tuple[int, int, bool]]]:
    """Return ``(start, stop, is read once)`` of every fragment in a file with extents."""
    spans: dict[str, list[tuple[int, int, bool]]] = {}
    for entry in state_map.entries.values():
        plain = is_plain(entry)
        for fragment in entry.fragments:
            if fragment.file in state_map.extents and not fragment.box.is_empty:
                low = fragment.offset_bytes
                once = plain and fragment.crc32 is None
                spans.setdefault(fragment.file, []).append((low, low + fragment.num_bytes, once))
    return spans


def _inside(
    held: Sequence[tuple[int, int, bool]], starts: Sequence[int], extent: Extent
) -> Sequence[tuple[int, int, bool]]:
    """Return the spans that begin in the extent: a fragment never leaves its record."""
    low = bisect_right(starts, extent.offset_bytes - 1)
    high = bisect_right(starts, extent.offset_bytes + extent.num_bytes - 1)
    return held[low:high]


def _gaps(inside: Iterable[tuple[int, int, bool]], extent: Extent) -> list[tuple[int, int]] | None:
    """Return what the spans leave of the extent; None if they do not read each byte once."""
    gaps: list[tuple[int, int]] = []
    done = extent.offset_bytes
    for low, high, once in inside:
        if not once or low < done:
            return None
        if low > done:
            gaps.append((done, low))
        done = high
    end = extent.offset_bytes + extent.num_bytes
    if done > end:
        return None
    if done < end:
        gaps.append((done, end))
    return gaps


class Notes:
    """Collects the pieces of one work item, neighbours joined."""

    def __init__(self) -> None:
        self._open: dict[Check, tuple[int, int, int]] = {}
        self._closed: list[Piece] = []

    def add(self, check: Check, offset_bytes: int, num_bytes: int, crc32: int) -> None:
        """Note that these bytes of the range were read."""
        held = self._open.get(check)
        if held is not None:
            if held[0] + held[1] == offset_bytes:
                joined = combine(held[2], crc32, num_bytes)
                self._open[check] = (held[0], held[1] + num_bytes, joined)
                return
            self._closed.append(Piece(check, *held))
        self._open[check] = (offset_bytes, num_bytes, crc32)

    def pieces(self) -> list[Piece]:
        """Return every piece, but those of ranges that are complete and right.

        A complete range that is wrong is returned too, for whoever collects them to tell.
        """
        found = [*self._closed, *(Piece(check, *held) for check, held in self._open.items())]
        return [p for p in found if (p.num_bytes, p.crc32) != (p.check.num_bytes, p.check.crc32)]


class Collector:
    """Puts the pieces of all work items together."""

    def __init__(self, state_map: StateMap, files: Sequence[str]) -> None:
        self._state_map = state_map
        self._files = files
        self._pending: dict[Check, list[Piece]] = {}
        self._left_bytes: dict[Check, int] = {}

    def add(self, pieces: Iterable[Piece]) -> None:
        """Take the pieces of one item.

        Raises:
            ChecksumMismatchError: A range is complete and wrong; names file, bytes, tensors.
        """
        for piece in pieces:
            check = piece.check
            self._pending.setdefault(check, []).append(piece)
            left_bytes = self._left_bytes.pop(check, check.num_bytes) - piece.num_bytes
            if left_bytes > 0:
                self._left_bytes[check] = left_bytes
            else:
                self._close(check)

    def _close(self, check: Check) -> None:
        value = 0
        done = check.offset_bytes
        for piece in sorted(self._pending.pop(check), key=lambda p: p.offset_bytes):
            assert piece.offset_bytes == done, f"{check} was not read once: {piece}"
            value = combine(value, piece.crc32, piece.num_bytes)
            done += piece.num_bytes
        if value != check.crc32:
            raise self._mismatch(check)

    def _mismatch(self, check: Check) -> ChecksumMismatchError:
        file = self._files[check.file]
        low, high = check.offset_bytes, check.offset_bytes + check.num_bytes
        keys = [
            str(entry.key)
            for entry in self._state_map.entries.values()
            for fragment in entry.fragments
            if fragment.file == file
            and fragment.offset_bytes < high
            and fragment.offset_bytes + fragment.num_bytes > low
        ]
        more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
        return ChecksumMismatchError(
            f"{keys[0]}{more}: file {file} is damaged in bytes {low} to {high}; "
            "use another checkpoint",
            file=file,
            tensors=tuple(keys),
            start_byte=low,
            stop_byte=high,
        )

    def finish(self) -> None:
        """Check that nothing is left: every range that was begun is complete."""
        assert not self._pending, f"not read whole: {next(iter(self._pending))}"
