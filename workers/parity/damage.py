"""Whose bytes are wrong when a part that was computed from parities is not what was written.

A parity by itself tells nothing about which member is wrong, but every part has checksums of its
own: a member is read and compared, and a parity is found out by doing without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar

from ucp_core.errors import UcpError
from ucp_core.manifest import from_bytes
from ucp_core.numerics import crc32
from workers.errors import ParityError
from workers.memory import Part
from workers.parity.rebuild import lost_parts

__all__ = ["damaged", "is_sound"]

#: Read of a part at a time.
_CHUNK_BYTES: Final = 4 << 20

_P = TypeVar("_P", bound=Part)


def damaged(parities: Sequence[_P], members: Sequence[_P]) -> list[_P]:
    """Return those of a version's parities or parts that are proven to be damaged.

    Reads all of them, several times. The result is empty if more than one parity is damaged.

    Args:
        parities: Those that parts were computed from.
        members: The parts that they were computed with.

    Raises:
        StorageError: Something cannot be read any more.
    """
    if found := [part for part in members if not is_sound(part)]:
        return found
    for each in parities:
        others = [parity for parity in parities if parity is not each]
        try:
            computed = lost_parts(others, members)
        except ParityError:
            # It cannot be done without.
            continue
        if computed and all(map(is_sound, computed)):
            return [each]
    return []


def is_sound(part: Part) -> bool:
    """Return whether the bytes of a part have the checksums that its record says.

    Raises:
        StorageError: The part is not there any more.
    """
    held = part.held
    packed = bytearray(held.record_bytes)
    part.fill(held.data_bytes, [memoryview(packed)])
    try:
        record = from_bytes(bytes(packed), where=f"the record of rank {held.rank}")
    except UcpError:
        return False
    if {file.num_bytes for file in record.files.values()} != {held.data_bytes}:
        return False
    value = 0
    for low in range(0, held.data_bytes, _CHUNK_BYTES):
        chunk = bytearray(min(_CHUNK_BYTES, held.data_bytes - low))
        part.fill(low, [memoryview(chunk)])
        value = crc32(chunk, value)
    return {file.crc32 for file in record.files.values()} == {value}
