"""Define the arena: memory of three buffers that outlives the trainer that writes it.

It is an anonymous file (memfd), so the size of /dev/shm does not limit it. It lives as long as the
keeper *or* a trainer holds it. A buffer takes one version of one rank: a header page, the data, and
the record that makes the data readable. It is valid if its header is intact and says "complete";
the checksums in the record verify the data.

The first header page also has a few words between trainer and keeper, each with one writer and
stored atomically: the pinned buffer, whether peers follow this arena, the version that they have
copied, the version to keep, and the damaged buffers.

Source: the snapshot processes and double buffers of REFT (arXiv 2310.12670). The third buffer keeps
the last version that all ranks completed, while one buffer is written and one holds a newer
version.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Final
from zlib import crc32

from workers.errors import ArenaError
from workers.memory.retention import choose_buffer
from workers.protocol import Held

#: One buffer is being written, one holds the newest version that counts, and one may be pinned.
NUM_BUFFERS: Final = 3
PAGE_BYTES: Final = 4096
_MAGIC = b"evstarn1"
#: Magic, sequence, attempt, step, rank, world size, data bytes, record bytes; then their crc32.
_HEADER = struct.Struct("<8sQqqiiqq")
_CRC = struct.Struct("<I")
_EMPTY: Held | None = None
#: Fault pages in for writing (Linux 5.14). The call blocks all other threads, so each call takes
#: only a few milliseconds.
_MADV_POPULATE_WRITE: Final = 23
_POPULATE_BYTES: Final = 16 << 20
#: Make a huge page now, whatever the settings for shared memory are (Linux 6.1). With pages of 4
#: KiB, the first reads of an arena by a process take four times as long.
_MADV_COLLAPSE: Final = 25
_HUGE_BYTES: Final = 2 << 20
_MAP_FIXED: Final = 0x10
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip

#: Offset and number of the words between trainer and keeper.
_WORDS_AT: Final = 2048
_NUM_WORDS: Final = 9
#: Trainer: number of the pin, with buffer + 1 in the lowest byte. Keeper: the pin that it released.
_PIN, _RELEASED = 0, 1
#: Keeper: the time until which a peer follows this arena, in ns of the monotonic clock; sequence
#: and buffer of the version that the peer has copied.
_FOLLOWED, _COPIED = 2, 3
#: Time for which a follower counts, because a killed keeper must not hold snapshots back. The
#: keeper renews it four times a second.
_FOLLOWED_NS: Final = 2 * 10**9
#: Trainer: number of finished buffers.
_FINISHED: Final = 4
#: Keeper, one per buffer: the sequence of a damaged version.
_DAMAGED: Final = 5
#: Trainer: sequence and buffer of the version that all ranks and peers have.
_KEPT: Final = 8


class Arena:
    """Three buffers in one memfd, mapped into this process.

    Attributes:
        fd: The memfd; owned by this object.
        body_bytes: Maximum size of a buffer's data and record together.
    """

    def __init__(self, fd: int) -> None:
        size_bytes = os.fstat(fd).st_size
        buffer_bytes, rest = divmod(size_bytes, NUM_BUFFERS)
        if rest or buffer_bytes <= PAGE_BYTES or buffer_bytes % PAGE_BYTES:
            raise ArenaError(
                f"a file of {size_bytes} bytes is not an arena: its size must be {NUM_BUFFERS} "
                "buffers of whole pages",
                size_bytes=size_bytes,
            )
        self.fd = fd
        self.body_bytes = buffer_bytes - PAGE_BYTES
        self._buffer_bytes = buffer_bytes
        self._map, self._map_start = _mapped(fd, size_bytes)
        self._memory = memoryview(self._map)[self._map_start : self._map_start + size_bytes]
        self._words = self._memory[_WORDS_AT : _WORDS_AT + 8 * _NUM_WORDS].cast("Q")
        header_bytes = _HEADER.size + _CRC.size
        starts = [buffer * buffer_bytes for buffer in range(NUM_BUFFERS)]
        self._headers = [self._memory[start : start + header_bytes] for start in starts]
        #: The header of each buffer as last read, with its parsed form. A keeper reads hundreds of
        #: headers a step, and parsing costs ten times as much as comparing.
        self._seen = [(bytes(header_bytes), _EMPTY)] * NUM_BUFFERS

    @classmethod
    def create(cls, name: str, *, body_bytes: int) -> Arena:
        """Return a new, empty arena, and claim its memory now.

        Touching memory for the first time costs ten times as much as a copy, so the first snapshot
        must not do it. Raise ``ArenaError`` if the machine does not have enough memory.
        """
        pages = max(-(-body_bytes // PAGE_BYTES), 1) + 1
        fd = -1
        try:
            fd = os.memfd_create(f"everstep-{name}", os.MFD_CLOEXEC)
            os.ftruncate(fd, NUM_BUFFERS * pages * PAGE_BYTES)
            arena = cls(fd)
            arena._make_huge()
            arena.populate()
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise ArenaError(
                f"{NUM_BUFFERS} snapshots of {body_bytes} bytes for {name} do not fit into memory: "
                f"{error}; lower the snapshot budget or take larger nodes",
                body_bytes=body_bytes,
            ) from error
        return arena

    def populate(self) -> None:
        """Fault every page in, in this process; cheap if the file already has its pages."""
        for start in range(0, len(self._memory), _POPULATE_BYTES):
            size_bytes = min(_POPULATE_BYTES, len(self._memory) - start)
            self._map.madvise(_MADV_POPULATE_WRITE, self._map_start + start, size_bytes)

    def _make_huge(self) -> None:
        for start in range(0, len(self._memory) - _HUGE_BYTES + 1, _HUGE_BYTES):
            # The range needs a page that can become huge.
            self._memory[start] = 0
            try:
                self._map.madvise(_MADV_COLLAPSE, self._map_start + start, _HUGE_BYTES)
            except OSError:
                return

    @property
    def size_bytes(self) -> int:
        """Return the arena's memory in bytes."""
        return NUM_BUFFERS * self._buffer_bytes

    @property
    def address(self) -> int:
        """Return the address of the mapping in this process."""
        return address_of(self._memory)

    def close(self) -> None:
        """Release the memory. It stays mapped as long as there are views of it."""
        with contextlib.suppress(BufferError):
            self._words.release()
            for header in self._headers:
                header.release()
            self._memory.release()
            self._map.close()
        fd, self.fd = self.fd, -1
        if fd >= 0:
            # The descriptor is cleared first: at a second call the number could belong to another
            # file.
            os.close(fd)

    @contextlib.contextmanager
    def opened(self) -> Iterator[int]:
        """Yield a file descriptor that another thread's ``close`` does not close.

        Raise OSError if the arena is closed.
        """
        fd = os.dup(self.fd)
        try:
            if self.fd < 0:
                # The number that was duplicated may be another file's.
                raise OSError(errno.EBADF, "the arena was closed meanwhile")
            yield fd
        finally:
            os.close(fd)

    def body(self, buffer: int) -> memoryview:
        """Return the buffer's memory after its header, writable."""
        start = self.body_offset(buffer)
        return self._memory[start : start + self.body_bytes]

    def body_offset(self, buffer: int) -> int:
        """Return the offset of the buffer's body in the file."""
        assert 0 <= buffer < NUM_BUFFERS, f"buffer {buffer} of {NUM_BUFFERS}"
        return buffer * self._buffer_bytes + PAGE_BYTES

    def begin(self, buffer: int, *, attempt: int, step: int, rank: int, world_size: int) -> None:
        """Mark the buffer as being written, which drops its version."""
        sequence = self._sequence(buffer) // 2 * 2 + 1
        self._write(buffer, sequence, attempt, step, rank, world_size, 0, 0)

    def finish(self, buffer: int, *, data_bytes: int, record_bytes: int) -> None:
        """Mark a buffer that was begun as complete."""
        begun = self._read(buffer)
        assert begun is not None, f"buffer {buffer} was not begun"
        assert data_bytes + record_bytes <= self.body_bytes, "more than the buffer holds"
        assert begun.sequence % 2, f"buffer {buffer} is complete already"
        about = begun.attempt, begun.step, begun.rank, begun.world_size
        self._write(buffer, begun.sequence + 1, *about, data_bytes, record_bytes)
        self._words[_FINISHED] += 1

    @property
    def finished(self) -> int:
        """Return the number of times that a buffer was finished."""
        return self._words[_FINISHED]

    def held(self, buffer: int) -> Held | None:
        """Return the buffer's version; None if it is empty, being written, damaged, or freed."""
        try:
            held = self._read(buffer)
            damaged = self._words[_DAMAGED + buffer]
        except ValueError:
            # Another thread closed the arena.
            return None
        if held is None or held.sequence % 2 or held.sequence == damaged:
            return None
        return held if held.data_bytes + held.record_bytes <= self.body_bytes else None

    def versions(self) -> list[Held]:
        """Return the versions of all buffers, oldest first."""
        held = [found for buffer in range(NUM_BUFFERS) if (found := self.held(buffer)) is not None]
        return sorted(held, key=lambda found: (found.attempt, found.step))

    def newest(self) -> Held | None:
        """Return the newest complete version."""
        return next(reversed(self.versions()), None)

    def choose(
        self, lineage: Sequence[tuple[int, int]], *, kept: tuple[int, int] | None = None
    ) -> int:
        """Return the buffer to write next, as ``workers.memory.retention.choose_buffer`` does.

        Only the writer calls it, once every rank has finished its newest version.
        """
        buffers = [self.held(buffer) for buffer in range(NUM_BUFFERS)]
        return choose_buffer(buffers, pinned=self.pinned(), lineage=lineage, kept=kept)

    def pin(self, buffer: int) -> None:
        """Keep the buffer until the keeper has stored it. The trainer calls this."""
        assert 0 <= buffer < NUM_BUFFERS, f"buffer {buffer} of {NUM_BUFFERS}"
        self._words[_PIN] = ((self._words[_PIN] >> 8) + 1) << 8 | (buffer + 1)

    def pinned(self) -> int | None:
        """Return the buffer that waits for storing, complete or not; None if no buffer does."""
        try:
            pin, released = self._words[_PIN], self._words[_RELEASED]
        except ValueError:
            return None
        return None if pin == released else (pin & 0xFF) - 1

    def unpin(self, buffer: int) -> None:
        """Release a pinned buffer. The keeper calls this."""
        pin = self._words[_PIN]
        if (pin & 0xFF) == buffer + 1:
            self._words[_RELEASED] = pin

    def set_followed(self, flag: bool) -> None:  # noqa: FBT001  a state that is passed on
        """Set whether a peer copies this arena. The keeper calls this repeatedly."""
        self._words[_FOLLOWED] = time.monotonic_ns() + _FOLLOWED_NS if flag else 0

    def is_followed(self) -> bool:
        """Return whether a peer copies this arena."""
        return time.monotonic_ns() < self._words[_FOLLOWED]

    def note_copied(self, held: Held) -> None:
        """Note the version that the peers have copied. The keeper calls this."""
        self._words[_COPIED] = _copied_word(held)

    def copy_behind(self) -> bool:
        """Return whether a follower does not have the newest version yet."""
        return self.is_followed() and not self.is_copied()

    def is_copied(self) -> bool:
        """Return whether peers have copied the newest version, even if they are gone."""
        newest = self.newest()
        return newest is None or self._words[_COPIED] == _copied_word(newest)

    def keep(self, kept: tuple[int, int] | None) -> None:
        """Set the version that all ranks and peers have. The trainer calls this before writing."""
        found = [held for held in self.versions() if (held.attempt, held.step) == kept]
        self._words[_KEPT] = _copied_word(found[0]) if found else 0

    def kept(self) -> tuple[int, int] | None:
        """Return the attempt and step of the kept version; None if no buffer holds it."""
        try:
            word = self._words[_KEPT]
        except ValueError:
            return None
        found = (held for held in self.versions() if _copied_word(held) == word)
        return next(((held.attempt, held.step) for held in found), None)

    def quarantine(self, held: Held) -> None:
        """Drop a damaged version. The keeper calls this."""
        self._words[_DAMAGED + held.buffer] = held.sequence

    def _sequence(self, buffer: int) -> int:
        held = self._read(buffer)
        return held.sequence if held is not None else 0

    def _read(self, buffer: int) -> Held | None:
        """Return the header of a buffer, even if it is being written; None if it is not intact."""
        header = bytes(self._headers[buffer])
        seen, held = self._seen[buffer]
        if header != seen:
            held = _unpacked(header, buffer)
            self._seen[buffer] = header, held
        return held

    def _write(self, buffer: int, *fields: int) -> None:
        packed = _HEADER.pack(_MAGIC, *fields)
        start = buffer * self._buffer_bytes
        # A reader that sees half of this write finds a wrong crc32 and ignores the header.
        self._memory[start : start + _HEADER.size + _CRC.size] = packed + _CRC.pack(crc32(packed))


def address_of(view: memoryview) -> int:
    """Return the address of writable memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _mapped(fd: int, size_bytes: int) -> tuple[mmap.mmap, int]:
    """Map a file at an address that huge pages need; return the mapping and the offset in it.

    Python leaves the address to the kernel, which aligns it only if huge pages are always enabled.
    So this reserves a larger range and maps the file into it.
    """
    space = mmap.mmap(-1, size_bytes + _HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = address_of(memoryview(space))
    start = -address % _HUGE_BYTES
    access = mmap.PROT_READ | mmap.PROT_WRITE
    flags = mmap.MAP_SHARED | _MAP_FIXED
    if _LIBC.mmap(address + start, size_bytes, access, flags, fd, 0) != address + start:
        space.close()
        raise OSError(ctypes.get_errno(), "a memory file cannot be mapped")
    return space, start


def _unpacked(header: bytes, buffer: int) -> Held | None:
    packed = header[: _HEADER.size]
    if packed[:8] != _MAGIC or _CRC.unpack(header[_HEADER.size :]) != (crc32(packed),):
        return None
    _, sequence, attempt, step, rank, world_size, data_bytes, record_bytes = _HEADER.unpack(packed)
    return Held(
        buffer=buffer,
        sequence=sequence,
        attempt=attempt,
        step=step,
        rank=rank,
        world_size=world_size,
        data_bytes=data_bytes,
        record_bytes=record_bytes,
    )


def _copied_word(held: Held) -> int:
    return held.sequence << 2 | held.buffer
