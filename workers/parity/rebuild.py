"""Compute parts that no memory holds from a group's parities and remaining parts.

Each node of a group contributes one part of a version, and keeps parities as
``workers.parity.stripes`` arranges them: each of k nodes keeps 1/(k-1) of a part, and any one node
may be lost. With two parities each keeps 2/(k-2), and any two nodes may be lost. A rebuilt part is
read like any other, and the checksums in its own record verify it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from ucp_core.errors import StorageError, UcpError
from ucp_core.manifest import from_bytes
from ucp_core.numerics import crc32
from workers.errors import ParityError
from workers.memory import Part
from workers.parity.code import BLOCK_BYTES, WINDOW_BYTES, P, rebuild
from workers.parity.record import ParityRecord, read_record
from workers.parity.stripes import DataBlock
from workers.protocol import Held, Member

#: With one parity and one lost member, a window need not be whole blocks.
_GRAIN_BYTES: Final = 64

#: Bytes to read at once when verifying a part.
_CHECKED_BYTES: Final = 4 << 20

_P = TypeVar("_P", bound=Part)
_Array = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class _BlockRange:
    """The place of a block of a member or of a parity."""

    part: Part  #: The buffer.
    start: int  #: Start of the block in the buffer's body.
    size_bytes: int  #: Length of the block; a shorter block counts as padded with zeros.

    def read(self, low: int, high: int) -> _Array:
        """Return the bytes ``low`` to ``high`` of the block."""
        data = bytearray(max(0, min(high, self.size_bytes) - low))
        if data:
            self.part.fill(self.start + low, [memoryview(data)])
        return np.frombuffer(data, dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class _Plan:
    """The blocks from which the lost blocks of a stripe are computed."""

    present: Mapping[int, _BlockRange]  #: The remaining blocks by index in the parity.
    missing: Mapping[int, int]  #: The lengths of the lost blocks.
    parities: Mapping[int, _BlockRange]  #: As many parities as blocks are lost.

    @property
    def grain_bytes(self) -> int:
        """Return the unit of windows."""
        return _GRAIN_BYTES if list(self.parities) == [P] else BLOCK_BYTES

    def rebuild(self, index: int, low: int, high: int) -> _Array:
        """Return the bytes ``low`` to ``high``, whole units, of a lost block."""
        targets = {
            each: np.empty(max(0, min(high, size_bytes) - low), np.uint8)
            for each, size_bytes in self.missing.items()
        }
        rebuild(
            {each: where.read(low, high) for each, where in self.present.items()},
            {which: where.read(low, high) for which, where in self.parities.items()},
            list(targets),
            list(targets.values()),
        )
        return targets[index]


class Group:
    """The remaining parities (at least one) and parts of a version of one group.

    Raise ``ParityError`` if a record is damaged, or contradicts another one or a part.
    """

    def __init__(self, parities: Sequence[Part], parts: Sequence[Part]) -> None:
        records = [read_record(parity) for parity in parities]
        self.record = records[0]
        for record in records:
            if replace(record, place=self.record.place) != self.record:
                raise ParityError(
                    f"parities of places {self.record.place} and {record.place} do not cover "
                    "the same parts: take another source",
                    places=[self.record.place, record.place],
                )
        self._parities = {
            record.place: part for record, part in zip(records, parities, strict=True)
        }
        by_rank = {part.held.rank: part for part in parts}
        self._present = {
            place: by_rank[member.rank]
            for place, member in enumerate(self.record.members)
            if member is not None and member.rank in by_rank
        }
        for part in self._present.values():
            self._check(part.held)

    def _check(self, held: Held) -> None:
        expected = [_held(self.record, member) for member in self.record.members if member]
        if replace(held, buffer=0, sequence=0) not in expected:
            raise ParityError(
                f"the part of rank {held.rank} after step {held.step} of attempt "
                f"{held.attempt} is not covered by the parity of (attempt, step) "
                f"{self.record.version[:2]}",
                rank=held.rank,
                step=held.step,
                attempt=held.attempt,
            )

    def lost(self) -> list[ParityPart]:
        """Return the parts that no memory holds; raise ``ParityError`` if there are too many."""
        plans = {stripe: self._plan(stripe) for stripe in range(len(self.record.members))}
        return [
            ParityPart(self.record, place, plans, self._record(place, member))
            for place, member in enumerate(self.record.members)
            if member is not None and place not in self._present
        ]

    def _record(self, place: int, member: Member) -> _BlockRange | None:
        """Return the place of a lost member's record; None if it is computed with the data.

        Every parity of the group has a copy of it. Take the first intact copy.
        """
        if not self.record.with_records:
            return None
        start = self.record.record_start(place)
        found = [_BlockRange(each, start, member.record_bytes) for each in self._parities.values()]
        return next((each for each in found if _is_whole(each)), found[0])

    def _plan(self, stripe: int) -> _Plan:
        size = self.record.stripes.block_bytes
        present: dict[int, _BlockRange] = {}
        missing: dict[int, int] = {}
        for data_block, place in self.record.data_blocks(stripe):
            if place in self._present:
                where = _BlockRange(
                    self._present[place], data_block.start, data_block.stop - data_block.start
                )
                present[data_block.index] = where
            else:
                missing[data_block.index] = data_block.stop - data_block.start
        left = {
            which: _BlockRange(self._parities[place], which * size, size)
            for which, place in enumerate(self.record.stripes.holders(stripe))
            if place in self._parities
        }
        if len(missing) > len(left):
            raise ParityError(
                f"{len(missing)} parts of a group of {len(self.record.members)} are lost and "
                f"{len(left)} parities left: take another source",
                num_missing=len(missing),
                num_parities=len(left),
            )
        # P comes first if it exists, because it is cheaper.
        return _Plan(present, missing, dict(list(left.items())[: len(missing)]))


class ParityPart:
    """A computed part of one rank.

    ``held`` is the lost buffer's header, except for its place.
    """

    def __init__(
        self,
        record: ParityRecord,
        place: int,
        plans: Mapping[int, _Plan],
        own_record: _BlockRange | None,
    ) -> None:
        member = record.members[place]
        assert member is not None, f"place {place} has no part"
        self.held = _held(record, member)
        self._record = own_record
        self._blocks = list(record.stripes.blocks(place, record.lengths[place]))
        self._block_bytes = record.stripes.block_bytes
        self._plans = plans

    def fill(self, offset_bytes: int, targets: Sequence[memoryview]) -> None:
        """Compute from the rest of the group, with one read per member."""
        left = [memoryview(target).cast("B") for target in targets if len(target)]
        end = offset_bytes + sum(map(len, left))
        if end > self.held.data_bytes + self.held.record_bytes:
            raise StorageError(
                f"the part of rank {self.held.rank} ends before byte {end}", rank=self.held.rank
            )
        for data_block in self._blocks:
            start, stop = max(data_block.start, offset_bytes), min(data_block.stop, end)
            for found in self._read(data_block, start - data_block.start, stop - data_block.start):
                left = _pour(found, left)
        if self._record is not None and left:
            data_bytes = self.held.data_bytes
            start = max(offset_bytes, data_bytes) - data_bytes
            _pour(self._record.read(start, end - data_bytes), left)

    def _read(self, data_block: DataBlock, start: int, stop: int) -> Iterator[_Array]:
        """Yield the bytes ``start`` to ``stop`` of a block, in order."""
        plan = self._plans[data_block.stripe]
        grain = plan.grain_bytes
        while start < stop:
            low = start // grain * grain
            high = min(low + WINDOW_BYTES, -(-stop // grain) * grain, self._block_bytes)
            found = plan.rebuild(data_block.index, low, high)[start - low : stop - low]
            yield found
            start += len(found)


def _is_whole(record: _BlockRange) -> bool:
    try:
        from_bytes(record.read(0, record.size_bytes).tobytes(), where="a copy of a record")
    except UcpError:
        return False
    return True


def lost_parts(parities: Sequence[Part], parts: Sequence[Part]) -> list[ParityPart]:
    """Return the parts of a version that no memory holds, from all groups of the parities.

    Raise ``ParityError`` if a record is damaged or contradicts a part, or a group has lost too
    much, and ``StorageError`` if a parity is gone.
    """
    groups: dict[ParityRecord, list[Part]] = {}
    for parity in parities:
        groups.setdefault(replace(read_record(parity), place=0), []).append(parity)
    return [part for group in groups.values() for part in Group(group, parts).lost()]


def damaged(parities: Sequence[_P], members: Sequence[_P]) -> list[_P]:
    """Return the parities or parts of a version that are proven to be damaged.

    Call it after a part was computed wrongly from ``parities`` and ``members``. Parity does not
    show which source is wrong, but every part has checksums. So this reads and verifies the parts,
    and considers a parity damaged if the computation succeeds without it. It reads everything
    several times, and finds nothing if several parities are damaged. Raise ``StorageError`` if a
    source is gone.
    """
    if found := [part for part in members if not is_sound(part)]:
        return found
    for each in parities:
        others = [parity for parity in parities if parity is not each]
        try:
            computed = lost_parts(others, members)
        except ParityError:
            # Without this parity, too few are left.
            continue
        if computed and all(map(is_sound, computed)):
            return [each]
    return []


def is_sound(part: Part) -> bool:
    """Return whether the bytes of a part match the checksums in its record."""
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
    for low in range(0, held.data_bytes, _CHECKED_BYTES):
        chunk = bytearray(min(_CHECKED_BYTES, held.data_bytes - low))
        part.fill(low, [memoryview(chunk)])
        value = crc32(chunk, value)
    return {file.crc32 for file in record.files.values()} == {value}


def _held(record: ParityRecord, member: Member) -> Held:
    return Held(
        buffer=0,
        sequence=0,
        attempt=record.attempt,
        step=record.step,
        rank=member.rank,
        world_size=record.world_size,
        data_bytes=member.data_bytes,
        record_bytes=member.record_bytes,
    )


def _pour(source: _Array, targets: Sequence[memoryview]) -> list[memoryview]:
    """Copy ``source`` into the first of ``targets``; return the unfilled rest."""
    data, left = memoryview(source.data), list(targets)
    while data:
        size = min(len(data), len(left[0]))
        left[0][:size] = data[:size]
        data, left[0] = data[size:], left[0][size:]
        if not len(left[0]):
            left.pop(0)
    return left
