"""The journal of a conversion: one line per finished item, beside the files it writes.

Every line has a checksum; a line cut short by a kill ends the journal. A resumed conversion hashes
again what was written according to the journal.
"""

import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ucp_core.conversion.work_items import Result, WorkItem
from ucp_core.errors import StorageError, UcpError
from ucp_core.native import CLAIM_NAME, UNFINISHED_NAME, in_use
from ucp_core.numerics import crc32
from ucp_core.reading import Check, Note
from ucp_core.storage import LocalStore, retried

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


def _locked(held: ExitStack, path: Path) -> bool | None:
    """Lock the journal until ``held`` closes; see ``Store.lock``."""
    try:
        return held.enter_context(LocalStore().lock(str(path), shared=False))
    except StorageError as error:
        # The process that held the lock has deleted the journal.
        if error.facts["missing"]:
            return False
        raise


@contextmanager
def named(path: Path, what: str, advice: str = "") -> Iterator[None]:
    """Turn the kernel's refusal into a ``StorageError`` that names ``path``."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{path} {what}: {error.strerror}{advice}", path=str(path), errno=error.errno
        ) from error


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
        path = self.folder / _NAME
        with named(self.folder, "cannot be written"):
            if (self.folder / CLAIM_NAME).exists():
                raise in_use(directory)
            if not _is_ours(self.folder):
                raise UcpError(
                    f"{self.folder} is not the folder of a conversion: move it away, or give "
                    "another destination",
                    path=str(self.folder),
                )
            self.folder.mkdir(parents=True, exist_ok=True)
            retried(lambda: path.touch(0o644))
        with ExitStack() as held:
            self._lock(held, path)
            if (self.folder / CLAIM_NAME).exists():
                # An export began before this journal was there. Its result must not contain one.
                path.unlink()
                raise in_use(directory)
            self._file = held.enter_context(path.open("r+b", buffering=0))
            self.results = self._read(identity) if resume else []
            if not self.results:
                self._begin(identity)
            self._held = held.pop_all()

    def _lock(self, held: ExitStack, path: Path) -> None:
        end_s = time.monotonic() + _LOCK_S
        while not (found := _locked(held, path)):
            if found is None:
                raise StorageError(
                    f"{self.folder} is on a file system without locks, so two conversions to it "
                    "could mix their files: convert to another file system and copy the result",
                    path=str(self.folder),
                )
            if time.monotonic() >= end_s:
                directory = self.folder.parent
                raise UcpError(
                    f"another process is converting to {directory}: wait for it, or give another "
                    "destination",
                    path=str(directory),
                )
            held.close()
            time.sleep(_LOCK_S / 100)

    def _read(self, identity: str) -> list[Result]:
        header, data = _line([identity]), self._file.read()
        if not data.startswith(header):
            return []
        # Lines after a damaged one would never be read.
        results = decode(data[len(header) :])
        self._file.truncate(len(header + encode(results)))
        self._file.seek(0, os.SEEK_END)
        return results

    def _begin(self, identity: str) -> None:
        # The files come first: without its first line a journal does not say whose they are.
        for path in self.folder.iterdir():
            if path.name != _NAME and _is_name(path):
                path.unlink()
        self._file.truncate(0)
        self._file.seek(0)
        self._file.write(_line([identity]))

    def add(self, result: Result) -> None:
        """Add a line for an item that is done."""
        self._file.write(encode([result]))

    def close(self) -> None:
        """Release the lock; a second call does nothing."""
        self._held.close()

    def remove(self) -> None:
        """Delete the journal and the files of conversions beside it."""
        with named(self.folder, "cannot be deleted"):
            # The journal comes last, because it says whose folder this is.
            for path in sorted(self.folder.iterdir(), key=lambda path: path.name == _NAME):
                if _is_name(path):
                    path.unlink()
            self.folder.rmdir()
