"""What a conversion has done, kept beside the files that it writes, so that it can go on.

One line for each finished item, with a checksum of its own: a line that was cut short by a kill
ends the journal. Nothing in it is believed: what it says was written is read and hashed again.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ucp_core.conversion.work_items import Item, Result
from ucp_core.errors import StorageError, UcpError
from ucp_core.native import UNFINISHED_NAME
from ucp_core.numerics import crc32
from ucp_core.reading import Check, Note

if TYPE_CHECKING:
    from collections.abc import Iterable

_NAME = "journal"
_CRC_DIGITS = 8


def encode(results: Iterable[Result]) -> bytes:
    """Return one line for each result."""
    return b"".join(_line(_plain(result)) for result in results)


def decode(data: bytes) -> list[Result]:
    """Return the results of every sound line, up to the first one that is not."""
    return [_result(value) for value in _values(data)]


def _plain(result: Result) -> list[object]:
    notes = [[*note.check, *note[1:]] for note in result.notes]
    return [list(result.item), list(result.blocks), notes, result.read_bytes]


def _result(value: Any) -> Result:
    item, blocks, notes, read_bytes = value
    found = tuple(Note(Check(*note[:4]), *note[4:]) for note in notes)
    return Result(Item(*item), tuple(blocks), found, read_bytes)


def _line(value: object) -> bytes:
    text = json.dumps(value, separators=(",", ":")).encode()
    return b"%08x %b\n" % (crc32(text), text)


def _values(data: bytes) -> list[Any]:
    values: list[Any] = []
    for line in data.split(b"\n"):
        text = line[_CRC_DIGITS + 1 :]
        if line[:_CRC_DIGITS] != b"%08x" % crc32(text):
            break
        values.append(json.loads(text))
    return values


#: A child that a conversion was beginning when it was killed has its lock until it first runs.
LET_GO_S = 2.0


class Journal:
    """The journal of a conversion to a local directory; locked while it is open."""

    def __init__(self, directory: str, identity: str, *, resume: bool) -> None:
        """Open it, and empty it unless it is of the conversion that ``identity`` names.

        Raises:
            UcpError: Another process converts to the same directory.
            StorageError: The directory cannot be written.
        """
        self.folder = Path(directory) / UNFINISHED_NAME
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.folder / _NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StorageError(
                f"{self.folder} cannot be written: {error.strerror}", path=str(self.folder)
            ) from error
        end_s = time.monotonic() + LET_GO_S
        while not self._lock():
            if time.monotonic() >= end_s:
                os.close(self._fd)
                raise UcpError(
                    f"another process is converting to {directory}: wait for it, or give another "
                    "destination",
                    path=directory,
                )
            time.sleep(LET_GO_S / 100)
        self.results = self._read(identity) if resume else []
        if not self.results:
            self._begin(identity)

    def _lock(self) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever had it may have finished, and deleted what was opened here.
            return os.path.samestat(os.fstat(self._fd), (self.folder / _NAME).stat())
        except OSError:
            return False

    def _read(self, identity: str) -> list[Result]:
        data = b""
        while part := os.pread(self._fd, 1 << 20, len(data)):
            data += part
        header = _line([identity])
        if not data.startswith(header):
            return []
        # What follows a line that was cut short would never be found.
        results = decode(data[len(header) :])
        sound = header + encode(results)
        os.ftruncate(self._fd, len(sound))
        os.lseek(self._fd, len(sound), os.SEEK_SET)
        return results

    def _begin(self, identity: str) -> None:
        os.ftruncate(self._fd, 0)
        os.lseek(self._fd, 0, os.SEEK_SET)
        for path in self.folder.iterdir():
            if path.name != _NAME:
                path.unlink()
        os.write(self._fd, _line([identity]))

    def add(self, result: Result) -> None:
        """Note that an item is done."""
        os.write(self._fd, encode([result]))

    def release(self) -> None:
        """Close it in a child: the lock is the parent's, and must go when the parent goes."""
        os.close(self._fd)

    def close(self) -> None:
        """Let others convert to the directory."""
        os.close(self._fd)

    def remove(self) -> None:
        """Delete it with everything beside it.

        Raises:
            StorageError: It cannot be deleted.
        """
        try:
            for path in self.folder.iterdir():
                path.unlink()
            self.folder.rmdir()
        except OSError as error:
            raise StorageError(
                f"{self.folder} cannot be deleted: {error.strerror}", path=str(self.folder)
            ) from error
