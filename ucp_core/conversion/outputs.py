"""Where a conversion writes: to local files in any order, or to any store as streams."""

from __future__ import annotations

import os
import re
import stat
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ucp_core.conversion import journal
from ucp_core.conversion.work_items import Result, Worker, WorkItem
from ucp_core.errors import StorageError, UcpError
from ucp_core.formats import TargetFile
from ucp_core.native import (
    CLAIM_NAME,
    MANIFEST_NAME,
    UNFINISHED_NAME,
    in_use,
    is_of_export,
)
from ucp_core.numerics import BLOCK_BYTES, crc32
from ucp_core.storage import Store, join, may_reserve

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


_SUFFIX = ".safetensors"
_MARKER_SUFFIX = f"{_SUFFIX}.json"
#: Of the random part of a claim, which may be in the names of files.
TOKEN_BYTES = 8
_TOKEN = re.compile(rf"-[0-9a-f]{{{2 * TOKEN_BYTES}}}(?=\.safetensors$)")
#: Items in a batch for another machine: at most 128 MiB, a fraction of a second.
REMOTE_BATCH_ITEMS = 8


#: Bytes of one write call. The kernel allocates page cache in units as large as a call. Virtual
#: machines whose free memory goes back to the host lack the large ones: 1.25 GiB took 0.26 to
#: 0.31 s by calls of 128 KiB, and 0.2 to 2.4 s by calls of 1 MiB.
_WRITE_BYTES = 128 << 10


@contextmanager
def _told(path: str) -> Iterator[None]:
    """Raise what the kernel refuses as an error that says what to do."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error.strerror}; repair that and give the same command "
            "again: it continues from here",
            path=path,
            errno=error.errno,
        ) from error


def _write(fd: int, chunk: memoryview, offset_bytes: int) -> None:
    done = 0
    while done < len(chunk):
        done += os.pwrite(fd, chunk[done : done + _WRITE_BYTES], offset_bytes + done)


class Placed(NamedTuple):
    """Items that a worker writes in place, on any machine that sees the files."""

    items: tuple[WorkItem, ...]
    paths: tuple[str, ...]

    def do(self, worker: Worker) -> list[Result]:
        """Do the items.

        Raises:
            StorageError: A target cannot be written.
        """
        results: list[Result] = []
        for item in self.items:
            # An item that is only read has no chunks.
            path = self.paths[item.target] if item.target >= 0 else os.devnull
            offset_bytes = item.start
            with _told(path):
                fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                for chunk in worker.chunks(item):
                    with _told(path):
                        _write(fd, chunk, offset_bytes)
                    offset_bytes += len(chunk)
            finally:
                os.close(fd)
            results.append(worker.result(item))
        return results


class Claim(NamedTuple):
    """Who converts to a directory of a store; such stores have no locks, so the last one does.

    Attributes:
        store: Of the destination.
        directory: The destination.
        content: What the file ``begun`` has as long as nobody else began.
    """

    store: Store
    directory: str
    content: bytes

    @property
    def path(self) -> str:
        """Return the path of the file ``begun``."""
        return join(self.directory, UNFINISHED_NAME, CLAIM_NAME)

    def check(self) -> None:
        """Check that no other conversion took the directory, or has ended there.

        Raises:
            UcpError: One did.
        """
        is_ours = self.store.exists(self.path) and self.store.read(self.path) == self.content
        if not is_ours or self.store.exists(join(self.directory, MANIFEST_NAME)):
            raise UcpError(
                f"another process is converting to {self.directory}, or did so meanwhile: give "
                "another destination, or the same command again when it is alone",
                path=self.directory,
            )


def claimed_target(target: TargetFile, token: str) -> TargetFile:
    """Return the target with a name that only the claim of this token has."""
    return target._replace(name=f"{target.name.removesuffix(_SUFFIX)}-{token}{_SUFFIX}")


def unclaimed_name(name: str) -> str:
    """Return the name without the token of a claim."""
    return _TOKEN.sub("", name)


class Streamed(NamedTuple):
    """A whole file to write to a store, or an item to read only."""

    claim: Claim
    head: bytes
    target: TargetFile | None
    items: tuple[WorkItem, ...]

    def do(self, worker: Worker) -> list[Result]:
        """Write the file, then a marker that it is complete."""
        results: list[Result] = []

        def chunks() -> Iterator[memoryview]:
            for item in self.items:
                yield from worker.chunks(item)
                results.append(worker.result(item))

        if self.target is None:
            for _ in chunks():
                pass
            return results
        store, directory, _ = self.claim
        path = join(directory, self.target.name)
        content = chain([memoryview(self.target.header)], chunks())
        self.claim.check()
        store.write_file(path, content, fsync=False)
        self.claim.check()
        marker = self.head + journal.encode(results)
        store.write_atomic(_marker(directory, self.target), marker, fsync=False)
        return results


def _marker(directory: str, target: TargetFile) -> str:
    return join(directory, UNFINISHED_NAME, f"{target.name.removesuffix(_SUFFIX)}{_MARKER_SUFFIX}")


class LocalFiles:
    """Temporary files in the destination, renamed at the end, and their journal.

    Attributes:
        targets: The files, by the names that they get.
        paths: Where they are written.
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
        self._journal = journal.Journal(directory, identity, resume=resume)
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
            try:
                if os.path.lexists(self._directory / target.name):
                    self._take_back(number)
                if _has_size(path, target.num_bytes):
                    sound.add(number)
                else:
                    _allocate(path, target)
            except OSError as error:
                raise StorageError(
                    f"{path} cannot be written: {error.strerror}", path=str(path)
                ) from error
        return sound

    def _take_back(self, number: int) -> None:
        """Rename a file back that an earlier run had renamed when it was killed.

        Raises:
            UcpError: The file of that name is another one.
        """
        path, final = self.paths[number], self._directory / self.targets[number].name
        results = [each for each in self._journal.results if each.item.target == number]
        if (
            not results
            or os.path.lexists(path)
            or not _has_size(final, self.targets[number].num_bytes)
            or not all(self._is_written(result, final) for result in results)
        ):
            raise _not_ours(str(final))
        final.rename(path)

    def resumed(self) -> Iterator[Result]:
        """Yield the journal's results whose bytes are in the files: they are hashed again."""
        for result in self._journal.results:
            if result.item.target < 0 or (
                result.item.target in self._sound
                and self._is_written(result, Path(self.paths[result.item.target]))
            ):
                yield result

    def _is_written(self, result: Result, path: Path) -> bool:
        item = result.item
        blocks: list[int] = []
        buffer = memoryview(bytearray(BLOCK_BYTES))
        with path.open("rb", buffering=0) as file:
            for low, high in _blocks(self.targets[item.target], item):
                file.seek(low)
                done = file.readinto(buffer[: high - low])
                blocks.append(crc32(buffer[:done]))
        return tuple(blocks) == result.blocks

    def batches(self, left: Sequence[WorkItem], num_items: int) -> list[Placed]:
        """Return the items that are left in batches of ``num_items``.

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
        """Give all files their final names.

        Raises:
            UcpError: Another file has one of them.
        """
        for target in self.targets:
            if os.path.lexists(self._directory / target.name):
                raise _not_ours(str(self._directory / target.name))
        for number, target in enumerate(self.targets):
            path = self.paths[number]
            if fsync:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                os.fsync(fd)
                os.close(fd)
            Path(path).replace(self._directory / target.name)
        if fsync:
            # The manifest must not be there without the names.
            fd = os.open(self._directory, os.O_RDONLY | os.O_CLOEXEC)
            os.fsync(fd)
            os.close(fd)

    def remove(self) -> None:
        """Delete everything temporary."""
        self._journal.remove()

    def discard(self) -> None:
        """Delete what was written."""
        self._journal.remove()

    def close(self) -> None:
        """Release the journal; a child calls this too, so that the lock ends with its parent."""
        self._journal.close()


def _blocks(target: TargetFile, item: WorkItem) -> Iterator[tuple[int, int]]:
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
        f"{path} is not from this conversion, which would replace it: move it away and give the "
        "same command again",
        path=path,
    )


def _allocate(path: Path, target: TargetFile) -> None:
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        if may_reserve(fd):
            # A full disk shows now; and writing is 30 % faster on ext4.
            os.posix_fallocate(fd, 0, target.num_bytes)
        else:
            os.ftruncate(fd, target.num_bytes)
        os.pwrite(fd, target.header, 0)
    finally:
        os.close(fd)


class StreamedFiles:
    """Files that are written from the first byte to the last, to any store.

    Where an earlier conversion began, it may live and write still. So no two write to one name:
    who is not the first has its claim in the names of its files.

    Attributes:
        targets: The files, by the names that they have.
    """

    def __init__(
        self,
        targets: Sequence[TargetFile],
        store: Store,
        directory: str,
        identity: str,
        *,
        resume: bool,
    ) -> None:
        """Mark the destination before the first file appears."""
        self._store = store
        self._directory = directory
        self._resume = resume
        self._head = f"{identity}\n".encode()
        token = os.urandom(TOKEN_BYTES).hex()
        self._claim = Claim(store, directory, self._head + token.encode())
        self._is_second = not store.write_atomic(
            self._claim.path, self._claim.content, fsync=False, exclusive=True
        )
        if self._is_second:
            if is_of_export(store.read(self._claim.path)):
                raise in_use(directory)
            store.write_atomic(self._claim.path, self._claim.content, fsync=False)
        self._numbers = {target.name: number for number, target in enumerate(targets)}
        self.targets = [
            claimed_target(target, token) if self._is_second else target for target in targets
        ]
        self._complete: set[int] = set()
        self._is_over = False

    def _markers(self) -> dict[str, str]:
        """Return the paths of all markers, by the names of their files."""
        folder = join(self._directory, UNFINISHED_NAME)
        return {
            name.removesuffix(_MARKER_SUFFIX) + _SUFFIX: join(folder, name)
            for name in self._store.list(folder)
            if name.endswith(_MARKER_SUFFIX)
        }

    def resumed(self) -> Iterator[Result]:
        """Yield the results of the files that an earlier run completed: they are hashed again."""
        markers = self._markers() if self._is_second and self._resume else {}
        for name, path in markers.items():
            number = self._numbers.get(unclaimed_name(name), -1)
            data = self._store.read(path)
            if number < 0 or number in self._complete or not data.startswith(self._head):
                continue
            target = self.targets[number]._replace(name=name)
            goal = join(self._directory, name)
            results = journal.decode(data[len(self._head) :])
            if (
                self._store.exists(goal)
                and self._store.size(goal) == target.num_bytes
                and all(self._is_written(result, target) for result in results)
            ):
                self._complete.add(number)
                self.targets[number] = target
                yield from results

    def _is_written(self, result: Result, target: TargetFile) -> bool:
        """Return whether the bytes of an item are in the file."""
        spans = list(_blocks(target, result.item))
        buffers = [memoryview(bytearray(high - low)) for low, high in spans]
        self._store.read_ranges(
            join(self._directory, target.name),
            [(low, (buffer,)) for (low, _), buffer in zip(spans, buffers, strict=True)],
        )
        return tuple(map(crc32, buffers)) == result.blocks

    def batches(self, left: Sequence[WorkItem], num_items: int) -> list[Streamed]:  # noqa: ARG002
        """Return one batch for each file that is left, and one for each item that only reads."""
        by_file: dict[int, list[WorkItem]] = {}
        for item in left:
            by_file.setdefault(item.target, []).append(item)
        checks = by_file.pop(-1, [])
        work = [
            Streamed(self._claim, self._head, target, tuple(by_file.get(number, ())))
            for number, target in enumerate(self.targets)
            if number not in self._complete
        ]
        return work + [Streamed(self._claim, b"", None, (item,)) for item in checks]

    def note(self, result: Result) -> None:
        """Do nothing: complete files have markers."""

    def finish(self, *, fsync: bool) -> None:
        """Check that this run may commit; the files appeared when they were complete.

        Raises:
            UcpError: Another conversion writes there.
        """
        del fsync
        self._claim.check()

    def remove(self) -> None:
        """Delete the markers, and what else earlier conversions left, which cannot commit now."""
        self._is_over = True
        markers = self._markers()
        names = {target.name for target in self.targets}
        claimed = {n for n in self._store.list(self._directory) if unclaimed_name(n) != n}
        self._store.delete_files(
            [
                join(self._directory, name)
                for name in {*markers, *claimed} - names
                if unclaimed_name(name) in self._numbers
            ]
        )
        self._store.delete_files(list(markers.values()))
        self._store.delete(self._claim.path)

    def discard(self) -> None:
        """Delete what was written, unless another conversion has taken over."""
        with suppress(UcpError):
            self._claim.check()
            for target in self.targets:
                self._store.delete(join(self._directory, target.name))
            self.remove()

    def close(self) -> None:
        """Delete what was written if another conversion has committed without it."""
        path = join(self._directory, MANIFEST_NAME)
        with suppress(StorageError):
            if not self._is_over and self._store.exists(path):
                data = self._store.read(path)
                names = [t.name for t in self.targets if f'"{t.name}"'.encode() not in data]
                self._store.delete_files([join(self._directory, name) for name in names])
