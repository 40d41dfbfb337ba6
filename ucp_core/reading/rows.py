"""Copies whose elements lie in runs far apart: read run by run, each to where it belongs. Pure.

What lies between is not read, and nothing passes through other memory. Only for bytes that have no
checksums of their own: those are of whole blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from ucp_core.geometry import DTYPE_BYTES, span

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucp_core.geometry import Box, Fragment
    from ucp_core.reading.planning import Copy, Part

#: What a store takes as a ``ReadRange``; plans know no stores.
_Read: TypeAlias = tuple[int, tuple[memoryview, ...]]
#: Runs that are handed to a store at once: opening the file costs as much as five of them.
_RUNS_MAX = 1024


class _Dim(NamedTuple):
    """A dim along which runs follow one another: strides in bytes, in the file and in memory."""

    extent: int
    source: int
    target: int


class Rows(NamedTuple):
    """The runs that the elements of a box make up in a fragment and in a part.

    Attributes:
        run_bytes: Bytes that lie side by side in both.
        dims: How the runs follow one another, the outermost first.
    """

    run_bytes: int
    dims: tuple[_Dim, ...]

    @property
    def gap_bytes(self) -> int:
        """Return how far apart neighbours in the file are; less than nothing if they interleave."""
        return min((dim.source for dim in self.dims), default=self.run_bytes) - self.run_bytes

    def runs(self, source_byte: int, target_byte: int, target: memoryview) -> Iterator[list[_Read]]:
        """Yield what to read from where in the file, in the order of the dims.

        Args:
            source_byte: Where the first run is in the file.
            target_byte: Where it goes in the part.
            target: The part's memory.
        """
        starts, places = [source_byte], [target_byte]
        for dim in self.dims:
            starts = [low + i * dim.source for low in starts for i in range(dim.extent)]
            places = [low + i * dim.target for low in places for i in range(dim.extent)]
        size = self.run_bytes
        for low in range(0, len(places), _RUNS_MAX):
            some = slice(low, low + _RUNS_MAX)
            pairs = zip(starts[some], places[some], strict=True)
            yield [(start, (target[place : place + size],)) for start, place in pairs]


def rows_of(fragment: Fragment, box: Box, part: Part) -> Rows:
    """Return the runs of ``box``, which both the fragment and the part hold."""
    run_bytes = inner = DTYPE_BYTES[part.dtype]
    strides = fragment.byte_strides(inner)
    dims: list[_Dim] = []
    for dim in reversed(range(len(box.shape))):
        extent = box.shape[dim]
        if not dims and strides[dim] == inner == run_bytes:
            run_bytes *= extent
        elif extent > 1:
            dims.append(_Dim(extent, strides[dim], inner))
        inner *= part.box.shape[dim]
    return Rows(run_bytes, tuple(reversed(dims)))


def runs_of(copy: Copy, part: Part, target: memoryview) -> Iterator[list[_Read]]:
    """Yield from where in the file to read what, for a copy whose runs are read one by one."""
    low, _ = span(copy.box, part.box)
    rows = rows_of(copy.fragment, copy.box, part)
    source_byte = copy.fragment.offset_bytes + copy.start_byte
    return rows.runs(source_byte, low * DTYPE_BYTES[part.dtype], target)
