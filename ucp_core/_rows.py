"""Copies whose elements lie in runs far apart: read run by run, each to where it belongs. Pure.

What lies between is not read, and nothing passes through other memory. Only for bytes that have no
checksums of their own: those are of whole blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ucp_core.boxes import span
from ucp_core.statemap import DTYPE_BYTES
from ucp_core.storage.base import ReadRange

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucp_core.plan import Copy, Part
    from ucp_core.storage.base import Store

#: Between runs of bytes that are cheaper read one by one. From the page cache a read costs 1.0 us
#: and 0.12 us for each KiB, whether the bytes are wanted or not: together and one by one take the
#: same time with gaps of 8 KiB, 1.2 times with 12, 1.3 with 16, 2.4 with 48 (EPYC, ext4).
_RUN_GAP_BYTES_MIN = 12 << 10
#: The largest request of a store whose reads do not go over a network.
_NEAR_REQUEST_BYTES_MAX = 4 << 20
#: Runs that are handed to a store at once: opening the file costs as much as five of them.
_RUNS_MAX = 1024


def run_gap_bytes_min(store: Store) -> int:
    """Return how far apart runs of bytes must be to be cheaper read one by one."""
    is_near = store.request_bytes <= _NEAR_REQUEST_BYTES_MAX
    return _RUN_GAP_BYTES_MIN if is_near else store.request_bytes


class _Dim(NamedTuple):
    """A dim along which runs follow one another: strides in bytes, in the file and in memory."""

    extent: int
    source: int
    target: int


class Rows(NamedTuple):
    """The runs of one copy.

    Attributes:
        copy: Of which all bytes are taken.
        run_bytes: Bytes that lie side by side in the file and in memory.
        dims: How the runs follow one another, the outermost first.
        target_byte: Where the first one goes, counted from the start of the part.
    """

    copy: Copy
    run_bytes: int
    dims: tuple[_Dim, ...]
    target_byte: int

    def ranges(self, target: memoryview) -> Iterator[list[ReadRange]]:
        """Yield what to read into the part's memory, in the order of the dims."""
        first = self.copy.fragment.offset_bytes + self.copy.start_byte
        sources, targets = np.array([first]), np.array([self.target_byte])
        for dim in self.dims:
            steps = np.arange(dim.extent)
            sources = (sources[:, None] + steps * dim.source).ravel()
            targets = (targets[:, None] + steps * dim.target).ravel()
        size = self.run_bytes
        for low in range(0, len(sources), _RUNS_MAX):
            places = zip(
                sources[low : low + _RUNS_MAX].tolist(),
                targets[low : low + _RUNS_MAX].tolist(),
                strict=True,
            )
            yield [ReadRange(start, (target[place : place + size],)) for start, place in places]


def rows_of(copy: Copy, part: Part, gap_bytes_min: int) -> Rows | None:
    """Return the runs of a copy, or None if they are better read together.

    Args:
        copy: From a file that is read, to ``part``.
        part: What is needed.
        gap_bytes_min: Between runs; what lies closer together is better read together.
    """
    if copy.target_byte >= 0 or copy.fragment.crc32 is not None:
        return None
    run_bytes = itemsize = DTYPE_BYTES[part.dtype]
    strides = copy.fragment.byte_strides(itemsize)
    dims: list[_Dim] = []
    inner = itemsize
    for dim in reversed(range(len(copy.box.shape))):
        extent = copy.box.shape[dim]
        if not dims and strides[dim] == inner == run_bytes:
            run_bytes *= extent
        elif extent > 1:
            dims.append(_Dim(extent, strides[dim], inner))
        inner *= part.box.shape[dim]
    if not dims or min(dim.source for dim in dims) - run_bytes < gap_bytes_min:
        return None
    low, _ = span(copy.box, part.box)
    return Rows(copy, run_bytes, tuple(reversed(dims)), low * itemsize)
