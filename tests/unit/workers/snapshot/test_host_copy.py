"""Copies that are checksummed on their way: the checksums are of what was to be copied."""

from __future__ import annotations

from typing import Any, cast
from zlib import crc32

import pytest

from workers.snapshot.host_copy import copy_checked

BLOCK_BYTES = 8
SIZES_BYTES = (3, 8, 20, 0)


class _StuckMemory:
    """Memory in which one bit of a byte is always set; only what is copied into it goes wrong."""

    def __init__(self, size_bytes: int, stuck: int) -> None:
        self._bytes = bytearray(size_bytes)
        self._stuck = stuck

    def __len__(self) -> int:
        return len(self._bytes)

    def __getitem__(self, where: slice) -> bytes:
        return bytes(self._bytes[where])

    def __setitem__(self, where: slice, data: memoryview) -> None:
        self._bytes[where] = data
        self._bytes[self._stuck] |= 0x80


def _blocks(data: bytes) -> list[int]:
    cut = [data[low : low + BLOCK_BYTES] for low in range(0, max(len(data), 1), BLOCK_BYTES)]
    return [crc32(block) for block in cut]


def test_every_byte_is_copied_and_every_block_has_its_checksum() -> None:
    """Of tensors below, of, and above the size of a block, and of empty ones."""
    sources = [bytes(range(size)) for size in SIZES_BYTES]
    targets = [bytearray(size) for size in SIZES_BYTES]
    found = copy_checked(
        [memoryview(source) for source in sources],
        [memoryview(target) for target in targets],
        BLOCK_BYTES,
    )
    assert targets == sources
    assert found == [_blocks(source) for source in sources]


@pytest.mark.parametrize("size_bytes", [3, 8, 20])
def test_a_copy_that_goes_wrong_does_not_have_the_checksum_that_is_noted(size_bytes: int) -> None:
    """A checksum of the copy would call whatever got there right, and it would be loaded."""
    source = bytes(range(size_bytes))
    target = _StuckMemory(size_bytes, stuck=size_bytes - 1)
    found = copy_checked([memoryview(source)], [cast("Any", target)], BLOCK_BYTES)
    assert target[:] != source
    assert found == [_blocks(source)]
    assert found != [_blocks(target[:])]
