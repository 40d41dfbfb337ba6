"""Saves one rank's part of a state without communication; the last rank commits."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from time import perf_counter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ucp_core.errors import CheckpointCorruptError, StorageError
from ucp_core.geometry import DTYPE_BYTES, Fragment, StateMap, TensorEntry, TensorKey
from ucp_core.manifest import FileEntry, Kind, Manifest, from_bytes, merge, to_bytes, to_json
from ucp_core.native.opening import MANIFEST_NAME, LocalTensor, bytes_of
from ucp_core.numerics import BLOCK_BYTES, Sums, combine, crc32, sums_of, sums_of_blocks
from ucp_core.storage import Store, join

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


#: Everything in a record but tensors, ``extra``, ``param_groups`` and ``source``: 300 bytes.
_HEAD_BYTES_MAX = 1024
#: From this size on, checksums get a thread of their own if there is a processor for it.
_BESIDE_BYTES_MIN = 16 << 20

#: Placeholder of a checksum.
_HOLE = -1
#: The placeholder and the comma after it.
_CRC_CHARS = len(str(2**32 - 1)) + 1
#: The text that replaces it; the record lists no blocks for data of a single block.
_CRC32, _BLOCKS, _NO_BLOCKS = '"crc32":%d', ',"blocks":[%s]', "%.0s"
#: Matches placeholders only: in a name these quotes would be escaped.
_HOLES = re.compile(r'"crc32":-1(?:,"blocks":\[-1(?:,-1)*\])?')


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveResult:
    """The result of ``save_rank``."""

    committed: bool  #: Whether the checkpoint of all ranks is committed now.
    size_bytes: int  #: Bytes of tensors that this rank wrote.
    seconds: float  #: Time until the record was written and the commit was tried.


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
    require_owner: Callable[[], None] = lambda: None,
) -> SaveResult:
    """Write this rank's part of the state, and commit if this rank is the last one.

    Every rank calls it; none waits for another. ``extra`` and hyper-parameters count only on
    rank 0. A checkpoint that is committed already is not written again.

    Args:
        directory: Directory of this step's checkpoint.
        step: The optimizer step after which the state was taken.
        attempt: The fencing token.
        world_size: Ranks that save.
        tensors: The boxes of this rank; replicas and empty ones are skipped.
        extra: Small named values, JSON.
        param_groups: The optimizer's groups with ``params`` as fqns, JSON.
        source: The writer, JSON.
        fsync: Make the data durable before the commit.
        require_owner: See ``try_commit``.

    Raises:
        StorageError: The storage refused.
        UncoveredRegionError: The ranks together do not hold every element exactly once.
    """
    saver = RankSaver(
        tensors,
        attempt=attempt,
        rank=rank,
        world_size=world_size,
        source=source,
        block_bytes=BLOCK_BYTES,
        require_owner=require_owner,
    )
    return saver.save(
        store,
        directory,
        step=step,
        data=[bytes_of(tensors[index]) for index in saver.order],
        extra=extra,
        param_groups=param_groups,
        fsync=fsync,
    )


class RankSaver:
    """Saves the same tensors of one rank many times; prints only once what does not change.

    Args:
        tensors: The boxes of the rank; replicas, empty ones, and all data are ignored.
        attempt: The fencing token.
        source: The writer, JSON.
        block_bytes: Size of the blocks that have checksums.
        require_owner: See ``try_commit``.
        uncoordinated: The ranks do not know what the others save; see ``merge``. Then ``extra``
            counts on every rank.
        roles: By name: "frozen" or "buffer".
        ties: Other names of tensors.
        threads: This rank's share of the machine's processors.

    Attributes:
        order: Indices into ``tensors`` of those that are written, in order of the file.
        sizes_bytes: Sizes of their data.
        record_bytes_max: Bound of the record without ``extra``, ``param_groups`` and ``source``.
    """

    def __init__(  # noqa: PLR0913 - each is a fact that the record states
        self,
        tensors: Sequence[LocalTensor],
        *,
        attempt: int,
        rank: int,
        world_size: int,
        source: Mapping[str, Any],
        block_bytes: int,
        require_owner: Callable[[], None] = lambda: None,
        uncoordinated: bool = False,
        roles: Mapping[str, str] = MappingProxyType({}),
        ties: Mapping[str, str] = MappingProxyType({}),
        threads: int = 2,
    ) -> None:
        self._block_bytes = block_bytes
        self._threads = threads
        self._require_owner = require_owner
        self._attempt, self._rank, self._world_size = attempt, rank, world_size
        self._source = source
        self._uncoordinated = uncoordinated
        self._name = rank_name(attempt, rank)
        written = [
            index
            for index, tensor in enumerate(tensors)
            if not tensor.replica and not tensor.box.is_empty
        ]
        # Large elements first: every fragment is aligned without padding.
        placed = [(-DTYPE_BYTES[t.dtype], t.slot, t.fqn, t.box) for t in tensors]
        written.sort(key=placed.__getitem__)
        self.order = tuple(written)
        self._form = _TensorsForm(
            [tensors[index] for index in written],
            f"{self._name}.bin",
            block_bytes=block_bytes,
            roles=roles,
            ties=ties,
        )
        self.sizes_bytes = tuple(self._form.sizes_bytes)
        self.record_bytes_max = self._form.text_bytes_max + _HEAD_BYTES_MAX

    def save(
        self,
        store: Store,
        directory: str,
        *,
        step: int,
        data: Sequence[memoryview],
        extra: Mapping[str, Any],
        param_groups: Sequence[Mapping[str, Any]],
        fsync: bool,
        sums: Sequence[Sums] | None = None,
    ) -> SaveResult:
        """Write the current data of the tensors; see ``save_rank``.

        Args:
            step: The optimizer step after which the state was taken.
            data: The bytes of the tensors of ``order``.
            extra: Small named values, JSON.
            fsync: Make the data durable before the commit.
            sums: Checksums of each of ``data``, if the caller has them.

        Raises:
            UncoveredRegionError: The ranks together do not hold every element exactly once.
        """
        begun = perf_counter()
        assert tuple(map(len, data)) == self.sizes_bytes, "not the data of these tensors"
        held = _committed_manifest(store, directory)
        if held is not None and (held.step, held.attempt) == (step, self._attempt):
            return SaveResult(committed=True, size_bytes=0, seconds=perf_counter() - begun)
        file = f"{self._name}.bin"
        size_bytes, sums = self._write(store, join(directory, file), data, sums, fsync=fsync)
        whole = 0
        for (each, _), num_bytes in zip(sums, self.sizes_bytes, strict=True):
            whole = combine(whole, each, num_bytes)
        record = Manifest(
            kind=Kind.RANK_RECORD,
            step=step,
            attempt=self._attempt,
            state_map=StateMap(entries={}, block_bytes=self._block_bytes),
            files={file: FileEntry(num_bytes=size_bytes, crc32=whole)},
            param_groups=param_groups,
            extra=extra if self._rank == 0 or self._uncoordinated else {},
            uncoordinated=self._uncoordinated,
            source=self._source,
            world_size=self._world_size,
            rank=self._rank,
        )
        text = to_bytes(record, tensors=self._form.filled(sums))
        store.write_atomic(join(directory, f"{self._name}.json"), text, fsync=fsync)
        committed = try_commit(
            store,
            directory,
            step=step,
            attempt=self._attempt,
            world_size=self._world_size,
            fsync=fsync,
            require_owner=self._require_owner,
            known={f"{self._name}.json": text},
        )
        seconds = perf_counter() - begun
        return SaveResult(committed=committed, size_bytes=size_bytes, seconds=seconds)

    def _write(
        self,
        store: Store,
        path: str,
        data: Sequence[memoryview],
        sums: Sequence[Sums] | None,
        *,
        fsync: bool,
    ) -> tuple[int, Sequence[Sums]]:
        """Write the data; return their size and the checksums of each."""
        if sums is not None:
            return store.write_file(path, data, fsync=fsync), sums
        if self._threads == 1 or sum(self.sizes_bytes) < _BESIDE_BYTES_MIN:
            found: list[Sums] = []
            chunks = _checked(data, found, self._block_bytes)
            return store.write_file(path, chunks, fsync=fsync), found
        # Checksums before each write would make a save of 256 MB a third longer. On one processor
        # they are cheaper: the block is in the cache for the write.
        with ThreadPoolExecutor(1, "checksums") as beside:
            made = beside.submit(lambda: [sums_of(view, self._block_bytes) for view in data])
            size_bytes = store.write_file(path, data, fsync=fsync)
            return size_bytes, made.result()


class _TensorsForm:
    """The text of the ``tensors`` of a rank's record, with places for the checksums.

    Filling it in takes a twentieth of printing a few hundred tensors (3 ms).

    Args:
        tensors: In order of the file; the boxes of one tensor are sorted.
        block_bytes: Size of the blocks that have checksums.
        roles: Roles of tensors, by name; others are ignored, as in ``ties``.
        ties: Other names of tensors.

    Attributes:
        sizes_bytes: Sizes of the tensors' data, in the same order.
        text_bytes_max: Bound of the filled text.
    """

    def __init__(
        self,
        tensors: Sequence[LocalTensor],
        file: str,
        *,
        block_bytes: int,
        roles: Mapping[str, str],
        ties: Mapping[str, str],
    ) -> None:
        sizes = [t.box.num_elements * DTYPE_BYTES[t.dtype] for t in tensors]
        self.sizes_bytes = sizes
        places: dict[TensorKey, list[tuple[Fragment, int]]] = {}
        entries: dict[TensorKey, TensorEntry] = {}
        offset_bytes = 0
        for index, (tensor, size) in enumerate(zip(tensors, sizes, strict=True)):
            key = TensorKey(tensor.fqn, tensor.slot)
            holes = (_HOLE,) * -(-size // block_bytes)
            fragment = Fragment(tensor.box, file, offset_bytes, size, _HOLE, holes)
            found = places.setdefault(key, [])
            found.append((fragment, index))
            entries[key] = TensorEntry(
                key=key,
                dtype=tensor.dtype,
                shape=tuple(tensor.shape),
                fragments=tuple(fragment for fragment, _ in found),
            )
            offset_bytes += size
        # The order of the document: by name and slot, then by box.
        self._order = [index for _, found in sorted(places.items()) for _, index in found]
        state_map = StateMap(entries=entries, block_bytes=block_bytes)
        names = {tensor.fqn for tensor in tensors}
        blank = Manifest(
            kind=Kind.RANK_RECORD,
            step=0,
            attempt=0,
            state_map=state_map,
            files={},
            rank=0,
            roles={fqn: role for fqn, role in roles.items() if fqn in names},
            ties={alias: fqn for alias, fqn in ties.items() if fqn in names},
        )
        text = json.dumps(to_json(blank)["tensors"], separators=(",", ":"))
        self._text, num_places = _HOLES.subn(
            lambda place: _CRC32 + (_BLOCKS if "blocks" in place[0] else _NO_BLOCKS),
            text.replace("%", "%%"),
        )
        assert num_places == len(tensors), "a name looks like the place of a checksum"
        num_blocks = sum(-(-size // block_bytes) for size in sizes)
        self.text_bytes_max = len(self._text) + (num_blocks + len(sizes)) * _CRC_CHARS

    def filled(self, sums: Sequence[Sums]) -> str:
        """Return the text with the checksums of every tensor's data, in order of the file."""
        return self._text % tuple(chain.from_iterable(map(sums.__getitem__, self._order)))


def _checked(
    data: Sequence[memoryview], sums: list[Sums], block_bytes: int
) -> Iterator[memoryview]:
    """Yield the data block by block, and add the checksums of each to ``sums``."""
    for view in data:
        found: list[int] = []
        for low in range(0, len(view), block_bytes):
            # The checksum brings the block into the cache for the write.
            chunk = view[low : low + block_bytes]
            found.append(crc32(chunk))
            yield chunk
        sums.append(sums_of_blocks(found, len(view), block_bytes))


def rank_name(attempt: int, rank: int) -> str:
    """Return the stem of a rank's file names."""
    return f"a{attempt:04d}-r{rank:05d}"


def try_commit(
    store: Store,
    directory: str,
    *,
    step: int,
    attempt: int,
    world_size: int,
    fsync: bool = False,
    require_owner: Callable[[], None] = lambda: None,
    known: Mapping[str, bytes] = MappingProxyType({}),
) -> bool:
    """Write the manifest if the records of all ranks of ``(step, attempt)`` exist.

    Any process may call it, any number of times and at the same time as others: all write the
    same bytes. It replaces the manifest of an older attempt, which was fenced: this attempt
    resumed from ``step`` or below it. It never replaces the manifest of a newer attempt.

    Args:
        fsync: Make the manifest durable.
        require_owner: Called before the manifest is written; it raises if the caller's claim of the
            run no longer owns its directory (``ucp_core.storage.Owner``).
        known: Content of records by their files' names; they are not read again.

    Returns:
        Whether this attempt's checkpoint is committed now.

    Raises:
        CheckpointCorruptError: The records contradict each other or are damaged.
    """
    path = join(directory, MANIFEST_NAME)
    # One listing says all that most ranks need to know.
    sizes = store.sizes(directory)
    held = _committed_manifest(store, directory) if MANIFEST_NAME in sizes else None
    if held is not None and held.step == step and held.attempt >= attempt:
        return held.attempt == attempt
    names = [rank_name(attempt, rank) for rank in range(world_size)]
    if any(f"{name}.json" not in sizes or f"{name}.bin" not in sizes for name in names):
        return False
    records = [_read_record(store, directory, name, sizes[f"{name}.bin"], known) for name in names]
    for rank, record in enumerate(records):
        found = (record.kind, record.step, record.attempt, record.rank, record.world_size)
        expected = (Kind.RANK_RECORD, step, attempt, rank, world_size)
        if found != expected:
            where = join(directory, f"{names[rank]}.json")
            raise CheckpointCorruptError(
                f"{where} says (kind, step, attempt, rank, world_size) = {found}, "
                f"expected {expected}",
                where=where,
            )
    data = to_bytes(merge(records))
    require_owner()
    # Exclusive, because a newer attempt can commit at the same time.
    is_new = MANIFEST_NAME not in sizes
    if is_new and store.write_atomic(path, data, fsync=fsync, exclusive=True):
        return True
    held = _committed_manifest(store, directory)
    if held is not None and held.step == step and held.attempt >= attempt:
        return held.attempt == attempt
    require_owner()
    return store.write_atomic(path, data, fsync=fsync)


def _read_record(
    store: Store, directory: str, name: str, size_bytes: int, known: Mapping[str, bytes]
) -> Manifest:
    """Return the record of a rank, whose data file has ``size_bytes``; see ``try_commit``."""
    where = join(directory, f"{name}.json")
    text = known[f"{name}.json"] if f"{name}.json" in known else store.read(where)
    record = from_bytes(text, where=where)
    file = f"{name}.bin"
    said_bytes = record.files[file].num_bytes if file in record.files else -1
    if said_bytes != size_bytes:
        raise CheckpointCorruptError(
            f"{join(directory, file)} has {size_bytes} bytes, but its record says {said_bytes}",
            where=where,
        )
    return record


def _committed_manifest(store: Store, directory: str) -> Manifest | None:
    """Return the manifest, or None if it is missing or damaged."""
    path = join(directory, MANIFEST_NAME)
    try:
        return from_bytes(store.read(path), where=path)
    except StorageError as error:
        if not error.facts.get("missing"):
            raise
        return None
    except CheckpointCorruptError:
        return None
