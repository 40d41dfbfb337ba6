"""The journal of a conversion: one line per finished item, beside the files it writes.

Every line has a checksum; a line cut short by a kill ends the journal. A resumed conversion hashes
again what was written according to the journal.
"""

import json
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path

from ucp_core.conversion.work_items import Result, WorkItem
from ucp_core.errors import StorageError, UcpError
from ucp_core.native import CLAIM_NAME, UNFINISHED_NAME, in_use
from ucp_core.numerics import crc32
from ucp_core.reading import Check, Note
from ucp_core.storage import flock, retried

_NAME = "journal"
_CRC_DIGITS = 8


def encode(results: Iterable[Result]) -> bytes:
    """Return one line per result."""
    lines: list[bytes] = []
    for item, blocks, notes, read_bytes in results:
        flat = [[*note.check, *note[1:]] for note in notes]
        lines.append(_line([item, blocks, flat, read_bytes]))
    return b"".join(lines)


def decode(data: bytes) -> list[Result]:
    """Return the results of all lines before the first damaged one."""
    results: list[Result] = []
    for line in data.split(b"\n"):
        if not _is_line(line):
            break
        item, blocks, flat, read_bytes = json.loads(line[_CRC_DIGITS + 1 :])
        notes = tuple(Note(Check(*note[:4]), *note[4:]) for note in flat)
        results.append(Result(WorkItem(*item), tuple(blocks), notes, read_bytes))
    return results


def _is_line(line: bytes) -> bool:
    """Return whether a line is whole: it starts with its checksum."""
    return line[:_CRC_DIGITS] == b"%08x" % crc32(line[_CRC_DIGITS + 1 :].removesuffix(b"\n"))


def _line(value: object) -> bytes:
    text = json.dumps(value, separators=(",", ":")).encode()
    return b"%08x %b\n" % (crc32(text), text)


#: A line that a kill cut short.
_TORN_LINE = re.compile(rb"[0-9a-f]{0,8}|[0-9a-f]{8} .*", re.DOTALL)
#: A child that was forked just before its parent was killed holds the lock until it first runs.
_LOCK_S = 2.0


def _is_ours(folder: Path) -> bool:
    """Return whether the folder is free, or a conversion made everything in it."""
    if folder.is_symlink():
        return False
    held = list(folder.iterdir()) if folder.is_dir() else []
    if any(path.is_symlink() or not path.is_file() or not _is_name(path) for path in held):
        return False
    return not held or (folder / _NAME in held and _begins(folder / _NAME, alone=len(held) == 1))


def _is_name(path: Path) -> bool:
    return path.name == _NAME or path.suffix == ".safetensors"


def _begins(path: Path, *, alone: bool) -> bool:
    """Return whether a file is a journal; a kill may have left half a line and no other files."""
    with path.open("rb") as file:
        line = file.readline(1 << 10)
    is_torn = not line.endswith(b"\n") and _TORN_LINE.fullmatch(line) is not None
    return _is_line(line) or (is_torn and alone)


class Journal:
    """The journal of a conversion to a local directory; locked while it is open."""

    def __init__(self, directory: str, identity: str, *, resume: bool) -> None:
        """Open the journal; empty it unless it belongs to the conversion ``identity``.

        Raises:
            UcpError: Another process converts or exports to the same directory, or the folder
                ``UNFINISHED_NAME`` in it has other content, which would be deleted.
            StorageError: The directory cannot be written.
        """
        self.folder = Path(directory) / UNFINISHED_NAME
        try:
            if (self.folder / CLAIM_NAME).exists():
                raise in_use(directory)
            if not _is_ours(self.folder):
                raise UcpError(
                    f"{self.folder} is not the folder of a conversion: move it away, or give "
                    "another destination",
                    path=str(self.folder),
                )
            self.folder.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            self._fd = retried(lambda: os.open(self.folder / _NAME, flags, 0o644))
        except OSError as error:
            raise StorageError(
                f"{self.folder} cannot be written: {error.strerror}", path=str(self.folder)
            ) from error
        end_s = time.monotonic() + _LOCK_S
        while not self._lock():
            if time.monotonic() >= end_s:
                os.close(self._fd)
                raise UcpError(
                    f"another process is converting to {directory}: wait for it, or give another "
                    "destination",
                    path=directory,
                )
            time.sleep(_LOCK_S / 100)
        if (self.folder / CLAIM_NAME).exists():
            # An export began before this journal was there, and its result must not contain one.
            (self.folder / _NAME).unlink()
            self.close()
            raise in_use(directory)
        self.results = self._read(identity) if resume else []
        if not self.results:
            self._begin(identity)

    def _lock(self) -> bool:
        held = flock(self._fd, shared=False)
        if held is None:
            self.close()
            raise StorageError(
                f"{self.folder} is on a file system without locks, so two conversions to it could "
                "mix their files: convert to another file system and copy the result",
                path=str(self.folder),
            )
        try:
            # The process that held the lock may have deleted the file opened here.
            there = retried((self.folder / _NAME).stat)
        except FileNotFoundError:
            return False
        return held and os.path.samestat(os.fstat(self._fd), there)

    def _read(self, identity: str) -> list[Result]:
        data = b""
        while part := os.pread(self._fd, 1 << 20, len(data)):
            data += part
        header = _line([identity])
        if not data.startswith(header):
            return []
        # Lines after a damaged one would never be read.
        results = decode(data[len(header) :])
        sound = header + encode(results)
        os.ftruncate(self._fd, len(sound))
        os.lseek(self._fd, len(sound), os.SEEK_SET)
        return results

    def _begin(self, identity: str) -> None:
        # The files come first: without its first line a journal does not say whose they are.
        for path in self.folder.iterdir():
            if path.name != _NAME and _is_name(path):
                path.unlink()
        os.ftruncate(self._fd, 0)
        os.lseek(self._fd, 0, os.SEEK_SET)
        os.write(self._fd, _line([identity]))

    def add(self, result: Result) -> None:
        """Add a line for an item that is done."""
        os.write(self._fd, encode([result]))

    def close(self) -> None:
        """Release the lock; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def remove(self) -> None:
        """Delete the journal and the files of conversions beside it."""
        try:
            # The journal comes last, because it says whose folder this is.
            for path in sorted(self.folder.iterdir(), key=lambda path: path.name == _NAME):
                if _is_name(path):
                    path.unlink()
            self.folder.rmdir()
        except OSError as error:
            raise StorageError(
                f"{self.folder} cannot be deleted: {error.strerror}", path=str(self.folder)
            ) from error
