"""Where a conversion writes to storage without locks: each file as a stream, under its own names.

There, a claim does not show whether its owner is alive, so the last conversion to begin may commit.
"""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import NamedTuple

from ucp_core.conversion import resume_journal
from ucp_core.conversion.outputs import is_written
from ucp_core.conversion.work_items import ItemWorker, Result, WorkItem
from ucp_core.errors import StorageError, UcpError
from ucp_core.formats import TargetFile
from ucp_core.native import CLAIM_NAME, MANIFEST_NAME, UNFINISHED_NAME, in_use, is_of_export
from ucp_core.storage import Store, join

_SUFFIX = ".safetensors"
_MARKER_SUFFIX = f"{_SUFFIX}.json"
#: Length of the random part of a claim, which may be in the names of files.
_TOKEN_BYTES = 8
_TOKEN = re.compile(rf"-[0-9a-f]{{{2 * _TOKEN_BYTES}}}(?=\.safetensors$)")


class Claim(NamedTuple):
    """Ownership of a directory in a store without locks: the last conversion to begin has it."""

    store: Store
    directory: str  #: The destination.
    content: bytes  #: The content of the file ``begun`` until another conversion begins.

    @property
    def path(self) -> str:
        """Return the path of the file ``begun``."""
        return join(self.directory, UNFINISHED_NAME, CLAIM_NAME)

    def check(self) -> None:
        """Raise ``UcpError`` if another conversion took the directory, or has finished there."""
        is_ours = self.store.exists(self.path) and self.store.read(self.path) == self.content
        if not is_ours or self.store.exists(join(self.directory, MANIFEST_NAME)):
            raise UcpError(
                f"another process is converting to {self.directory}, or has just done so: give "
                "another destination, or the same command again when no other converts there",
                path=self.directory,
            )


def unclaimed_name(name: str) -> str:
    """Return the name without a claim's token."""
    return _TOKEN.sub("", name)


class Streamed(NamedTuple):
    """A whole file to write to a store, or an item that is only read."""

    claim: Claim
    head: bytes
    target: TargetFile | None
    items: tuple[WorkItem, ...]

    def do(self, worker: ItemWorker) -> list[Result]:
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
        marker = self.head + resume_journal.encode(results)
        name = f"{self.target.name.removesuffix(_SUFFIX)}{_MARKER_SUFFIX}"
        store.write_atomic(join(directory, UNFINISHED_NAME, name), marker, fsync=False)
        return results


class StreamedFiles:
    """Files that are written from first to last byte, to any store.

    An earlier conversion that began here may still be alive and writing. No two conversions may
    write to one name, so all but the first put the token of their claim into their file names.

    Attributes:
        targets: The files, by their names.
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
        token = os.urandom(_TOKEN_BYTES).hex()
        self._claim = Claim(store, directory, self._head + token.encode())
        self._is_second = not store.write_atomic(
            self._claim.path, self._claim.content, fsync=False, exclusive=True
        )
        if self._is_second:
            if is_of_export(store.read(self._claim.path)):
                raise in_use(directory)
            store.write_atomic(self._claim.path, self._claim.content, fsync=False)
        self._numbers = {target.name: number for number, target in enumerate(targets)}
        # Complete files that appeared between the look at the destination and the claim.
        taken = [] if self._is_second else [n for n in store.list(directory) if n in self._numbers]
        if taken:
            store.delete(self._claim.path)
            raise UcpError(
                f"another process has just written {taken[0]} to {directory}: give another "
                "destination",
                path=join(directory, taken[0]),
            )
        # With the token in its name, a target belongs to this claim alone.
        suffix = f"-{token}{_SUFFIX}" if self._is_second else _SUFFIX
        self.targets = [
            target._replace(name=target.name.removesuffix(_SUFFIX) + suffix) for target in targets
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
        """Yield the results of the files that an earlier run completed; they are hashed again."""
        markers = self._markers() if self._is_second and self._resume else {}
        for name, path in markers.items():
            number = self._numbers.get(unclaimed_name(name), -1)
            data = self._store.read(path)
            if number < 0 or number in self._complete or not data.startswith(self._head):
                continue
            target = self.targets[number]._replace(name=name)
            goal = join(self._directory, name)
            results = resume_journal.decode(data[len(self._head) :])
            if (
                self._store.exists(goal)
                and self._store.size(goal) == target.num_bytes
                and all(is_written(self._store, goal, target, result) for result in results)
            ):
                self._complete.add(number)
                self.targets[number] = target
                yield from results

    def batches(self, left: Sequence[WorkItem], num_items: int) -> list[Streamed]:  # noqa: ARG002
        """Return one batch for each remaining file, and one for each item that is only read."""
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
        """Raise ``UcpError`` if another conversion writes there; complete files are in place."""
        del fsync
        self._claim.check()

    def remove(self) -> None:
        """Delete the markers and the remains of earlier conversions, which can no longer commit."""
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
