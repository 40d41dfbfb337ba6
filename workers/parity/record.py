"""Read and write the record after a buffer's parities: the parts that they cover, and the blocks.

Parities that a keeper computes cover data and records of the members. A rank that computes a parity
from its own replica knows the other members' data, but not their records: it writes a draft, and
the keeper adds the whole records between the parity and its record.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final
from zlib import crc32

from workers.errors import ParityError
from workers.memory import Part
from workers.parity.stripes import DataBlock, Stripes
from workers.protocol import Covered, Member

_CRC_BYTES: Final = 4
#: Bytes of a record for each member, and for the rest.
_MEMBER_RECORD_BYTES: Final = 128
_RECORD_BYTES: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityRecord(Covered):
    """The parts that a node's parities cover."""

    attempt: int
    step: int
    world_size: int
    #: Whether the parities cover only data, and the members' records follow by place. In a draft
    #: the records have 0 bytes.
    with_records: bool = False

    @property
    def is_draft(self) -> bool:
        """Return whether the members' records are missing."""
        return self.with_records and any(
            member is not None and not member.record_bytes for member in self.members
        )

    @property
    def lengths(self) -> list[int]:
        """Return the number of covered bytes of each member."""
        if self.with_records:
            return [member.data_bytes if member is not None else 0 for member in self.members]
        return [member.size_bytes if member is not None else 0 for member in self.members]

    @property
    def parities_bytes(self) -> int:
        """Return the size of all parities that a node keeps."""
        return self.tolerance * self.stripes.block_bytes

    def record_start(self, place: int) -> int:
        """Return the offset of a member's record in a buffer with records."""
        before = self.members[:place]
        return self.parities_bytes + sum(each.record_bytes for each in before if each is not None)

    @property
    def stripes(self) -> Stripes:
        """Return the division of the parts into blocks."""
        return Stripes.of_parts(self.lengths, tolerance=self.tolerance)

    def data_blocks(self, stripe: int) -> Iterator[tuple[DataBlock, int]]:
        """Yield the non-empty data blocks of a stripe, and the places of their members."""
        for place, length in enumerate(self.lengths):
            for data_block in self.stripes.blocks(place, length):
                if data_block.stripe == stripe:
                    yield data_block, place

    @property
    def version(self) -> tuple[int, int, int]:
        """Return attempt, step and world size."""
        return self.attempt, self.step, self.world_size

    def to_bytes(self, size_bytes: int = 0) -> bytes:
        """Return the record as written after the parities, at least ``size_bytes`` long."""
        text = json.dumps(asdict(self)).encode().ljust(size_bytes - _CRC_BYTES)
        return text + crc32(text).to_bytes(_CRC_BYTES, "little")

    @classmethod
    def from_bytes(cls, data: bytes) -> ParityRecord:
        """Return the record in ``data``; raise ``ParityError`` if it is damaged."""
        text, value = data[:-_CRC_BYTES], data[-_CRC_BYTES:]
        if crc32(text) != int.from_bytes(value, "little"):
            raise ParityError("the record of a parity is damaged: take another source")
        fields: dict[str, Any] = json.loads(text)
        members = (None if each is None else Member(**each) for each in fields.pop("members"))
        return cls(members=tuple(members), **fields)


def buffer_bytes(lengths: Sequence[int], *, tolerance: int) -> int:
    """Return the bytes that a buffer needs for a node's parities of such parts and their record."""
    stripes = Stripes.of_parts(lengths, tolerance=tolerance)
    return tolerance * stripes.block_bytes + _record_bytes_max(len(lengths))


def write_draft(record: ParityRecord, body: memoryview) -> tuple[int, int]:
    """Write a draft at the end of a buffer with room for all members' records.

    Return data bytes and record bytes, for finishing the buffer.
    """
    record_bytes = _record_bytes_max(len(record.members))
    data_bytes = len(body) - record_bytes
    body[data_bytes:] = record.to_bytes(record_bytes)
    return data_bytes, record_bytes


def complete_draft(made: Part, parts: Mapping[int, Part], body: memoryview) -> None:
    """Add the records of all members, by place, to a parity that was computed from a replica.

    It does nothing if they are there. No other process writes to the buffer until it is begun
    again, and then this version no longer counts.

    Raise ``ParityError`` if the parity's members differ or it has no room for their records, and
    ``StorageError`` if a part or the buffer was overwritten.
    """
    draft, held = _read(made), made.held
    if not draft.is_draft:
        return
    expected = {at: (each.rank, each.data_bytes) for at, each in enumerate(draft.members) if each}
    if {at: (part.held.rank, part.held.data_bytes) for at, part in parts.items()} != expected:
        raise ParityError(f"it covers (rank, data_bytes) {expected}, not the parts that are held")
    sizes = {at: part.held.record_bytes for at, part in parts.items()}
    record = replace(
        draft,
        members=tuple(
            each and replace(each, record_bytes=sizes[at]) for at, each in enumerate(draft.members)
        ),
    )
    if record.record_start(len(record.members)) > held.data_bytes:
        raise ParityError(
            f"{sum(sizes.values())} bytes of records do not fit into the "
            f"{held.data_bytes - record.parities_bytes} after it",
            size_bytes=sum(sizes.values()),
        )
    for at, part in parts.items():
        start = record.record_start(at)
        part.fill(part.held.data_bytes, [body[start : start + sizes[at]]])
    # This comes last: without the record the parity does not count.
    body[held.data_bytes : held.data_bytes + held.record_bytes] = record.to_bytes(held.record_bytes)


def _record_bytes_max(num_members: int) -> int:
    return _RECORD_BYTES + num_members * _MEMBER_RECORD_BYTES


def read_record(parity: Part) -> ParityRecord:
    """Return the record of the parities in a buffer.

    Raise ``ParityError`` if the record is damaged, a draft, or from another version than the
    buffer, and ``StorageError`` if the buffer was overwritten.
    """
    record = _read(parity)
    if record.is_draft:
        raise ParityError("a parity waits for the records of its members: take another source")
    return record


def _read(parity: Part) -> ParityRecord:
    data = bytearray(parity.held.record_bytes)
    parity.fill(parity.held.data_bytes, [memoryview(data)])
    record = ParityRecord.from_bytes(bytes(data))
    if record.version[:2] != (parity.held.attempt, parity.held.step):
        raise ParityError(
            f"a parity of (attempt, step) {record.version[:2]} is in a buffer that says "
            f"{(parity.held.attempt, parity.held.step)}: take another source"
        )
    return record
