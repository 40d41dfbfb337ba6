"""Stream a zip file as torch writes it: records are aligned and not compressed.

A record's crc32 is known only after its data. It is therefore in a data descriptor and in the
central directory, where torch puts it, too.
"""

import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ucp_core.numerics import crc32
from ucp_core.storage import Buffer

#: torch maps files and wants storages to begin at such addresses.
ALIGNMENT_BYTES = 64

_UTF8 = 0x800
_HAS_DESCRIPTOR = 0x8
_SMALL_MAX = 0xFFFFFFFF
_COUNT_MAX = 0xFFFF
_VERSION = 20
_VERSION_ZIP64 = 45
#: 1 January 1980: the same input gives the same file.
_DATE = 0x21


class _ZipRecord(NamedTuple):
    name: bytes
    flags: int
    crc32: int
    num_bytes: int
    offset_bytes: int


class ZipStream:
    """Yields the parts of one zip file in order: ``record`` any number of times, then ``end``."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._records: list[_ZipRecord] = []
        self._offset_bytes = 0

    def record(self, name: str, num_bytes: int, chunks: Iterable[Buffer]) -> Iterator[Buffer]:
        """Yield a record's header, its data in the same chunks, and its descriptor."""
        encoded = f"{self._prefix}/{name}".encode()
        offset_bytes = self._offset_bytes
        flags = _UTF8 | (_HAS_DESCRIPTOR if num_bytes else 0)
        yield self._counted(_local_header(encoded, flags, num_bytes, offset_bytes))
        value = done = 0
        for chunk in chunks:
            value = crc32(chunk, value)
            done += memoryview(chunk).nbytes
            yield chunk
        assert done == num_bytes, f"{name}: {done} bytes came, {num_bytes} were announced"
        self._offset_bytes += num_bytes
        self._records.append(_ZipRecord(encoded, flags, value, num_bytes, offset_bytes))
        if num_bytes:
            sizes = "<IIQQ" if num_bytes >= _SMALL_MAX else "<IIII"
            yield self._counted(struct.pack(sizes, 0x08074B50, value, num_bytes, num_bytes))

    def end(self) -> Iterator[bytes]:
        """Yield the central directory and what closes the file."""
        start = self._offset_bytes
        for record in self._records:
            yield self._counted(_directory_entry(record))
        size = self._offset_bytes - start
        count = len(self._records)
        head = struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, count, count, size, start)
        yield head + struct.pack("<IIQI", 0x07064B50, 0, self._offset_bytes, 1)
        few = min(count, _COUNT_MAX)
        sizes = min(size, _SMALL_MAX), min(start, _SMALL_MAX)
        yield struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, few, few, *sizes, 0)

    def _counted(self, data: bytes) -> bytes:
        self._offset_bytes += len(data)
        return data


def _local_header(name: bytes, flags: int, num_bytes: int, offset_bytes: int) -> bytes:
    is_large = num_bytes >= _SMALL_MAX
    extra = struct.pack("<HHQQ", 1, 16, 0, 0) if is_large else b""
    used = offset_bytes + 30 + len(name) + len(extra) + 4
    padding = -used % ALIGNMENT_BYTES
    extra += b"FB" + struct.pack("<H", padding) + b"Z" * padding
    size = _SMALL_MAX if is_large else 0
    version = _VERSION_ZIP64 if is_large else _VERSION
    head = 0x04034B50, version, flags, 0, 0, _DATE, 0
    return struct.pack("<IHHHHHIIIHH", *head, size, size, len(name), len(extra)) + name + extra


def _directory_entry(record: _ZipRecord) -> bytes:
    size, offset = record.num_bytes, record.offset_bytes
    large: list[int] = []
    if size >= _SMALL_MAX:
        large += [size, size]
    if offset >= _SMALL_MAX:
        large.append(offset)
    extra = struct.pack(f"<HH{len(large)}Q", 1, 8 * len(large), *large) if large else b""
    version = _VERSION_ZIP64 if large else _VERSION
    small = min(size, _SMALL_MAX)
    head = 0x02014B50, version, version, record.flags, 0, 0, _DATE, record.crc32, small, small
    rest = len(record.name), len(extra), 0, 0, 0, 0, min(offset, _SMALL_MAX)
    return struct.pack("<IHHHHHHIIIHHHHHII", *head, *rest) + record.name + extra
