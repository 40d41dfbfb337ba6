"""Memory that outlives the trainer that writes it: an arena of three slots per worker.

An arena is an anonymous file (memfd): not limited by the size of /dev/shm, freed with its last
holder, and alive as long as the keeper *or* a trainer holds it, so either may die. A slot takes
one version of one rank: its header page, the data, and the record that makes the data readable.
A slot is valid if its header is whole and not under way; whether its bytes are the bytes that
were written, the checksums in the record tell.

The first header page also carries a few words between the trainer and its keeper, each with one
writer and stored at once: which slot is pinned because it is on its way to storage, whether a
peer copies this arena, what it has got, what is kept for it, and which slots were found damaged.

Source: the snapshot processes and double buffers of REFT (arXiv 2310.12670), with a third slot:
while one is written and one is complete, the last complete one of all ranks is left alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import struct
import time
from collections.abc import Sequence
from typing import Final
from zlib import crc32

from workers.errors import ArenaError
from workers.memory.retention import choose_slot
from workers.protocol import Held

__all__ = ["NUM_SLOTS", "Arena"]

#: One is written, one is the newest that counts, and one may be pinned.
NUM_SLOTS: Final = 3
PAGE_BYTES: Final = 4096
_MAGIC = b"evstarn1"
#: Magic, sequence, attempt, step, rank, world size, data bytes, record bytes; then their crc32.
_HEADER = struct.Struct("<8sQqqiiqq")
_CRC = struct.Struct("<I")
_EMPTY: Held | None = None
#: Fault a page in as if it were written (Linux 5.14). The call keeps all other threads of the
#: process from running, so it is made in pieces of a few milliseconds.
_MADV_POPULATE_WRITE: Final = 23
_POPULATE_BYTES: Final = 16 << 20
#: Make a huge page of this range now, whatever the machine's settings for shared memory are, which
#: usually forbid them (Linux 6.1). With pages of 4 KiB an arena that a process did not touch before
#: is read at a quarter of the speed, and one that it did is written at three quarters.
_MADV_COLLAPSE: Final = 25
_HUGE_BYTES: Final = 2 << 20
_MAP_FIXED: Final = 0x10
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip

#: Where the words between trainer and keeper begin, and which is which.
_WORDS_AT: Final = 2048
_NUM_WORDS: Final = 9
#: Trainer: number of the pin, then slot + 1 in the lowest byte. Keeper: the pin that it released.
_PIN, _RELEASED = 0, 1
#: Keeper: until when a peer copies this arena, by the machine's monotonic clock in ns; sequence
#: and slot of what it has got.
_FOLLOWED, _COPIED = 2, 3
#: For so long it counts: a keeper that was killed or stopped must not hold the trainers' snapshots
#: back. The wire says it four times a second.
_FOLLOWED_NS: Final = 2 * 10**9
#: Trainer: how many slots were finished.
_FINISHED: Final = 4
#: Keeper, one per slot: the sequence of a version whose bytes were found damaged.
_DAMAGED: Final = 5
#: Trainer: sequence and slot of the version that ranks and peers all have.
_KEPT: Final = 8


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
        self._map, self._map_start = _mapped(fd, size_bytes)
        self._memory = memoryview(self._map)[self._map_start : self._map_start + size_bytes]
        self._words = self._memory[_WORDS_AT : _WORDS_AT + 8 * _NUM_WORDS].cast("Q")
        header_bytes = _HEADER.size + _CRC.size
        starts = [slot * slot_bytes for slot in range(NUM_SLOTS)]
        self._headers = [self._memory[start : start + header_bytes] for start in starts]
        #: What the header of each slot said when it was read last, and its bytes: a keeper reads
        #: hundreds a step, and to take one apart costs ten times as much as to compare it.
        self._seen = [(bytes(header_bytes), _EMPTY)] * NUM_SLOTS

    @classmethod
    def create(cls, name: str, *, body_bytes: int) -> Arena:
        """Return a new, empty arena whose slots hold ``body_bytes``; its memory is claimed now.

        First touch costs ten times a copy, so it is not left to the first snapshot.

        Raises:
            ArenaError: The machine has not that much memory.
        """
        pages = max(-(-body_bytes // PAGE_BYTES), 1) + 1
        fd = -1
        try:
            fd = os.memfd_create(f"everstep-{name}", os.MFD_CLOEXEC)
            os.ftruncate(fd, NUM_SLOTS * pages * PAGE_BYTES)
            arena = cls(fd)
            arena._make_huge()
            arena.populate()
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise ArenaError(
                f"{NUM_SLOTS} snapshots of {body_bytes} bytes for {name} do not fit into memory: "
                f"{error}; lower the snapshot budget or take larger nodes",
                body_bytes=body_bytes,
            ) from error
        return arena

    def populate(self) -> None:
        """Fault every page in, in this process; a file that is populated already costs little."""
        for start in range(0, len(self._memory), _POPULATE_BYTES):
            size_bytes = min(_POPULATE_BYTES, len(self._memory) - start)
            self._map.madvise(_MADV_POPULATE_WRITE, self._map_start + start, size_bytes)

    def _make_huge(self) -> None:
        """Have huge pages wherever a whole one fits, if the machine has them to give."""
        for start in range(0, len(self._memory) - _HUGE_BYTES + 1, _HUGE_BYTES):
            # There has to be something that is made one page.
            self._memory[start] = 0
            try:
                self._map.madvise(_MADV_COLLAPSE, self._map_start + start, _HUGE_BYTES)
            except OSError:
                return

    @property
    def size_bytes(self) -> int:
        """Return how much memory the arena takes."""
        return NUM_SLOTS * self._slot_bytes

    def close(self) -> None:
        """Let go of the memory; it stays mapped for as long as there are views of it."""
        with contextlib.suppress(BufferError):
            self._words.release()
            for header in self._headers:
                header.release()
            self._memory.release()
            self._map.close()
        fd, self.fd = self.fd, -1
        if fd >= 0:
            # Closed twice, its number could be somebody else's by then.
            os.close(fd)

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
        begun = self._read(slot)
        assert begun is not None, f"slot {slot} was not begun"
        assert data_bytes + record_bytes <= self.body_bytes, "more than the slot holds"
        assert begun.sequence % 2, f"slot {slot} is complete already"
        about = begun.attempt, begun.step, begun.rank, begun.world_size
        self._write(slot, begun.sequence + 1, *about, data_bytes, record_bytes)
        self._words[_FINISHED] += 1

    @property
    def finished(self) -> int:
        """Return how many times a slot was finished."""
        return self._words[_FINISHED]

    def held(self, slot: int) -> Held | None:
        """Return what the slot holds; None if it is empty, under way, damaged, or let go of."""
        try:
            held = self._read(slot)
            damaged = self._words[_DAMAGED + slot]
        except ValueError:
            # Another thread closed the arena.
            return None
        if held is None or held.sequence % 2 or held.sequence == damaged:
            return None
        return held if held.data_bytes + held.record_bytes <= self.body_bytes else None

    def versions(self) -> list[Held]:
        """Return what all slots hold, oldest first."""
        held = [found for slot in range(NUM_SLOTS) if (found := self.held(slot)) is not None]
        return sorted(held, key=lambda found: (found.attempt, found.step))

    def newest(self) -> Held | None:
        """Return the newest complete version."""
        return next(reversed(self.versions()), None)

    def choose(
        self, lineage: Sequence[tuple[int, int]], *, kept: tuple[int, int] | None = None
    ) -> int:
        """Return the slot to write next; see ``workers.memory.retention.choose_slot``.

        Only the writer asks, and only when every rank has finished its newest version.
        """
        slots = [self.held(slot) for slot in range(NUM_SLOTS)]
        return choose_slot(slots, pinned=self.pinned(), lineage=lineage, kept=kept)

    def pin(self, slot: int) -> None:
        """Have the slot stay as it is until the keeper has stored it; the trainer calls it."""
        assert 0 <= slot < NUM_SLOTS, f"slot {slot} of {NUM_SLOTS}"
        self._words[_PIN] = ((self._words[_PIN] >> 8) + 1) << 8 | (slot + 1)

    def pinned(self) -> int | None:
        """Return the slot that is on its way to storage, complete or not."""
        try:
            pin, released = self._words[_PIN], self._words[_RELEASED]
        except ValueError:
            return None
        return None if pin == released else (pin & 0xFF) - 1

    def unpin(self, slot: int) -> None:
        """Let the slot be written over again; the keeper calls it."""
        pin = self._words[_PIN]
        if (pin & 0xFF) == slot + 1:
            self._words[_RELEASED] = pin

    def set_followed(self, flag: bool) -> None:  # noqa: FBT001  a state that is passed on
        """Say whether a peer copies this arena; the keeper calls it again all the time."""
        self._words[_FOLLOWED] = time.monotonic_ns() + _FOLLOWED_NS if flag else 0

    def is_followed(self) -> bool:
        """Return whether a peer copies this arena."""
        return time.monotonic_ns() < self._words[_FOLLOWED]

    def note_copied(self, held: Held) -> None:
        """Say what the peer has got; the keeper calls it."""
        self._words[_COPIED] = _copied_word(held)

    def copy_behind(self) -> bool:
        """Return whether the peer, if there is one, has not yet got the newest version."""
        return self.is_followed() and not self.is_copied()

    def is_copied(self) -> bool:
        """Return whether the newest version is what peers have got, be they still there or not."""
        newest = self.newest()
        return newest is None or self._words[_COPIED] == _copied_word(newest)

    def keep(self, kept: tuple[int, int] | None) -> None:
        """Say which version ranks and peers all have; the trainer calls it before it writes."""
        found = [held for held in self.versions() if (held.attempt, held.step) == kept]
        self._words[_KEPT] = _copied_word(found[0]) if found else 0

    def kept(self) -> tuple[int, int] | None:
        """Return attempt and step of what copies are to be kept of, if it is held here."""
        try:
            word = self._words[_KEPT]
        except ValueError:
            return None
        found = (held for held in self.versions() if _copied_word(held) == word)
        return next(((held.attempt, held.step) for held in found), None)

    def quarantine(self, held: Held) -> None:
        """Have a version whose bytes are damaged held no longer; the keeper calls it."""
        self._words[_DAMAGED + held.slot] = held.sequence

    def _sequence(self, slot: int) -> int:
        held = self._read(slot)
        return held.sequence if held is not None else 0

    def _read(self, slot: int) -> Held | None:
        """Return what the header says, of a slot that is under way too; None if it is not whole."""
        header = bytes(self._headers[slot])
        seen, held = self._seen[slot]
        if header != seen:
            held = _unpacked(header, slot)
            self._seen[slot] = header, held
        return held

    def _write(self, slot: int, *fields: int) -> None:
        packed = _HEADER.pack(_MAGIC, *fields)
        start = slot * self._slot_bytes
        # One store: a reader that meets half of it finds a wrong crc32, which is no version.
        self._memory[start : start + _HEADER.size + _CRC.size] = packed + _CRC.pack(crc32(packed))


def _mapped(fd: int, size_bytes: int) -> tuple[mmap.mmap, int]:
    """Map a file, in memory that begins at a huge page; return the mapping, and where in it.

    Python leaves the place to the kernel, which cares for that only where its settings allow huge
    pages by themselves. So a larger piece of empty address space is taken first, and given back
    whole.
    """
    space = mmap.mmap(-1, size_bytes + _HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(space))
    start = -address % _HUGE_BYTES
    access = mmap.PROT_READ | mmap.PROT_WRITE
    flags = mmap.MAP_SHARED | _MAP_FIXED
    if _LIBC.mmap(address + start, size_bytes, access, flags, fd, 0) != address + start:
        space.close()
        raise OSError(ctypes.get_errno(), "a memory file cannot be mapped")
    return space, start


def _unpacked(header: bytes, slot: int) -> Held | None:
    packed = header[: _HEADER.size]
    if packed[:8] != _MAGIC or _CRC.unpack(header[_HEADER.size :]) != (crc32(packed),):
        return None
    _, sequence, attempt, step, rank, world_size, data_bytes, record_bytes = _HEADER.unpack(packed)
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


def _copied_word(held: Held) -> int:
    return held.sequence << 2 | held.slot
