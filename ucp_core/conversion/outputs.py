"""Where a conversion writes to a file system with locks: in place, in any order."""

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ucp_core.conversion import resume_journal
from ucp_core.conversion.work_items import ItemWorker, Result, WorkItem
from ucp_core.errors import StorageError, UcpError
from ucp_core.formats import TargetFile
from ucp_core.numerics import BLOCK_BYTES, crc32
from ucp_core.storage import LocalStore, Store, may_reserve, retried

#: Items in a batch for another machine: at most 128 MiB, a fraction of a second.
REMOTE_BATCH_ITEMS = 8


#: Bytes of one write call. The kernel allocates page cache in units as large as the call. Virtual
#: machines that return free memory to the host lack large units: 1.25 GiB took 0.26 to 0.31 s in
#: calls of 128 KiB, and 0.2 to 2.4 s in calls of 1 MiB.
_WRITE_BYTES = 128 << 10


#: Advice of an error while items are written.
_AGAIN = "; fix that and give the same command again: it continues from here"


def _write(fd: int, chunk: memoryview, offset_bytes: int) -> None:
    done = 0
    while done < len(chunk):
        done += os.pwrite(fd, chunk[done : done + _WRITE_BYTES], offset_bytes + done)


class Placed(NamedTuple):
    """Items that a worker writes in place, on any machine that sees the files."""

    items: tuple[WorkItem, ...]
    paths: tuple[str, ...]

    def do(self, worker: ItemWorker) -> list[Result]:
        """Do the items; raise ``StorageError`` if a target cannot be written."""
        results: list[Result] = []
        for item in self.items:
            # An item that is only read has no chunks.
            path = Path(self.paths[item.target] if item.target >= 0 else os.devnull)
            offset_bytes = item.start
            with resume_journal.named(path, "cannot be written", _AGAIN):
                flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
                fd = retried(partial(os.open, path, flags))
            try:
                for chunk in worker.chunks(item):
                    with resume_journal.named(path, "cannot be written", _AGAIN):
                        _write(fd, chunk, offset_bytes)
                    offset_bytes += len(chunk)
            finally:
                os.close(fd)
            results.append(worker.result(item))
        return results


class LocalFiles:
    """Temporary files in the destination, renamed at the end, with their journal.

    Attributes:
        targets: The files, by their final names.
        paths: Where they are written until then.
    """

    def __init__(
        self,
        targets: Sequence[TargetFile],
        directory: str,
        identity: str,
        *,
        resume: bool,
    ) -> None:
        self.targets = targets
        self._directory = Path(directory)
        self._journal = resume_journal.Journal(directory, identity, resume=resume)
        self.paths = [str(self._journal.folder / target.name) for target in targets]
        try:
            self._sound = self._prepare()
        except UcpError:
            if not self._journal.results:
                # Nothing can be resumed, and the reserved space may be all that was free.
                with suppress(StorageError):
                    self._journal.remove()
            self.close()
            raise

    def _prepare(self) -> set[int]:
        """Create the missing files; return the others."""
        sound: set[int] = set()
        for number, target in enumerate(self.targets):
            path = Path(self.paths[number])
            with resume_journal.named(path, "cannot be written"):
                if os.path.lexists(self._directory / target.name):
                    self._take_back(number)
                if _has_size(path, target.num_bytes):
                    sound.add(number)
                else:
                    _allocate(path, target)
        return sound

    def _take_back(self, number: int) -> None:
        """Undo the rename of a file by an earlier run that was then killed."""
        target = self.targets[number]
        path, final = self.paths[number], self._directory / target.name
        results = [each for each in self._journal.results if each.item.target == number]
        if (
            not results
            or os.path.lexists(path)
            or not _has_size(final, target.num_bytes)
            or not all(is_written(LocalStore(), str(final), target, each) for each in results)
        ):
            raise _not_ours(str(final))
        final.rename(path)

    def resumed(self) -> Iterator[Result]:
        """Yield the journal's results whose bytes are in the files; they are hashed again."""
        for result in self._journal.results:
            number = result.item.target
            if number < 0 or (
                number in self._sound
                and is_written(LocalStore(), self.paths[number], self.targets[number], result)
            ):
                yield result

    def batches(self, left: Sequence[WorkItem], num_items: int) -> list[Placed]:
        """Return the remaining items in batches of ``num_items``.

        Batches of different files alternate: on most file systems only one process at a time can
        write a file.
        """
        by_file: dict[int, list[WorkItem]] = {}
        for item in left:
            by_file.setdefault(item.target, []).append(item)
        paths = tuple(self.paths)
        placed = [
            (low / len(items), Placed(tuple(items[low : low + num_items]), paths))
            for items in by_file.values()
            for low in range(0, len(items), num_items)
        ]
        return [batch for _, batch in sorted(placed, key=lambda pair: pair[0])]

    def note(self, result: Result) -> None:
        """Add a result to the journal."""
        self._journal.add(result)

    def finish(self, *, fsync: bool) -> None:
        """Give all files their final names; raise ``UcpError`` if another file has one."""
        for target in self.targets:
            if os.path.lexists(self._directory / target.name):
                raise _not_ours(str(self._directory / target.name))
        for number, target in enumerate(self.targets):
            path = self.paths[number]
            if fsync:
                _sync(path)
            Path(path).replace(self._directory / target.name)
        if fsync:
            # The manifest must not exist before the files have their names.
            _sync(str(self._directory))

    def remove(self) -> None:
        """Delete everything temporary, which is all that was written until ``finish``."""
        self._journal.remove()

    discard = remove

    def close(self) -> None:
        """Release the journal; a child calls this too, so that the lock ends with its parent."""
        self._journal.close()


def _sync(path: str) -> None:
    fd = retried(partial(os.open, path, os.O_RDONLY | os.O_CLOEXEC))
    os.fsync(fd)
    os.close(fd)


def is_written(store: Store, path: str, target: TargetFile, result: Result) -> bool:
    """Return whether the bytes of an item are in the file at ``path``."""
    spans = list(_blocks_of(target, result.item))
    buffers = [memoryview(bytearray(high - low)) for low, high in spans]
    ranges = [(low, (buffer,)) for (low, _), buffer in zip(spans, buffers, strict=True)]
    store.read_ranges(path, ranges)
    return tuple(map(crc32, buffers)) == result.blocks


def _blocks_of(target: TargetFile, item: WorkItem) -> Iterator[tuple[int, int]]:
    """Yield the ranges of the file whose checksums an item has."""
    for entry, offset_bytes in target.tensors:
        low = max(item.start, offset_bytes)
        high = min(item.stop, offset_bytes + entry.num_bytes)
        for start in range(low, high, BLOCK_BYTES):
            yield start, min(start + BLOCK_BYTES, high)


def _has_size(path: Path, num_bytes: int) -> bool:
    """Return whether there is a regular file of this size; a link may lead to anything."""
    if not os.path.lexists(path):
        return False
    status = path.lstat()
    return stat.S_ISREG(status.st_mode) and status.st_size == num_bytes


def _not_ours(path: str) -> UcpError:
    return UcpError(
        f"{path} is not from this conversion, which would replace it: move it away and give "
        "the same command again",
        path=path,
    )


def _allocate(path: Path, target: TargetFile) -> None:
    def create() -> int:
        path.unlink(missing_ok=True)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    fd = retried(create)
    try:
        if may_reserve(fd):
            # A full disk shows now, and writing is 30 % faster on ext4.
            os.posix_fallocate(fd, 0, target.num_bytes)
        else:
            os.ftruncate(fd, target.num_bytes)
        os.pwrite(fd, target.header, 0)
    finally:
        os.close(fd)
