"""Saves one rank's part of a state without communication, and commits when all parts are there."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ucp_core._open import MANIFEST_NAME, LocalTensor, bytes_of
from ucp_core.checksums import BLOCK_BYTES, BlockHasher, combine, combine_blocks
from ucp_core.errors import CheckpointCorruptError
from ucp_core.manifest import FileEntry, Kind, Manifest, from_bytes, merge, to_bytes
from ucp_core.statemap import DTYPE_BYTES, Fragment, StateMap, TensorEntry, TensorKey
from ucp_core.storage.base import Store, join

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveResult:
    """What ``save_rank`` did.

    Attributes:
        committed: Whether the checkpoint of all ranks is committed now.
        size_bytes: Bytes of tensors that this rank wrote.
        seconds: Time until the record was written and the commit was tried.
    """

    committed: bool
    size_bytes: int
    seconds: float


def save_rank(  # noqa: PLR0913 - each is a fact that the record states
    store: Store,
    directory: str,
    *,
    step: int,
    attempt: int,
    rank: int,
    world_size: int,
    tensors: Sequence[LocalTensor],
    extra: Mapping[str, Any],
    param_groups: Sequence[Mapping[str, Any]],
    source: Mapping[str, Any],
    fsync: bool,
) -> SaveResult:
    """Write this rank's part of the state, and commit if it was the last one.

    Every rank calls it, none waits for another. ``extra`` and the hyper-parameters of
    ``param_groups`` count as rank 0 gives them. What is committed already is not written again.

    Args:
        store: Where to.
        directory: Of this step's checkpoint.
        step: The optimizer step after which the state was taken.
        attempt: The fencing token.
        rank: This rank.
        world_size: Ranks that save.
        tensors: What this rank holds; replicas and empty boxes are skipped.
        extra: Small named values, JSON.
        param_groups: The optimizer's groups with ``params`` as fqns, JSON.
        source: Who writes, JSON.
        fsync: Whether the data must survive a loss of power before the commit.

    Raises:
        StorageError: The storage refused.
        UncoveredRegionError: The ranks together do not hold every element exactly once.
    """
    begun = perf_counter()
    held = _committed_manifest(store, directory)
    if held is not None and (held.step, held.attempt) == (step, attempt):
        return SaveResult(committed=True, size_bytes=0, seconds=perf_counter() - begun)
    name = rank_name(attempt, rank)
    written = [tensor for tensor in tensors if not tensor.replica and not tensor.box.is_empty]
    # Large elements first: every fragment is aligned to its element without padding.
    written.sort(key=lambda t: (-DTYPE_BYTES[t.dtype], t.slot, t.fqn, t.box))
    writer = _Writer(f"{name}.bin")
    size_bytes = store.write_file(
        join(directory, f"{name}.bin"), writer.chunks(written), fsync=fsync
    )
    record = Manifest(
        kind=Kind.RANK_RECORD,
        step=step,
        attempt=attempt,
        state_map=StateMap(entries=writer.entries(), block_bytes=BLOCK_BYTES),
        files={writer.file: FileEntry(num_bytes=size_bytes, crc32=writer.crc32)},
        param_groups=param_groups,
        extra=extra if rank == 0 else {},
        source=source,
        world_size=world_size,
        rank=rank,
    )
    store.write_atomic(join(directory, f"{name}.json"), to_bytes(record), fsync=fsync)
    committed = try_commit(
        store, directory, step=step, attempt=attempt, world_size=world_size, fsync=fsync
    )
    return SaveResult(committed=committed, size_bytes=size_bytes, seconds=perf_counter() - begun)


class _Writer:
    """Gives the bytes of a data file and notes their checksums on the way."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.crc32 = 0
        self._offset_bytes = 0
        self._fragments: dict[TensorKey, list[Fragment]] = {}
        self._tensors: dict[TensorKey, LocalTensor] = {}

    def chunks(self, tensors: Sequence[LocalTensor]) -> Iterator[memoryview]:
        for tensor in tensors:
            data = bytes_of(tensor)
            hasher = BlockHasher()
            for low in range(0, len(data), BLOCK_BYTES):
                # The checksum brings the block into the cache, from which the write takes it.
                chunk = data[low : low + BLOCK_BYTES]
                hasher.update(chunk)
                yield chunk
            self._note(tensor, hasher)

    def _note(self, tensor: LocalTensor, hasher: BlockHasher) -> None:
        key = TensorKey(tensor.fqn, tensor.slot)
        blocks, num_bytes = hasher.blocks(), hasher.num_bytes
        total = combine_blocks(blocks, num_bytes, BLOCK_BYTES)
        fragment = Fragment(tensor.box, self.file, self._offset_bytes, num_bytes, total, blocks)
        self._fragments.setdefault(key, []).append(fragment)
        self._tensors[key] = tensor
        self._offset_bytes += num_bytes
        self.crc32 = combine(self.crc32, total, num_bytes)

    def entries(self) -> dict[TensorKey, TensorEntry]:
        return {
            key: TensorEntry(
                key=key,
                dtype=self._tensors[key].dtype,
                shape=tuple(self._tensors[key].shape),
                fragments=tuple(sorted(found)),
            )
            for key, found in self._fragments.items()
        }


def rank_name(attempt: int, rank: int) -> str:
    """Return how the files of a rank begin."""
    return f"a{attempt:04d}-r{rank:05d}"


def try_commit(
    store: Store,
    directory: str,
    *,
    step: int,
    attempt: int,
    world_size: int,
    fsync: bool = False,
) -> bool:
    """Write the manifest if the records of all ranks of ``(step, attempt)`` are there.

    Any process may call it, any number of times, at once with others: all write the same bytes.
    The manifest of an older attempt is replaced, because an attempt that trains ``step`` resumed
    below it, so the older one was fenced. That of a newer attempt is never touched.

    Returns:
        Whether the checkpoint of this attempt is committed now.

    Raises:
        CheckpointCorruptError: The records contradict each other or are damaged.
    """
    path = join(directory, MANIFEST_NAME)
    held = _committed_manifest(store, directory)
    if held is not None and held.step == step and held.attempt >= attempt:
        return held.attempt == attempt
    sizes = store.sizes(directory)
    names = [rank_name(attempt, rank) for rank in range(world_size)]
    if any(f"{name}.json" not in sizes or f"{name}.bin" not in sizes for name in names):
        return False
    records: list[Manifest] = []
    for rank, name in enumerate(names):
        where = join(directory, f"{name}.json")
        record = from_bytes(store.read(where), where=where)
        found = (record.kind, record.step, record.attempt, record.rank, record.world_size)
        expected = (Kind.RANK_RECORD, step, attempt, rank, world_size)
        if found != expected:
            raise CheckpointCorruptError(
                f"{where} says (kind, step, attempt, rank, world_size) = {found}, "
                f"expected {expected}",
                where=where,
            )
        size = record.files[f"{name}.bin"].num_bytes if f"{name}.bin" in record.files else -1
        if size != sizes[f"{name}.bin"]:
            raise CheckpointCorruptError(
                f"{join(directory, name)}.bin has {sizes[f'{name}.bin']} bytes, its record "
                f"says {size}",
                where=where,
            )
        records.append(record)
    data = to_bytes(merge(records))
    # Where nothing is committed, nothing may be replaced: a newer attempt can commit meanwhile.
    if not store.exists(path) and store.write_atomic(path, data, fsync=fsync, exclusive=True):
        return True
    held = _committed_manifest(store, directory)
    if held is not None and held.step == step and held.attempt >= attempt:
        return held.attempt == attempt
    return store.write_atomic(path, data, fsync=fsync)


def _committed_manifest(store: Store, directory: str) -> Manifest | None:
    """Return the manifest, or None if there is none or it is damaged, which commits nothing."""
    path = join(directory, MANIFEST_NAME)
    if not store.exists(path):
        return None
    try:
        return from_bytes(store.read(path), where=path)
    except CheckpointCorruptError:
        return None
