"""Read the directory of an uncompressed zip file by ranges, as few and as small as possible.

This reads only what torch writes: stored records, one disk, no encryption. Source: APPNOTE.TXT 6.3.

``zipfile`` is not a substitute. It reads the local header of every record: 9,022 reads for 3,000
tensors instead of 2, each a request on an object store. For the directory alone it takes longer
(3,000 records 30 ms instead of 24, one record 48 us instead of 21) and saves 40 of these lines.
"""

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, NoReturn, TypeAlias

from ucp_core.errors import CheckpointCorruptError, ChecksumMismatchError
from ucp_core.numerics import crc32

Read: TypeAlias = Callable[[int, int], bytes]

#: How much to read from the end at first: the directory of some 800 records, or a whole small file.
TAIL_BYTES = 64 << 10
#: A zip of a million storages has a directory of 80 MB.
_DIRECTORY_BYTES_MAX = 1 << 30
_END = struct.Struct("<IHHHHIIH")
_END64 = struct.Struct("<IQHHIIQQQQ")
_LOCATOR64 = struct.Struct("<IIQI")
_ENTRY = struct.Struct("<IHHHHHHIIIHHHHHII")
_LOCAL = struct.Struct("<IHHHHHIIIHH")
_END_MAGIC, _END64_MAGIC, _LOCATOR64_MAGIC = 0x06054B50, 0x06064B50, 0x07064B50
_ENTRY_MAGIC, _LOCAL_MAGIC = 0x02014B50, 0x04034B50
_COMMENT_MAX = 0xFFFF
_BIG = 0xFFFFFFFF
_ENCRYPTED, _HAS_DESCRIPTOR = 0x1, 0x8
_ZIP64_EXTRA = 1
#: torch aligns the data of records to this unless told otherwise.
_ALIGNMENT = 64
#: Sizes of the data descriptor: with 4-byte and with 8-byte sizes, each with or without its magic.
_DESCRIPTORS = frozenset((0, 12, 16, 20, 24))


class Record(NamedTuple):
    """A record of a zip file."""

    offset_bytes: int  #: Where its data begin.
    num_bytes: int
    crc32: int | None  #: Checksum of the data; None if the writer omitted it (it is 0 then).
    entry_bytes: int  #: Where its entry in the directory begins.


#: Place of the crc32 in an entry of the directory.
ENTRY_CRC_BYTES = 16


class _Entry(NamedTuple):
    name: str
    header: int
    num_bytes: int
    crc32: int
    flags: int
    place: int


def read_records(
    read: Read, size: int, *, where: str, tail_bytes: int = TAIL_BYTES
) -> dict[str, Record]:
    """Return the records of a zip file of ``size`` bytes by name, in the order of the file."""
    tail_start = max(0, size - tail_bytes)
    tail = read(tail_start, size - tail_start) if size > 0 else b""
    start, length, count = _directory(tail, tail_start, size, read, where)
    if start >= tail_start:
        directory = tail[start - tail_start : start - tail_start + length]
    else:
        directory = read(start, length)
    entries = sorted(_entries(directory, count, where), key=lambda entry: entry.header)
    records: dict[str, Record] = {}
    unsure: list[_Entry] = []
    for index, entry in enumerate(entries):
        stop = entries[index + 1].header if index + 1 < len(entries) else start
        if entry.name in records:
            _fail(where, f"two records are named {entry.name[:80]}")
        if entry.num_bytes > stop - entry.header:
            _fail(where, f"record {entry.name[:80]} reaches into the next one")
        offset = _data_start(entry, stop)
        if offset is None:
            unsure.append(entry)
        records[entry.name] = Record(
            offset or 0, entry.num_bytes, entry.crc32 or None, start + entry.place
        )
    for entry in unsure:
        records[entry.name] = records[entry.name]._replace(
            offset_bytes=_read_start(entry, read, start, where)
        )
    return records


def read_contents(
    read: Read, records: Mapping[str, Record], names: Sequence[str], *, where: str
) -> list[bytes]:
    """Return the data of some records after verifying checksums; neighbours take one read."""
    if not names:
        return []
    chosen = [records[name] for name in names]
    low = min(record.offset_bytes for record in chosen)
    high = max(record.offset_bytes + record.num_bytes for record in chosen)
    if high - low > sum(record.num_bytes for record in chosen) + TAIL_BYTES:
        contents = [read(record.offset_bytes, record.num_bytes) for record in chosen]
    else:
        data = read(low, high - low)
        starts = [record.offset_bytes - low for record in chosen]
        contents = [
            data[at : at + record.num_bytes] for at, record in zip(starts, chosen, strict=True)
        ]
    for name, record, content in zip(names, chosen, contents, strict=True):
        if record.crc32 is not None and crc32(content) != record.crc32:
            raise ChecksumMismatchError(
                f"{where}: record {name[:80]} is damaged: its crc32 is {crc32(content):08x}, "
                f"written was {record.crc32:08x}; use another copy or an older checkpoint",
                path=where,
            )
    return contents


def _directory(
    tail: bytes, tail_start: int, size: int, read: Read, where: str
) -> tuple[int, int, int]:
    """Return where the central directory is, its size, and its number of entries."""
    at = tail.rfind(struct.pack("<I", _END_MAGIC), max(0, len(tail) - _COMMENT_MAX - _END.size))
    if at < 0 or at + _END.size > len(tail):
        _fail_start(tail if tail_start == 0 else read(0, 16), where)
    _, disk, _, _, count, length, start, _ = _END.unpack_from(tail, at)
    end = tail_start + at
    if _BIG in (length, start) or count == _COMMENT_MAX:
        locator = at - _LOCATOR64.size
        if locator >= 0:
            magic, _, place, _ = _LOCATOR64.unpack_from(tail, locator)
            if magic == _LOCATOR64_MAGIC:
                length, start, count, end = _directory64(tail, tail_start, place, read, where)
    elif disk:
        _fail(where, "the zip file has several disks")
    if start + length > end or length > _DIRECTORY_BYTES_MAX or end > size:
        _fail(where, "the directory at its end lies outside of it")
    return start, length, count


def _directory64(
    tail: bytes, tail_start: int, place: int, read: Read, where: str
) -> tuple[int, int, int, int]:
    if place + _END64.size > tail_start + len(tail):
        _fail(where, "the directory at its end lies outside of it")
    if place >= tail_start:
        data = tail[place - tail_start : place - tail_start + _END64.size]
    else:
        data = read(place, _END64.size)
    magic, _, _, _, _, _, _, count, length, start = _END64.unpack(data)
    if magic != _END64_MAGIC:
        _fail(where, "the directory at its end is not where it should be")
    return length, start, count, place


def _entries(directory: bytes, count: int, where: str) -> list[_Entry]:
    entries: list[_Entry] = []
    at = 0
    try:
        for _ in range(count):
            entry, at = _entry(directory, at, where)
            entries.append(entry)
    except (struct.error, UnicodeDecodeError, IndexError) as error:
        raise CheckpointCorruptError(
            f"{where}: the directory at its end is damaged ({error}): use another copy",
            path=where,
        ) from error
    return entries


def _entry(directory: bytes, at: int, where: str) -> tuple[_Entry, int]:
    (magic, _, _, flags, method, _, _, crc, packed, size, name_len, extra_len, comment_len) = (
        _ENTRY.unpack_from(directory, at)[:13]
    )
    header = _ENTRY.unpack_from(directory, at)[16]
    if magic != _ENTRY_MAGIC:
        _fail(where, "the directory at its end is damaged")
    name_stop = at + _ENTRY.size + name_len
    name = directory[at + _ENTRY.size : name_stop].decode()
    if _BIG in (size, header, packed):
        extra = directory[name_stop : name_stop + extra_len]
        size, packed, header = _zip64(extra, size, packed, header)
    if method or size != packed:
        _fail(where, f"record {name[:80]} is compressed, which torch.save never does")
    if flags & _ENCRYPTED:
        _fail(where, f"record {name[:80]} is encrypted")
    if len(name.encode()) != name_len:
        _fail(where, "the directory at its end is damaged")
    return _Entry(name, header, size, crc, flags, at), name_stop + extra_len + comment_len


def _zip64(extra: bytes, size: int, packed: int, header: int) -> tuple[int, int, int]:
    """Read the 8-byte values from the extra field, which has only those that did not fit."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == _ZIP64_EXTRA:
            values = iter(struct.unpack_from(f"<{length // 8}Q", extra, at + 4))
            size = next(values, -1) if size == _BIG else size
            packed = next(values, -1) if packed == _BIG else packed
            header = next(values, -1) if header == _BIG else header
            break
        at += 4 + length
    if min(size, packed, header) < 0:
        msg = "a 64-bit size is missing"
        raise struct.error(msg)
    return size, packed, header


def _data_start(entry: _Entry, stop: int) -> int | None:
    """Return where the data begin, if torch's way of padding determines it.

    The local header has padding of unknown size. The rule is checked: a descriptor of a known size
    and the next record must follow the data.
    """
    start = entry.header + _LOCAL.size + len(entry.name.encode()) + 4
    if entry.num_bytes >= _BIG or entry.header >= _BIG:
        start += 4 + 16 * (entry.num_bytes >= _BIG) + 8 * (entry.header >= _BIG)
    start = -(-start // _ALIGNMENT) * _ALIGNMENT
    rest = stop - start - entry.num_bytes
    has_descriptor = bool(entry.flags & _HAS_DESCRIPTOR)
    if rest in _DESCRIPTORS and bool(rest) == has_descriptor:
        return start
    return None


def _read_start(entry: _Entry, read: Read, stop: int, where: str) -> int:
    """Return where the data begin, as the local header says."""
    data = read(entry.header, _LOCAL.size) if entry.header + _LOCAL.size <= stop else b""
    if len(data) < _LOCAL.size or _LOCAL.unpack(data)[0] != _LOCAL_MAGIC:
        _fail(where, f"record {entry.name[:80]} does not begin where the directory says")
    name_len, extra_len = _LOCAL.unpack(data)[9:11]
    start = entry.header + _LOCAL.size + name_len + extra_len
    if start + entry.num_bytes > stop:
        _fail(where, f"record {entry.name[:80]} reaches into the directory")
    return int(start)


def _fail(where: str, what: str) -> NoReturn:
    raise CheckpointCorruptError(
        f"{where}: {what}: the file is damaged; use another copy or an older checkpoint",
        path=where,
    )


def _fail_start(head: bytes, where: str) -> NoReturn:
    if head.startswith(b"PK"):
        _fail(where, "it begins like a zip file, but has no directory at its end: it is truncated")
    if head.startswith((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")):
        raise CheckpointCorruptError(
            f"{where} is in the format of torch before 1.6 (or a bare pickle): load it with torch "
            "and save it again",
            path=where,
        )
    _fail(where, "it is not a file that torch.save wrote")
