"""Memory that outlives the trainer that writes it: an arena of three slots per worker.

An arena is an anonymous file (memfd): not limited by the size of /dev/shm, freed with its last
holder, and alive as long as the keeper *or* a trainer holds it, so either may die. A slot takes
one version of one rank: its header page, the data, and the record that makes the data readable.
A slot is valid if its header is whole and not under way; whether its bytes are the bytes that
were written, the checksums in the record tell.

Source: the snapshot processes and double buffers of REFT (arXiv 2310.12670), with a third slot:
while one is written and one is complete, the last complete one of all ranks is left alone.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from zlib import crc32

from workers.errors import ArenaError
from workers.protocol import Held

__all__ = ["NUM_SLOTS", "Arena"]

#: A rank that begins version s + 2 has passed boundary s + 1 together with all others, each of
#: which had finished version s before: with three slots the oldest is never the last complete one.
NUM_SLOTS = 3
PAGE_BYTES = 4096
_MAGIC = b"evstarn1"
#: Magic, sequence, attempt, step, rank, world size, data bytes, record bytes; then their crc32.
_HEADER = struct.Struct("<8sQqqiiqq")
_CRC = struct.Struct("<I")
#: Fault a page in as if it were written (Linux 5.14).
_MADV_POPULATE_WRITE = 23


class Arena:
    """Three slots in one memfd, mapped here. ``create`` makes one, ``adopt`` maps a given one.

    Attributes:
        fd: The memfd; owned by this object.
        body_bytes: What a slot can hold, data and record together.
    """

    def __init__(self, fd: int) -> None:
        size_bytes = os.fstat(fd).st_size
        slot_bytes, rest = divmod(size_bytes, NUM_SLOTS)
        if rest or slot_bytes <= PAGE_BYTES or slot_bytes % PAGE_BYTES:
            raise ArenaError(
                f"a file of {size_bytes} bytes is no arena: {NUM_SLOTS} slots of whole pages are",
                size_bytes=size_bytes,
            )
        self.fd = fd
        self.body_bytes = slot_bytes - PAGE_BYTES
        self._slot_bytes = slot_bytes
        self._map = mmap.mmap(fd, size_bytes)
        self._memory = memoryview(self._map)

    @classmethod
    def create(cls, name: str, *, body_bytes: int) -> Arena:
        """Return a new, empty arena whose slots hold ``body_bytes``; its memory is claimed now.

        First touch costs ten times a copy, so it is not left to the first snapshot.

        Raises:
            ArenaError: The machine has not that much memory.
        """
        fd = os.memfd_create(f"everstep-{name}", os.MFD_CLOEXEC)
        pages = -(-body_bytes // PAGE_BYTES) + 1
        try:
            os.ftruncate(fd, NUM_SLOTS * pages * PAGE_BYTES)
            arena = cls(fd)
            arena.populate()
        except OSError as error:
            os.close(fd)
            raise ArenaError(
                f"{NUM_SLOTS} snapshots of {body_bytes} bytes for {name} do not fit into memory: "
                f"{error}; lower the snapshot budget or take larger nodes",
                body_bytes=body_bytes,
            ) from error
        return arena

    def populate(self) -> None:
        """Fault every page in, in this process; a file that is populated already costs little."""
        self._map.madvise(_MADV_POPULATE_WRITE)

    def close(self) -> None:
        """Let go of the memory; it stays mapped for as long as there are views of it."""
        with contextlib.suppress(BufferError):
            self._memory.release()
            self._map.close()
        os.close(self.fd)

    def body(self, slot: int) -> memoryview:
        """Return the slot's memory behind its header, writable."""
        start = self.body_offset(slot)
        return self._memory[start : start + self.body_bytes]

    def body_offset(self, slot: int) -> int:
        """Return where the slot's body begins in the file."""
        assert 0 <= slot < NUM_SLOTS, f"slot {slot} of {NUM_SLOTS}"
        return slot * self._slot_bytes + PAGE_BYTES

    def begin(self, slot: int, *, attempt: int, step: int, rank: int, world_size: int) -> None:
        """Mark the slot as being written; what it held is gone."""
        sequence = self._sequence(slot) // 2 * 2 + 1
        self._write(slot, sequence, attempt, step, rank, world_size, 0, 0)

    def finish(self, slot: int, *, data_bytes: int, record_bytes: int) -> None:
        """Mark the slot, which was begun, as complete."""
        header = self._read(slot)
        assert header is not None, f"slot {slot} was not begun"
        assert data_bytes + record_bytes <= self.body_bytes, "more than the slot holds"
        sequence, attempt, step, rank, world_size, _, _ = header
        assert sequence % 2, f"slot {slot} is complete already"
        self._write(slot, sequence + 1, attempt, step, rank, world_size, data_bytes, record_bytes)

    def held(self, slot: int) -> Held | None:
        """Return what the slot holds; None if it is empty, under way or damaged."""
        header = self._read(slot)
        if header is None:
            return None
        sequence, attempt, step, rank, world_size, data_bytes, record_bytes = header
        if sequence % 2 or data_bytes + record_bytes > self.body_bytes:
            return None
        return Held(
            slot=slot,
            sequence=sequence,
            attempt=attempt,
            step=step,
            rank=rank,
            world_size=world_size,
            data_bytes=data_bytes,
            record_bytes=record_bytes,
        )

    def versions(self) -> list[Held]:
        """Return what all slots hold, oldest first."""
        held = [found for slot in range(NUM_SLOTS) if (found := self.held(slot)) is not None]
        return sorted(held, key=lambda found: (found.attempt, found.step))

    def oldest(self) -> int:
        """Return the slot to write next: one that holds nothing, else the oldest version's."""
        held = self.versions()
        busy = {found.slot for found in held}
        return next((s for s in range(NUM_SLOTS) if s not in busy), held[0].slot if held else 0)

    def _sequence(self, slot: int) -> int:
        header = self._read(slot)
        return header[0] if header is not None else 0

    def _read(self, slot: int) -> tuple[int, int, int, int, int, int, int] | None:
        start = slot * self._slot_bytes
        page = bytes(self._memory[start : start + _HEADER.size + _CRC.size])
        packed = page[: _HEADER.size]
        if packed[:8] != _MAGIC or _CRC.unpack(page[_HEADER.size :]) != (crc32(packed),):
            return None
        _, *fields = _HEADER.unpack(packed)
        sequence, attempt, step, rank, world_size, data_bytes, record_bytes = fields
        return sequence, attempt, step, rank, world_size, data_bytes, record_bytes

    def _write(self, slot: int, *fields: int) -> None:
        packed = _HEADER.pack(_MAGIC, *fields)
        start = slot * self._slot_bytes
        # One store: a reader that meets half of it finds a wrong crc32, which is no version.
        self._memory[start : start + _HEADER.size + _CRC.size] = packed + _CRC.pack(crc32(packed))
