"""crc32 of two pieces side by side, where isal, which does it in C, is not there.

After Mark Adler's method in zlib: moving a crc32 over zero bytes is a linear map over GF(2),
so its powers are reached by squaring.
"""

from __future__ import annotations

_POLYNOMIAL = 0xEDB88320


def crc32_combine(crc1: int, crc2: int, crc2_length: int) -> int:
    """Return the crc32 of both pieces; ``crc2_length`` is the length of the second in bytes."""
    return _shifted(crc1, crc2_length) ^ crc2


def _shifted(value: int, num_bytes: int) -> int:
    """Return crc32 ``value`` moved over ``num_bytes`` zero bytes: powers of the one-bit step."""
    step = [_POLYNOMIAL, *(1 << bit for bit in range(31))]
    bits = 8 * num_bytes
    while bits:
        if bits & 1:
            value = _times(step, value)
        step = [_times(step, column) for column in step]
        bits >>= 1
    return value


def _times(matrix: list[int], vector: int) -> int:
    total = 0
    for column in matrix:
        if vector & 1:
            total ^= column
        vector >>= 1
    return total
