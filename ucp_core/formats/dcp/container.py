"""The container of torch DCP, which Megatron-core's ``torch_dist`` uses too.

A directory has ``.metadata``, a pickle that says which box of which key is where, and data files,
in which every item is a complete torch file at an offset of its own. ``dcp`` and ``megatron_core``
interpret the keys. Source: the classes of ``torch.distributed.checkpoint.metadata`` and
``.filesystem`` of torch 2.0 to 2.13.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ucp_core.errors import CheckpointCorruptError
from ucp_core.formats.shared import json_value
from ucp_core.geometry import Box, Extent, Fragment, TensorEntry, TensorKey, prove_entry
from ucp_core.storage import Store, join
from ucp_core.torch_files import (
    EDGE_BYTES,
    TensorFiles,
    TensorRef,
    collector_paused,
    read_torch_part,
)

#: Suffixes of the files of a save.
_LEFT = (".distcp", ".metadata.tmp")
#: Number of items whose ends are read at once.
_BATCH_BLOBS = 512
#: Ranges at most this far apart are read as one.
_GAP_BYTES = 4096


class Blob(NamedTuple):
    """One item: bytes of a data file."""

    file: str
    offset_bytes: int
    num_bytes: int


class Chunk(NamedTuple):
    """One box of a tensor and its item; ``replica`` means that another chunk holds the same box."""

    box: Box
    blob: Blob
    replica: bool


@dataclass(slots=True)
class StoredTensor:
    """A tensor by its key."""

    dtype: str
    shape: tuple[int, ...]
    chunks: list[Chunk]


@dataclass(slots=True)
class Container:
    """The content of the metadata."""

    store: Store
    directory: str
    tensors: dict[str, StoredTensor] = field(default_factory=dict)  #: By key.
    #: Items that are not tensors, by key: one for each rank that wrote the key.
    blobs: dict[str, list[Blob]] = field(default_factory=dict)
    #: Place of a key in the nested state, if the metadata give it.
    paths: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)  #: Sizes of the files in the directory.
    metadata_names: tuple[str, ...] = ()
    version: str = ""  #: The version of DCP.
    #: Places of tensors whose items are not torch files.
    plain: dict[Blob, TensorRef] = field(default_factory=dict)
    #: Items of boxes without elements, which no tensor needs.
    empty: list[tuple[str, Blob]] = field(default_factory=list)

    @property
    def where(self) -> str:
        """Return the first metadata file's path, for messages."""
        return join(self.directory, self.metadata_names[0])

    def leftovers(self) -> list[str]:
        """Return the data files that the metadata do not name: another save left them."""
        named = {chunk.blob.file for item in self.tensors.values() for chunk in item.chunks}
        named |= {blob.file for blobs in self.blobs.values() for blob in blobs}
        return sorted(n for n in self.sizes if n.endswith(_LEFT) and n not in named)

    def values(self, keys: Iterable[str]) -> Iterator[tuple[str, Any]]:
        """Yield the value of each key, of the first rank that wrote it.

        A flattened optimizer has thousands of them, a dozen for each parameter, and nearly all are
        alike. They are read together, and equal ones are parsed once.
        """
        wanted = {key: self.blobs[key][0] for key in keys}
        by_file: dict[str, list[Blob]] = defaultdict(list)
        for blob in set(wanted.values()):
            by_file[blob.file].append(blob)
        contents: dict[Blob, bytes] = {}
        for file, blobs in by_file.items():
            ordered = sorted(blobs)
            for low in range(0, len(ordered), _BATCH_BLOBS):
                batch = ordered[low : low + _BATCH_BLOBS]
                windows = _Windows(self.store, join(self.directory, file), batch)
                for blob in batch:
                    contents[blob] = windows.reader(blob)(0, blob.num_bytes)
        known: dict[bytes, Any] = {}
        for key, blob in wanted.items():
            data = contents[blob]
            if data not in known or b"/data/" in data:
                known[data] = self._parsed(data, blob, key)
            yield key, known[data]

    def value(self, blob: Blob, key: str) -> Any:
        """Return the value of an item that is not a tensor."""
        path = join(self.directory, blob.file)
        data = self.store.read_range(path, blob.offset_bytes, blob.num_bytes)
        return self._parsed(data, blob, key)

    def as_json(self, value: Any, key: str, *, exact: bool = False) -> Any:
        """Return the value of the item ``key`` as JSON; see ``json_value``."""
        return json_value(value, self.store, self.directory, key, exact=exact)

    def _parsed(self, data: bytes, blob: Blob, key: str) -> Any:
        def read(start: int, length: int) -> bytes:
            return data[start : start + length]

        where = f"{join(self.directory, blob.file)} ({key})"
        found = read_torch_part(
            read, len(data), blob.file, where=where, offset_bytes=blob.offset_bytes
        )
        return found.tree

    def entries(
        self, keys: Mapping[str, TensorKey]
    ) -> tuple[dict[TensorKey, TensorEntry], dict[str, tuple[Extent, ...]]]:
        """Return the entries of tensors under new names, and the checksums of their files."""
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
            prove_entry(entries[name])
        return entries, {file: tuple(sorted(found)) for file, found in extents.items()}

    def _check(self, key: str, item: StoredTensor, chunk: Chunk, ref: TensorRef) -> None:
        if (ref.dtype, ref.shape) != (item.dtype, chunk.box.shape):
            raise CheckpointCorruptError(
                f"{key}: box {chunk.box} in {join(self.directory, chunk.blob.file)} is "
                f"{ref.dtype}{list(ref.shape)}, {self.metadata_names[0]} says {item.dtype}"
                f"{list(chunk.box.shape)}: another save overwrote this one; use another one",
                key=key,
                path=join(self.directory, chunk.blob.file),
            )

    def _refs(self, keys: Iterable[str]) -> dict[Blob, TensorRef]:
        by_file: dict[str, dict[Blob, str]] = defaultdict(dict)
        for key in keys:
            for chunk in self.tensors[key].chunks:
                if chunk.blob not in self.plain:
                    by_file[chunk.blob.file][chunk.blob] = key
        files = TensorFiles()
        refs = dict(self.plain)
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


def fragment_of(ref: TensorRef, box: Box, *, replica: bool) -> Fragment:
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
    )


class _Windows:
    """Reads the two ends of many items of a file at once."""

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
            (start, (memoryview(data),))
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
