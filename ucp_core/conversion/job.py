"""A conversion laid out: every work item is known before a byte moves, and one may commit it."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ucp_core.conversion.work_items import Item, Job, Result, Worker
from ucp_core.errors import CheckpointCorruptError, StorageError, UcpError
from ucp_core.formats import (
    INDEX_NAME,
    TargetFile,
    extra_file,
    refuse_inside,
    small_files,
    target_files,
)
from ucp_core.geometry import Box, Fragment, StateMap, TensorEntry, TensorKey
from ucp_core.manifest import FileEntry, Kind, Manifest, from_bytes, to_bytes
from ucp_core.native import MANIFEST_NAME, UNFINISHED_NAME, Checkpoint
from ucp_core.numerics import BLOCK_BYTES, combine, combine_blocks, crc32
from ucp_core.reading import Collector, plan_extents
from ucp_core.storage import Store, is_local, join

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

#: Large enough that handing it out costs nothing, small enough that workers end together.
_ITEM_BYTES_MAX = 16 * BLOCK_BYTES
_ITEMS_MIN = 64
#: Of tensors that are averaged or strided, so much is gathered at a time.
GENERAL_BYTES_MAX = 8 * BLOCK_BYTES
_NAMES_TOLD = 4


class Conversion:
    """One conversion, laid out: its items, what is known of those that are done, the commit.

    Whoever runs the items, in whatever order and place, gives their results to ``take`` and then
    calls ``commit``. ``convert`` is the way for one machine.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        store: Store,
        directory: str,
        *,
        memory_bytes: int,
        workers: int,
    ) -> None:
        """Check the source and lay the destination out; nothing is written.

        Raises:
            UcpError: The destination holds a checkpoint or other files, or is the source.
            CheckpointCorruptError: The source has holes, or files are missing or too short.
        """
        self.checkpoint = checkpoint
        self.store = store
        self.directory = directory
        _check_destination(checkpoint, store, directory)
        checkpoint.state_map.prove_coverage()
        files = tuple(sorted(_file_ends(checkpoint.state_map)))
        self._found = _check_files(checkpoint)
        self.identity = _identity(checkpoint, self._found)
        self.job = _job(checkpoint, files, store, memory_bytes, workers)
        _check_contents(store, directory, self.job.targets)
        self.items = tuple(_items(self.job))
        self.total_bytes = sum(item.stop - item.start for item in self.items)
        self.collector = Collector(checkpoint.state_map, checkpoint.directory, files)
        self._blocks: dict[Item, tuple[int, ...]] = {}

    def take(self, result: Result) -> None:
        """Take what was found out about an item; of one that was done twice, the first counts.

        Raises:
            ChecksumMismatchError: The source is damaged.
        """
        if result.item in self._blocks:
            return
        self._blocks[result.item] = result.blocks
        self.collector.add(result.notes)

    @property
    def left(self) -> list[Item]:
        """Return the items that are not done."""
        return [item for item in self.items if item not in self._blocks]

    def small_files(self) -> dict[str, bytes]:
        """Return the contents of the files beside the tensors, by name.

        Raises:
            UcpError: An extra value is not JSON.
        """
        try:
            return small_files(self.job.targets, self.checkpoint.extra)
        except (TypeError, ValueError) as error:
            raise UcpError(f"extra cannot be kept as JSON: {error}") from error

    def manifest(self, small: dict[str, bytes]) -> Manifest:
        """Return the manifest of what was made, when every item is done.

        Raises:
            CheckpointCorruptError: The source's files changed meanwhile.
        """
        self.collector.finish()
        if _check_files(self.checkpoint) != self._found:
            raise CheckpointCorruptError(
                f"files of {self.checkpoint.directory} changed while they were converted: "
                "convert again when nobody writes there",
                path=self.checkpoint.directory,
            )
        source = self.checkpoint.manifest
        blocks: dict[int, list[int]] = {}
        for item in self.items:
            blocks.setdefault(item.target, []).extend(self._blocks[item])
        files = {
            name: FileEntry(num_bytes=len(data), crc32=crc32(data)) for name, data in small.items()
        }
        entries: dict[TensorKey, TensorEntry] = {}
        for number, target in enumerate(self.job.targets):
            made, value = _entries(target, blocks.get(number, []))
            entries |= made
            files[target.name] = FileEntry(num_bytes=target.num_bytes, crc32=value)
        return replace(
            source,
            kind=Kind.UNIVERSAL,
            state_map=StateMap(entries=entries, block_bytes=BLOCK_BYTES),
            files=files,
            extra={name: extra_file(name) for name in self.checkpoint.extra},
            world_size=0,
            rank=-1,
        )

    def commit(self, manifest: Manifest, small: dict[str, bytes], *, fsync: bool) -> Checkpoint:
        """Write the small files and, last, the manifest; return what was made.

        Raises:
            UcpError: Another checkpoint was committed there meanwhile.
        """
        path = join(self.directory, MANIFEST_NAME)
        data = to_bytes(manifest)
        # What no reader would accept must not be committed.
        parsed = from_bytes(data, where=path)
        for name, content in small.items():
            self.store.write_atomic(join(self.directory, name), content, fsync=fsync)
        if not self.store.write_atomic(path, data, fsync=fsync, exclusive=True):
            raise UcpError(f"{self.directory} got a checkpoint from somebody else", path=path)
        return Checkpoint(store=self.store, directory=self.directory, manifest=parsed)


def _check_destination(checkpoint: Checkpoint, store: Store, directory: str) -> None:
    path = join(directory, MANIFEST_NAME)
    if store.exists(path):
        raise UcpError(
            f"{directory} holds a committed checkpoint already: give another destination or "
            "remove it",
            path=path,
        )
    refuse_inside(checkpoint, store, directory)


def _check_contents(store: Store, directory: str, targets: Sequence[TargetFile]) -> None:
    """Raise if anything is there but what an interrupted conversion to these files left behind.

    A checkpoint of another format has files of the same names, or is read by a name of its own:
    what both would be taken for, nobody can say.
    """
    names = [name for name in store.list(directory) if not name.startswith(".")]
    if store.exists(join(directory, UNFINISHED_NAME)):
        own = {INDEX_NAME, extra_file("").partition("/")[0], *(target.name for target in targets)}
        names = [name for name in names if name not in own]
    if not names:
        return
    from ucp_core.formats import recognise

    try:
        known = recognise(store, directory)
    except UcpError:
        known = None
    what = f"a checkpoint of {known}" if known else "other files"
    more = f" and {len(names) - _NAMES_TOLD} more" if len(names) > _NAMES_TOLD else ""
    raise UcpError(
        f"{directory} holds {what} ({', '.join(names[:_NAMES_TOLD])}{more}), which a conversion "
        "would mix with its own: give a new or empty folder as destination",
        path=directory,
        names=names,
    )


def _file_ends(state_map: StateMap) -> dict[str, int]:
    """Return how many bytes each file must have for its fragments and extents."""
    ends: dict[str, int] = {}
    for entry in state_map.entries.values():
        for fragment in entry.fragments:
            end = fragment.offset_bytes + fragment.num_bytes
            ends[fragment.file] = max(ends.get(fragment.file, 0), end)
    for file, extents in state_map.extents.items():
        if file in ends:
            ends[file] = max(ends[file], *(e.offset_bytes + e.num_bytes for e in extents))
    return ends


def _check_files(checkpoint: Checkpoint) -> list[tuple[str, int, int]]:
    """Return ``(name, size, time of change)`` of the source's files.

    Raises:
        CheckpointCorruptError: One is missing, or has another size than it must have.
    """
    found: list[tuple[str, int, int]] = []
    for file, end in sorted(_file_ends(checkpoint.state_map).items()):
        path = join(checkpoint.directory, file)
        changed_ns = 0
        try:
            size = checkpoint.store.size(path)
        except StorageError as error:
            if not error.facts.get("missing"):
                raise
            raise CheckpointCorruptError(
                f"file {path} is missing: {_of(checkpoint, file)} is in it", path=path
            ) from error
        listed = checkpoint.manifest.files.get(file)
        if size < end or (listed is not None and size != listed.num_bytes):
            expected = listed.num_bytes if listed is not None else end
            raise CheckpointCorruptError(
                f"file {path} has {size} bytes, not {expected}: {_of(checkpoint, file)} is in "
                "it; use another checkpoint",
                path=path,
            )
        if is_local(checkpoint.store) and not file.startswith("@"):
            changed_ns = Path(path).stat().st_mtime_ns
        found.append((file, size, changed_ns))
    return found


def _of(checkpoint: Checkpoint, file: str) -> str:
    entries = checkpoint.state_map.entries.values()
    return next(str(e.key) for e in entries for f in e.fragments if f.file == file)


def _identity(checkpoint: Checkpoint, files: Sequence[tuple[str, int, int]]) -> str:
    """Return a name of what is converted: another source, or another cut of it, has another."""
    digest = hashlib.sha256(repr((checkpoint.directory, _ITEM_BYTES_MAX, files)).encode())
    for key, entry in sorted(checkpoint.state_map.entries.items()):
        # Plain tuples, which Python prints in a quarter of the time; without the many checksums.
        facts = [(*f.box, *f[1:5], *f[6:]) for f in entry.fragments]
        digest.update(repr((key, entry.dtype, entry.shape, entry.copies, facts)).encode())
    for file, extents in sorted(checkpoint.state_map.extents.items()):
        digest.update(repr((file, extents)).encode())
    return digest.hexdigest()


def _job(
    checkpoint: Checkpoint, files: tuple[str, ...], to: Store, memory_bytes: int, workers: int
) -> Job:
    share = memory_bytes // workers // BLOCK_BYTES
    chunk = BLOCK_BYTES
    if not (is_local(checkpoint.store) and is_local(to)):
        # Every request waits for an answer first, so few large ones.
        wanted = min(checkpoint.store.request_bytes, _ITEM_BYTES_MAX) // BLOCK_BYTES
        chunk = max(1, min(wanted, share // 4)) * BLOCK_BYTES
    return Job(
        store=checkpoint.store,
        directory=checkpoint.directory,
        state_map=checkpoint.state_map,
        files=files,
        targets=target_files(checkpoint.state_map),
        extents=plan_extents(checkpoint.state_map, files),
        chunk_bytes=chunk,
        general_bytes=max(1, min(GENERAL_BYTES_MAX // BLOCK_BYTES, share // 4)) * BLOCK_BYTES,
    )


def _items(job: Job) -> Iterator[Item]:
    """Yield ranges of the targets that end where tensors or their blocks do, then the checks."""
    total = sum(file.num_bytes for file in job.targets)
    size = max(1, min(_ITEM_BYTES_MAX, total // _ITEMS_MIN) // BLOCK_BYTES) * BLOCK_BYTES
    for number, file in enumerate(job.targets):
        start = len(file.header)
        for entry, offset_bytes in file.tensors:
            end = offset_bytes + entry.num_bytes
            while end - start > size:
                # Blocks are counted from where the tensor begins.
                blocks = (start + size - offset_bytes) // BLOCK_BYTES
                cut = offset_bytes + blocks * BLOCK_BYTES
                yield Item(number, -1, start, cut)
                start = cut
        if start < file.num_bytes:
            yield Item(number, -1, start, file.num_bytes)
    for source, low, high in job.extents.gaps:
        for start in range(low, high, size):
            yield Item(-1, source, start, min(start + size, high))


def _entries(target: TargetFile, blocks: list[int]) -> tuple[dict[TensorKey, TensorEntry], int]:
    """Return the tensors of a file as they are now, and the crc32 of the file."""
    total = crc32(target.header)
    entries: dict[TensorKey, TensorEntry] = {}
    done = 0
    for entry, offset_bytes in target.tensors:
        num_bytes = entry.num_bytes
        num_blocks = -(-num_bytes // BLOCK_BYTES)
        own = tuple(blocks[done : done + num_blocks]) or (0,)
        done += num_blocks
        value = combine_blocks(own, num_bytes, BLOCK_BYTES)
        total = combine(total, value, num_bytes)
        whole = Box.full(entry.shape)
        fragment = Fragment(whole, target.name, offset_bytes, num_bytes, value, own)
        entries[entry.key] = replace(entry, fragments=(fragment,), copies=1)
    return entries, total


def differing_replicas(
    checkpoint: Checkpoint, keys: Collection[TensorKey]
) -> Iterator[tuple[TensorKey, CheckpointCorruptError]]:
    """Read those of the tensors that have replicas; yield the ones whose replicas differ.

    No checksum is verified.
    """
    entries = {
        key: replace(
            entry, fragments=tuple(f._replace(crc32=None, blocks=()) for f in entry.fragments)
        )
        for key, entry in checkpoint.state_map.entries.items()
        if key in keys and any(fragment.replica for fragment in entry.fragments)
    }
    state_map = StateMap(entries=entries, block_bytes=checkpoint.state_map.block_bytes)
    manifest = replace(checkpoint.manifest, state_map=state_map)
    files = tuple(sorted(_file_ends(state_map)))
    source = replace(checkpoint, manifest=manifest)
    job = _job(source, files, checkpoint.store, 4 * GENERAL_BYTES_MAX, workers=1)
    worker = Worker(job)
    try:
        for number, target in enumerate(job.targets):
            for entry, low in target.tensors:
                try:
                    for _ in worker.chunks(Item(number, -1, low, low + entry.num_bytes)):
                        pass
                except CheckpointCorruptError as error:
                    yield entry.key, error
    finally:
        worker.close()
