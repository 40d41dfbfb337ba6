"""A conversion as work items, all known before a byte moves; one process commits."""

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from ucp_core.conversion.streams import unclaimed_name
from ucp_core.conversion.work_items import ItemWorker, Job, Result, WorkItem
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
from ucp_core.numerics import BLOCK_BYTES, combine, combine_blocks, crc32, shortened
from ucp_core.reading import Collector, plan_extents
from ucp_core.storage import Store, is_link, is_local, join

#: Large enough to make the cost of dispatch negligible, small enough that workers finish together.
_ITEM_BYTES_MAX = 16 * BLOCK_BYTES
_ITEMS_MIN = 64
#: How many bytes of averaged or strided tensors to gather at a time.
GENERAL_BYTES_MAX = 8 * BLOCK_BYTES
_NAMES_TOLD = 4


class Conversion:
    """One conversion: its items, the results of finished ones, and the commit.

    Items may be done in any order and on any machine. ``take`` gets their results; ``commit`` comes
    last.

    Attributes:
        read_bytes: Bytes read in this run.
        written_bytes: Bytes written in this run.
        resumed_bytes: Bytes taken over from an interrupted run.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        store: Store,
        directory: str,
        *,
        memory_bytes: int,
        workers: int,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Check the source and plan the destination; write nothing.

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
        self.read_bytes = self.written_bytes = self.resumed_bytes = 0
        self._progress = progress
        self._done_bytes = 0
        self._blocks: dict[WorkItem, tuple[int, ...]] = {}

    def resume(self, results: Iterable[Result]) -> None:
        """Take over the work of an interrupted run; raise ``ChecksumMismatchError`` on damage."""
        known = set(self.items)
        for result in results:
            if result.item in known:
                self._add(result)
                if result.item.target >= 0:
                    self.resumed_bytes += result.item.stop - result.item.start

    def rename(self, targets: Sequence[TargetFile]) -> None:
        """Rename the targets."""
        self.job = replace(self.job, targets=tuple(targets))

    def take(self, result: Result) -> None:
        """Take the result of an item; raise ``ChecksumMismatchError`` if the source is damaged."""
        self.read_bytes += result.read_bytes
        if result.item.target >= 0:
            self.written_bytes += result.item.stop - result.item.start
        self._add(result)

    def _add(self, result: Result) -> None:
        # A task believed dead may still deliver: the first result counts.
        if result.item in self._blocks:
            return
        self._blocks[result.item] = result.blocks
        self.collector.add(result.notes)
        self._done_bytes += result.item.stop - result.item.start
        if self._progress is not None:
            self._progress(self._done_bytes, self.total_bytes)

    @property
    def left(self) -> list[WorkItem]:
        """Return the items that are not done."""
        return [item for item in self.items if item not in self._blocks]

    def small_files(self) -> dict[str, bytes]:
        """Return the contents of the files beside the tensors, by name; values must be JSON."""
        try:
            return small_files(self.job.targets, self.checkpoint.extra)
        except (TypeError, ValueError) as error:
            raise UcpError(f"extra cannot be kept as JSON: {error}") from error

    def manifest(self, small: dict[str, bytes]) -> Manifest:
        """Return the manifest; raise ``CheckpointCorruptError`` if the source has changed."""
        self.collector.finish()
        if _check_files(self.checkpoint) != self._found:
            raise CheckpointCorruptError(
                f"files of {self.checkpoint.directory} changed while they were converted: "
                "convert again when nothing writes there",
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

    def write_small(self, small: dict[str, bytes], *, fsync: bool) -> None:
        """Write the files beside the tensors; raise ``UcpError`` if a name is taken."""
        for name, content in small.items():
            path = join(self.directory, name)
            is_ours = self.store.write_atomic(path, content, fsync=fsync, exclusive=True)
            if not is_ours and self.store.read(path) != content:
                raise UcpError(
                    f"{path} is not from this conversion: if no other one to {self.directory} "
                    "is running or has finished, move it away and give the same command again",
                    path=path,
                )

    def commit(self, manifest: Manifest, *, fsync: bool) -> Checkpoint:
        """Write the manifest once everything else is there; return the checkpoint.

        Raises:
            UcpError: Another checkpoint was committed there during the conversion.
        """
        path = join(self.directory, MANIFEST_NAME)
        data = to_bytes(manifest)
        # Never commit a manifest that readers would reject.
        parsed = from_bytes(data, where=path)
        if not self.store.write_atomic(path, data, fsync=fsync, exclusive=True):
            raise UcpError(f"another process committed a checkpoint to {self.directory}", path=path)
        return Checkpoint(store=self.store, directory=self.directory, manifest=parsed)


def _check_destination(checkpoint: Checkpoint, store: Store, directory: str) -> None:
    path = join(directory, MANIFEST_NAME)
    if store.exists(path):
        if not store.size(path):
            raise UcpError(
                f"{path} is empty: a process is writing it now or was killed before it could; "
                "if none is, remove it and give the same command again",
                path=path,
            )
        raise UcpError(
            f"{directory} holds a committed checkpoint already: give another destination or "
            "remove it",
            path=path,
        )
    refuse_inside(checkpoint, store, directory)


def _check_contents(store: Store, directory: str, targets: Sequence[TargetFile]) -> None:
    """Raise if the destination holds anything but the files of an interrupted conversion.

    Other formats use the same file names, so a mixed folder could be read as either.
    """
    names = [name for name in store.list(directory) if not name.startswith(".")]
    if store.list(join(directory, UNFINISHED_NAME)):
        own = {INDEX_NAME, extra_file("").partition("/")[0], *(target.name for target in targets)}
        names = [
            n for n in names if unclaimed_name(n) not in own or is_link(store, join(directory, n))
        ]
    if not names:
        return
    from ucp_core.formats import recognise

    try:
        known = recognise(store, directory)
    except UcpError:
        known = None
    what = f"a checkpoint of {known}" if known else "other files"
    raise UcpError(
        f"{directory} holds {what} ({shortened(names, _NAMES_TOLD)}): give a new or empty "
        "folder as destination",
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
    """Return ``(name, size, modification time)`` of the source's files."""
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
    """Return a hash of the source and of its division into items."""
    digest = hashlib.sha256(repr((checkpoint.directory, _ITEM_BYTES_MAX, files)).encode())
    for key, entry in sorted(checkpoint.state_map.entries.items()):
        # As plain tuples, which Python prints in a quarter of the time, and without checksums.
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
        # Every request waits for an answer, so make few large ones.
        wanted = min(checkpoint.store.request_bytes, _ITEM_BYTES_MAX) // BLOCK_BYTES
        chunk = max(1, min(wanted, share // 4)) * BLOCK_BYTES
    return Job(
        store=checkpoint.store,
        directory=checkpoint.directory,
        state_map=checkpoint.state_map,
        files=files,
        targets=target_files(checkpoint.state_map, checkpoint.manifest.roles),
        extents=plan_extents(checkpoint.state_map, files),
        chunk_bytes=chunk,
        general_bytes=max(1, min(GENERAL_BYTES_MAX // BLOCK_BYTES, share // 4)) * BLOCK_BYTES,
    )


def _items(job: Job) -> Iterator[WorkItem]:
    """Yield ranges of the targets that end where tensors or blocks end, then the checks."""
    total = sum(file.num_bytes for file in job.targets)
    size = max(1, min(_ITEM_BYTES_MAX, total // _ITEMS_MIN) // BLOCK_BYTES) * BLOCK_BYTES
    for number, file in enumerate(job.targets):
        start = len(file.header)
        for entry, offset_bytes in file.tensors:
            end = offset_bytes + entry.num_bytes
            while end - start > size:
                # Blocks count from the tensor's first byte.
                blocks = (start + size - offset_bytes) // BLOCK_BYTES
                cut = offset_bytes + blocks * BLOCK_BYTES
                yield WorkItem(number, -1, start, cut)
                start = cut
        if start < file.num_bytes:
            yield WorkItem(number, -1, start, file.num_bytes)
    for source, low, high in job.extents.gaps:
        for start in range(low, high, size):
            yield WorkItem(-1, source, start, min(start + size, high))


def _entries(target: TargetFile, blocks: list[int]) -> tuple[dict[TensorKey, TensorEntry], int]:
    """Return the tensors of a target file, and the crc32 of the file."""
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
    """Read the tensors that have replicas; yield those whose replicas differ.

    This verifies no checksums.
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
    with closing(ItemWorker(job)) as worker:
        for number, target in enumerate(job.targets):
            for entry, low in target.tensors:
                try:
                    for _ in worker.chunks(WorkItem(number, -1, low, low + entry.num_bytes)):
                        pass
                except CheckpointCorruptError as error:
                    yield entry.key, error
