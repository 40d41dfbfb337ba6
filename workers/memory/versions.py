"""Read versions in memory as checkpoints.

A version in memory is a native distributed checkpoint whose files are buffers of arenas. It is
opened and loaded as any other, under any layout, and every block is verified.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ucp_core.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    StorageError,
    UcpError,
)
from ucp_core.manifest import Kind, Manifest, from_bytes, merge
from ucp_core.native import Checkpoint, checkpoint_name
from ucp_core.reading import Mapped
from ucp_core.storage import ReadRange, RefusingStore
from workers.memory.arena import Arena
from workers.protocol import Held


class Part(Protocol):
    """One rank's part of a version: its data, followed by its record."""

    @property
    def held(self) -> Held:
        """Return the buffer's header from when the part was found."""

    def fill(self, offset_bytes: int, targets: Sequence[memoryview]) -> None:
        """Read from ``offset_bytes`` of the buffer's body into the targets, one after the other.

        Raise ``StorageError`` if the part is gone.
        """


def mapped_part(part: Part) -> Mapped | None:
    """Return the data of a part that this process maps, else None."""
    find: Callable[[], Mapped | None] | None = getattr(part, "mapped", None)
    return None if find is None else find()


def ask_part(part: Part, ranges: Sequence[tuple[int, int]]) -> None:
    """Announce the next reads to a part on another node."""
    ask: Callable[[Sequence[tuple[int, int]]], None] | None = getattr(part, "ahead", None)
    if ask is not None:
        ask(ranges)


@dataclass(frozen=True, slots=True)
class LocalPart:
    """A part in memory that this process maps."""

    arena: Arena
    held: Held

    def fill(self, offset_bytes: int, targets: Sequence[memoryview]) -> None:
        """Copy, and check that the buffer was not overwritten in the meantime."""
        body = np.frombuffer(self.arena.body(self.held.buffer), dtype=np.uint8)
        for target in targets:
            stop = offset_bytes + len(target)
            np.copyto(np.frombuffer(target, dtype=np.uint8), body[offset_bytes:stop])
            offset_bytes = stop
        self._confirm()

    def mapped(self) -> Mapped:
        """Return the part's data in place."""
        data = self.arena.body(self.held.buffer)[: self.held.data_bytes]
        return Mapped(data, lambda _: self._confirm())

    def _confirm(self) -> None:
        now = self.arena.held(self.held.buffer)
        if now != self.held:
            raise StorageError(
                f"the snapshot of rank {self.held.rank} after step {self.held.step} was "
                "overwritten while it was read; use another source",
                step=self.held.step,
                rank=self.held.rank,
            )


def open_version(by_rank: Mapping[int, Part]) -> Checkpoint:
    """Return the version made up of the parts of all ranks, as a checkpoint.

    Raises:
        CheckpointNotFoundError: A rank's part is missing.
        CheckpointCorruptError: A record is damaged (``facts["rank"]`` names its rank), or the
            records contradict each other.
        StorageError: A part is gone.
    """
    records: list[Manifest] = []
    files: dict[str, Part] = {}
    for rank in range(max((part.held.world_size for part in by_rank.values()), default=1)):
        if rank not in by_rank:
            raise CheckpointNotFoundError(
                f"no reachable memory has the part of rank {rank}", rank=rank
            )
        record = _record(by_rank[rank])
        records.append(record)
        files |= dict.fromkeys(record.files, by_rank[rank])
    manifest = merge(records)
    directory = checkpoint_name(manifest.step)
    return Checkpoint(store=MemoryTier(files), directory=directory, manifest=manifest)


def _record(part: Part) -> Manifest:
    held = part.held
    data = bytearray(held.record_bytes)
    part.fill(held.data_bytes, [memoryview(data)])
    where = f"the snapshot of rank {held.rank} after step {held.step}"
    try:
        record = from_bytes(bytes(data), where=where)
    except UcpError as error:
        error.facts["rank"] = held.rank
        raise
    found = (record.kind, record.step, record.attempt, record.rank, record.world_size)
    if found != (Kind.RANK_RECORD, held.step, held.attempt, held.rank, held.world_size):
        raise CheckpointCorruptError(
            f"{where} of attempt {held.attempt} says (kind, step, attempt, rank, world_size) = "
            f"{found}; use another source",
            where=where,
            rank=held.rank,
        )
    return record


class MemoryTier(RefusingStore):
    """The data files of one version by name, as a read-only store."""

    #: Larger requests gain nothing, because they exceed the second-level cache.
    request_bytes = 4 << 20

    def __init__(self, files: Mapping[str, Part]) -> None:
        self._files = dict(files)

    def rank_of(self, path: str) -> int:
        """Return the rank that a file belongs to."""
        return self._part(path).held.rank

    def read_ranges(self, path: str, ranges: Sequence[ReadRange]) -> None:
        """Fill the buffers of every range."""
        part = self._part(path)
        for offset_bytes, buffers in ranges:
            stop = offset_bytes + sum(len(buffer) for buffer in buffers)
            if stop > part.held.data_bytes:
                raise StorageError(
                    f"{path} has {part.held.data_bytes} bytes in memory, needed are {stop}; use "
                    "another source",
                    path=path,
                )
            part.fill(offset_bytes, buffers)

    def ahead(self, path: str, ranges: Sequence[tuple[int, int]]) -> None:
        """Ask a peer for the ranges that this thread reads next."""
        ask_part(self._part(path), ranges)

    def mapped(self, path: str) -> Mapped | None:
        """Return the bytes of a file that this process maps, else None."""
        return mapped_part(self._part(path))

    def read_range(self, path: str, offset_bytes: int, size_bytes: int) -> bytes:
        """Return exactly ``size_bytes`` from ``offset_bytes``."""
        data = bytearray(size_bytes)
        self.read_ranges(path, [(offset_bytes, (memoryview(data),))])
        return bytes(data)

    def read(self, path: str) -> bytes:
        """Return the whole file."""
        return self.read_range(path, 0, self.size(path))

    def exists(self, path: str) -> bool:
        """Return whether the version has such a file."""
        return _name(path) in self._files

    def size(self, path: str) -> int:
        """Return the size of a file."""
        return self._part(path).held.data_bytes

    def lock(self, path: str, *, shared: bool) -> AbstractContextManager[bool | None]:
        """Lock nothing: a reader of an overwritten buffer gets an error."""
        del path, shared
        return nullcontext(None)

    def _part(self, path: str) -> Part:
        part = self._files.get(_name(path))
        if part is None:
            raise StorageError(f"{path} is in no memory", path=path, missing=True)
        return part


def _name(path: str) -> str:
    return path.rpartition("/")[2]
