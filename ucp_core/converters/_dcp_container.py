"""The container of torch DCP, which Megatron-core's ``torch_dist`` uses too.

A directory with ``.metadata``, a pickle that says which box of which key is where, and data files
in which every item is a complete torch file at an offset of its own. Keys mean nothing here; what
they mean is the business of ``dcp`` and ``megatron_core``. Source: the classes of
``torch.distributed.checkpoint.metadata`` and ``.filesystem`` of torch 2.0 to 2.13.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from ucp_core.boxes import Box
from ucp_core.converters._dcp_metadata import (
    CLASSES,
    BytesMetadata,
    ChunkMetadata,
    Index,
    Metadata,
    StorageInfo,
    TensorMetadata,
    expect,
    mapping,
)
from ucp_core.converters._tensors import TensorRef, known_dtype
from ucp_core.converters._unpickle import collector_paused
from ucp_core.converters.torchfile import EDGE_BYTES, TensorFiles, read_pickle, read_torch_part
from ucp_core.errors import CheckpointCorruptError, StorageError
from ucp_core.statemap import Extent, Fragment, TensorEntry, TensorKey
from ucp_core.storage.base import ReadRange, join

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from ucp_core.storage.base import Store

METADATA_NAME = ".metadata"
#: Written by every rank where ranks do not talk (``use_collectives=False``).
_RANK_METADATA = re.compile(r"__(\d+)\.metadata")
#: Ends of the names of files that some save wrote.
_LEFT = (".distcp", ".metadata.tmp")
#: Items whose ends are read in one go.
_BATCH_BLOBS = 512
_KEY_BYTES_MAX = 4096
_PATH_PARTS_MAX = 64
#: Bytes between two reads up to which one is cheaper.
_GAP_BYTES = 4096


class Blob(NamedTuple):
    """One item: bytes of a data file."""

    file: str
    offset_bytes: int
    num_bytes: int


class Chunk(NamedTuple):
    """One box of a tensor and its item; ``replica``: another one holds the same box."""

    box: Box
    blob: Blob
    replica: bool


@dataclass(slots=True)
class Item:
    """A tensor by its key."""

    dtype: str
    shape: tuple[int, ...]
    chunks: list[Chunk]


@dataclass(slots=True)
class Container:
    """What the metadata say.

    Attributes:
        store: Where.
        directory: In it.
        tensors: By key.
        blobs: Items that are no tensors, by key; one for each rank that wrote it.
        paths: Where a key was in the nested state, as far as that was written down.
        sizes: Of the files in the directory.
        metadata_names: The metadata files.
        version: That of DCP.
    """

    store: Store
    directory: str
    tensors: dict[str, Item] = field(default_factory=dict)
    blobs: dict[str, list[Blob]] = field(default_factory=dict)
    paths: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    metadata_names: tuple[str, ...] = ()
    version: str = ""

    @property
    def where(self) -> str:
        """Return the first metadata file's path, for messages."""
        return join(self.directory, self.metadata_names[0])

    def leftovers(self) -> list[str]:
        """Return the data files that no metadata name: another save left them."""
        named = {chunk.blob.file for item in self.tensors.values() for chunk in item.chunks}
        named |= {blob.file for blobs in self.blobs.values() for blob in blobs}
        return sorted(n for n in self.sizes if n.endswith(_LEFT) and n not in named)

    def values(self, keys: Iterable[str]) -> Iterator[tuple[str, Any]]:
        """Yield the value of each key, of the first rank that wrote it."""
        for key in keys:
            yield key, self.value(self.blobs[key][0], key)

    def value(self, blob: Blob, key: str) -> Any:
        """Return what an item holds that is no tensor."""
        path = join(self.directory, blob.file)
        data = self.store.read_range(path, blob.offset_bytes, blob.num_bytes)

        def read(start: int, length: int) -> bytes:
            return data[start : start + length]

        where = f"{path} ({key})"
        found = read_torch_part(
            read, len(data), blob.file, where=where, offset_bytes=blob.offset_bytes
        )
        return found.tree

    def entries(
        self, keys: Mapping[str, TensorKey]
    ) -> tuple[dict[TensorKey, TensorEntry], dict[str, tuple[Extent, ...]]]:
        """Return the entries of tensors under new names, and the checksums of their files.

        Raises:
            CheckpointCorruptError: An item is not what the metadata say: another save wrote it.
        """
        with collector_paused():
            return self._entries(keys)

    def _entries(
        self, keys: Mapping[str, TensorKey]
    ) -> tuple[dict[TensorKey, TensorEntry], dict[str, tuple[Extent, ...]]]:
        refs = self._refs(keys)
        entries: dict[TensorKey, TensorEntry] = {}
        extents: dict[str, set[Extent]] = defaultdict(set)
        for key, name in keys.items():
            item = self.tensors[key]
            fragments: list[Fragment] = []
            for chunk in item.chunks:
                ref = refs[chunk.blob]
                self._check(key, item, chunk, ref)
                fragments.append(fragment_of(ref, chunk.box, replica=chunk.replica))
                if ref.extent is not None and ref.extent.num_bytes:
                    extents[ref.file].add(ref.extent)
            entries[name] = TensorEntry(
                key=name, dtype=item.dtype, shape=item.shape, fragments=tuple(sorted(fragments))
            )
        return entries, {file: tuple(sorted(found)) for file, found in extents.items()}

    def _check(self, key: str, item: Item, chunk: Chunk, ref: TensorRef) -> None:
        if (ref.dtype, ref.shape) != (item.dtype, chunk.box.shape):
            raise CheckpointCorruptError(
                f"{key}: box {chunk.box} in {join(self.directory, chunk.blob.file)} is "
                f"{ref.dtype}{list(ref.shape)}, {self.metadata_names[0]} says {item.dtype}"
                f"{list(chunk.box.shape)}: another save wrote over this one; use another one",
                key=key,
                path=join(self.directory, chunk.blob.file),
            )

    def _refs(self, keys: Iterable[str]) -> dict[Blob, TensorRef]:
        by_file: dict[str, dict[Blob, str]] = defaultdict(dict)
        for key in keys:
            for chunk in self.tensors[key].chunks:
                by_file[chunk.blob.file][chunk.blob] = key
        files = TensorFiles()
        refs: dict[Blob, TensorRef] = {}
        for file, blobs in sorted(by_file.items()):
            path = join(self.directory, file)
            ordered = sorted(blobs)
            for low in range(0, len(ordered), _BATCH_BLOBS):
                batch = ordered[low : low + _BATCH_BLOBS]
                windows = _Windows(self.store, path, batch)
                for blob in batch:
                    refs[blob] = files.read(
                        windows.reader(blob),
                        blob.num_bytes,
                        file,
                        where=f"{path} ({blobs[blob]})",
                        offset_bytes=blob.offset_bytes,
                    )
        return refs


def fragment_of(ref: TensorRef, box: Box, *, replica: bool = False, copy: int = 0) -> Fragment:
    """Return the fragment of a tensor in a torch file that holds ``box``."""
    return Fragment(
        box,
        ref.file,
        ref.offset_bytes,
        ref.num_bytes,
        None,
        (),
        replica,
        ref.byte_strides,
        copy,
    )


class _Windows:
    """The two ends of many items of one file, read at once."""

    def __init__(self, store: Store, path: str, blobs: Sequence[Blob]) -> None:
        self._store = store
        self._path = path
        spans: list[list[int]] = []
        for blob in blobs:
            stop = blob.offset_bytes + blob.num_bytes
            for low, high in (
                (blob.offset_bytes, min(blob.offset_bytes + EDGE_BYTES, stop)),
                (max(blob.offset_bytes, stop - EDGE_BYTES), stop),
            ):
                if spans and low - spans[-1][1] <= _GAP_BYTES:
                    spans[-1][1] = max(high, spans[-1][1])
                else:
                    spans.append([low, high])
        self._starts = [low for low, _ in spans]
        self._data = [bytearray(high - low) for low, high in spans]
        ranges = [
            ReadRange(start, (memoryview(data),))
            for start, data in zip(self._starts, self._data, strict=True)
        ]
        store.read_ranges(path, ranges)

    def reader(self, blob: Blob) -> Callable[[int, int], bytes]:
        """Return a function that reads from the start of ``blob``."""

        def read(start: int, length: int) -> bytes:
            low = blob.offset_bytes + start
            index = bisect_right(self._starts, low) - 1
            at = low - self._starts[index]
            if index >= 0 and at + length <= len(self._data[index]):
                return bytes(self._data[index][at : at + length])
            return self._store.read_range(self._path, low, length)

        return read


def read_container(store: Store, directory: str, parts: Sequence[str] = ("",)) -> Container:
    """Read the metadata of a DCP directory, of one save or of each rank.

    Args:
        store: Where.
        directory: In it.
        parts: Folders in the directory that are one checkpoint together.

    Raises:
        CheckpointCorruptError: Damaged, or its data files are missing, truncated, or not of the
            save that wrote it.
        ForeignClassError: It holds a class that no version of DCP writes.
    """
    container = Container(store, directory)
    for part in parts:
        prefix = f"{part}/" if part else ""
        sizes = store.sizes(join(directory, part))
        names = metadata_names(sizes)
        if not names:
            raise CheckpointCorruptError(
                f"{join(directory, part)} has no {METADATA_NAME}: its save was not finished",
                path=join(directory, part),
            )
        container.sizes.update({prefix + name: size for name, size in sizes.items()})
        container.metadata_names += tuple(prefix + name for name in names)
    for name in container.metadata_names:
        path = join(directory, name)
        metadata = read_pickle(store.read(path), where=path, allow=CLASSES)
        prefix = name[: name.rfind("/") + 1]
        try:
            with collector_paused():
                _add(container, metadata, prefix, path)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointCorruptError(
                f"{path} is not what torch DCP writes ({error})", path=path
            ) from error
    _check_sizes(container)
    return container


def metadata_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return the metadata files among ``names``: the one of a save, or one of every rank."""
    found = tuple(names)
    if METADATA_NAME in found:
        return (METADATA_NAME,)
    ranks = {int(m[1]): m[0] for m in map(_RANK_METADATA.fullmatch, found) if m}
    return tuple(ranks[rank] for rank in sorted(ranks))


def _add(container: Container, metadata: Any, prefix: str, path: str) -> None:
    """Add what one metadata file says."""
    state = expect(metadata, Metadata).state
    places: dict[tuple[str, tuple[int, ...] | None], Blob] = {}
    for index, info in mapping(state["storage_data"]).items():
        place = expect(index, Index)
        item = _blob(expect(info, StorageInfo), place.key, path)
        places[place.key, place.offset] = item._replace(file=prefix + item.file)
    for name, value in mapping(state["state_dict_metadata"]).items():
        key = _key(name)
        if type(value) is TensorMetadata:
            _add_tensor(container, key, value, places, path)
        elif type(value) is BytesMetadata:
            blob = places.get((key, None))
            if blob is None:
                _missing(key, None, path)
            container.blobs.setdefault(key, []).append(blob)
        else:
            msg = f"{key} is a {type(value).__name__}"
            raise TypeError(msg)
    container.version = str(state.get("version") or "")
    planner = state.get("planner_data")
    if isinstance(planner, dict):
        container.paths.update({k: v for k, v in planner.items() if _is_path(v)})


def _is_path(value: Any) -> bool:
    return (
        type(value) is tuple
        and len(value) <= _PATH_PARTS_MAX
        and all(type(part) in {str, int} for part in value)
    )


def _key(value: Any) -> str:
    key: str = expect(value, str)
    if len(key.encode()) > _KEY_BYTES_MAX:
        msg = f"a key has {len(key)} characters"
        raise ValueError(msg)
    return key


def _add_tensor(
    container: Container,
    key: str,
    value: TensorMetadata,
    places: Mapping[tuple[str, tuple[int, ...] | None], Blob],
    path: str,
) -> None:
    dtype = known_dtype(value.dtype, f"{path} ({key})")
    item = container.tensors.setdefault(key, Item(dtype, value.shape, []))
    if (item.dtype, item.shape) != (dtype, value.shape):
        raise CheckpointCorruptError(
            f"{path}: {key} is {dtype}{list(value.shape)}, another rank wrote {item.dtype}"
            f"{list(item.shape)}: the files are of different saves",
            key=key,
            path=path,
        )
    known = {chunk.box for chunk in item.chunks}
    for chunk in value.chunks:
        place = expect(chunk, ChunkMetadata)
        stop = tuple(a + b for a, b in zip(place.offsets, place.sizes, strict=True))
        box = Box(place.offsets, stop)
        if len(stop) != len(value.shape):
            msg = f"{key} has {len(value.shape)} dims, its box {box}"
            raise ValueError(msg)
        if box.is_empty:
            continue
        blob = places.get((key, place.offsets))
        if blob is None:
            _missing(key, box, path)
        item.chunks.append(Chunk(box, blob, box in known))
        known.add(box)


def _missing(key: str, box: Box | None, path: str) -> NoReturn:
    what = key if box is None else f"{key}, box {box},"
    raise CheckpointCorruptError(f"{path}: {what} is in no file: it is damaged", key=key, path=path)


def _blob(info: StorageInfo, key: str, path: str) -> Blob:
    if info.transforms:
        raise CheckpointCorruptError(
            f"{path}: {key} was saved through an extension (it is compressed, perhaps): save "
            "it without one",
            key=key,
            path=path,
        )
    parts = _key(info.path).split("/")
    if {"", ".", ".."} & set(parts) or any(c in info.path for c in "\\@\0"):
        raise CheckpointCorruptError(
            f"{path}: {key} is said to be in {info.path[:80]!r}, which is no file of this "
            "checkpoint",
            key=key,
            path=path,
        )
    return Blob(info.path, info.offset, info.length)


def _check_sizes(container: Container) -> None:
    """Compare every data file's size with where the metadata say that its last item ends."""
    stops: dict[str, tuple[int, str]] = {}
    for key, blob in _all_blobs(container):
        stop = blob.offset_bytes + blob.num_bytes
        if stop > stops.get(blob.file, (0, ""))[0]:
            stops[blob.file] = (stop, key)
    for file, (stop, key) in sorted(stops.items()):
        path = join(container.directory, file)
        size = container.sizes.get(file)
        if size is None:
            try:
                size = container.store.size(path)
            except StorageError as error:
                raise CheckpointCorruptError(
                    f"{path} is missing; it holds {key} and more: bring it back or use another "
                    "checkpoint",
                    key=key,
                    path=path,
                ) from error
        if size != stop:
            what = "it is truncated" if size < stop else "another save wrote over this one"
            raise CheckpointCorruptError(
                f"{path} has {size} bytes, but {key} ends at byte {stop} and is the last item in "
                f"{container.metadata_names[0]}: {what}; use another checkpoint",
                key=key,
                path=path,
            )


def _all_blobs(container: Container) -> Iterator[tuple[str, Blob]]:
    for key, item in container.tensors.items():
        for chunk in item.chunks:
            yield key, chunk.blob
    for key, blobs in container.blobs.items():
        for blob in blobs:
            yield key, blob
