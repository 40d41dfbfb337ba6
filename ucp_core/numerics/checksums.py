"""crc32 of blocks, the unit in which fragments are read and verified.

isal computes the same value as zlib, 8 times as fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

try:
    from isal import isal_zlib as _zlib
except ImportError:  # A platform without isal wheels.
    import zlib as _zlib  # type: ignore[no-redef]

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: crc32 of bytes, continued from a value: ``crc32(data, value=0)``.
crc32: Callable[..., int] = _zlib.crc32
#: Size of the blocks that have checksums of their own. 1 MiB fits the second-level cache, and 1 TB
#: of state lists a million checksums.
BLOCK_BYTES = 1 << 20

#: The crc32 of bytes, and of each of their blocks as a record lists them: "1,2". A plain tuple:
#: hundreds are made for a snapshot, while training needs the interpreter.
Sums = tuple[int, str]
NO_SUMS: Sums = 0, ""

_POLYNOMIAL = 0xEDB88320


def joined(first: Sums, second: Sums, second_bytes: int) -> Sums:
    """Return the checksums of two pieces, the first of which ends with a whole block."""
    return combine(first[0], second[0], second_bytes), f"{first[1]},{second[1]}"


def sums_of(data: memoryview, block_bytes: int) -> Sums:
    """Return the checksums of ``data``; the last block may be shorter."""
    blocks = [crc32(data[low : low + block_bytes]) for low in range(0, len(data), block_bytes)]
    return sums_of_blocks(blocks, len(data), block_bytes)


def sums_of_blocks(blocks: Sequence[int], num_bytes: int, block_bytes: int) -> Sums:
    """Return the checksums of ``num_bytes`` from those of their blocks."""
    return combine_blocks(blocks, num_bytes, block_bytes), ",".join(map(str, blocks))


def combine_slowly(first: int, second: int, second_bytes: int) -> int:
    """Do what ``combine`` does, without isal.

    Mark Adler's method in zlib: moving a crc32 over zero bytes is a linear map over GF(2), whose
    powers are reached by squaring.
    """
    step = [_POLYNOMIAL, *(1 << bit for bit in range(31))]
    bits = 8 * second_bytes
    while bits:
        if bits & 1:
            first = _times(step, first)
        step = [_times(step, column) for column in step]
        bits >>= 1
    return first ^ second


def _times(matrix: list[int], vector: int) -> int:
    total = 0
    for column in matrix:
        if vector & 1:
            total ^= column
        vector >>= 1
    return total


#: The crc32 of two concatenated pieces: ``combine(first, second, second_bytes)``.
combine: Callable[[int, int, int], int] = getattr(_zlib, "crc32_combine", combine_slowly)


def combine_blocks(blocks: Sequence[int], num_bytes: int, block_bytes: int) -> int:
    """Return the crc32 of ``num_bytes`` from those of its blocks; the last may be shorter."""
    value = 0
    for index, block in enumerate(blocks):
        value = combine(value, block, min(block_bytes, num_bytes - index * block_bytes))
    return value
