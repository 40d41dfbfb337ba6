"""Checksums of blocks, and of what they make together."""

import random
import zlib

import pytest

from ucp_core.numerics import combine, combine_blocks, crc32
from ucp_core.numerics.checksums import combine_slowly


def test_isal_and_zlib_give_the_same_value() -> None:
    """A checkpoint written with one must be readable with the other."""
    data = random.Random(1).randbytes(100_003)

    assert crc32(data) == zlib.crc32(data)
    assert crc32(data[7:], crc32(data[:7])) == zlib.crc32(data)


@pytest.mark.parametrize("length", [0, 1, 2, 3, 255, 4096, 1 << 20])
def test_checksums_of_parts_make_that_of_the_whole(length: int) -> None:
    """By isal's combine and by ours, which stands in for it."""
    one, two = b"any first part", random.Random(length).randbytes(length)
    whole = zlib.crc32(one + two)

    assert combine(zlib.crc32(one), zlib.crc32(two), length) == whole
    assert combine_slowly(zlib.crc32(one), zlib.crc32(two), length) == whole


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 16, 20])
def test_blocks_put_together_are_the_whole(length: int) -> None:
    """The last block is shorter, or empty, or as long as the others."""
    data = random.Random(length).randbytes(length)
    blocks = tuple(zlib.crc32(data[low : low + 8]) for low in range(0, max(length, 1), 8))

    assert combine_blocks(blocks, length, 8) == zlib.crc32(data)
