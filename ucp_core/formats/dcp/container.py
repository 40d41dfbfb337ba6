"""The container of torch DCP, which Megatron-core's ``torch_dist`` uses too.

A directory has ``.metadata``, a pickle that says which box of which key is where, and data files,
in which every item is a complete torch file at an offset of its own. ``dcp`` and ``megatron_core``
interpret the keys. Source: the classes of ``torch.distributed.checkpoint.metadata`` and
``.filesystem`` of torch 2.0 to 2.13.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from ucp_core.errors import CheckpointCorruptError
from ucp_core.formats.shared import json_value
from ucp_core.geometry import Box, Extent, Fragment, TensorEntry, TensorKey, prove_entry
from ucp_core.manifest import Item
from ucp_core.storage import Store, join
from ucp_core.torch_files import (
    EDGE_BYTES,
    TensorFiles,
    TensorRef,
    collector_paused,
    read_torch_part,
)

#: Reads bytes: from where on, and how many.
_Read: TypeAlias = Callable[[int, int], bytes]

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

    def leftovers(self) -> dict[str, Item]:
        """Return a note on each data file that the metadata do not name."""
        named = {chunk.blob.file for item in self.tensors.values() for chunk in item.chunks}
        named |= {blob.file for blobs in self.blobs.values() for blob in blobs}
        note = Item("drop", "not named in the metadata: left by another save")
        return {n: note for n in sorted(self.sizes) if n.endswith(_LEFT) and n not in named}

    def values(self, keys: Iterable[str]) -> Iterator[tuple[str, Any]]:
        """Yield the value of each key, of the first rank that wrote it.

        A flattened optimizer has thousands of them, a dozen for each parameter, and nearly all are
        alike. They are read together, and equal ones are parsed once.
        """
        wanted = {key: self.blobs[key][0] for key in keys}
        contents = {blob: read(0, blob.num_bytes) for blob, read in self._readers(wanted.values())}
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

    @collector_paused()
    def entries(
        self, keys: Mapping[str, TensorKey]
    ) -> tuple[dict[TensorKey, TensorEntry], dict[str, tuple[Extent, ...]]]:
        """Return the entries of tensors under new names, and the checksums of their files."""
        refs = self._refs(keys)
        entries: dict[TensorKey, TensorEntry] = {}
        extents: dict[str, set[Extent]] = defaultdict(set)
        for key, name in keys.items():
            item = self.tensors[key]
            if name in entries:
                raise CheckpointCorruptError(
                    f"{key} and another key both mean {name}: save them in separate checkpoints"
                )
            fragments: list[Fragment] = []
            for box, blob, replica in item.chunks:
                ref = refs[blob]
                if (ref.dtype, ref.shape) != (item.dtype, box.shape):
                    path = join(self.directory, blob.file)
                    raise CheckpointCorruptError(
                        f"{key}: box {box} in {path} is {ref.dtype}{list(ref.shape)}, "
                        f"{self.metadata_names[0]} says {item.dtype}{list(box.shape)}: another "
                        "save overwrote this one; use another one",
                        path=path,
                    )
                place = box, ref.file, ref.offset_bytes, ref.num_bytes
                fragments.append(Fragment(*place, None, (), replica, ref.byte_strides))
                if ref.extent is not None and ref.extent.num_bytes:
                    extents[ref.file].add(ref.extent)
            entries[name] = TensorEntry(
                key=name, dtype=item.dtype, shape=item.shape, fragments=tuple(sorted(fragments))
            )
            prove_entry(entries[name])
        return entries, {file: tuple(sorted(found)) for file, found in extents.items()}

    def _refs(self, keys: Iterable[str]) -> dict[Blob, TensorRef]:
        keys_of = {chunk.blob: key for key in keys for chunk in self.tensors[key].chunks}
        files = TensorFiles()
        refs = dict(self.plain)
        for blob, read in self._readers(keys_of.keys() - refs.keys()):
            file, offset_bytes, num_bytes = blob
            where = f"{join(self.directory, file)} ({keys_of[blob]})"
            refs[blob] = files.read(read, num_bytes, file, where=where, offset_bytes=offset_bytes)
        return refs

    def _readers(self, blobs: Iterable[Blob]) -> Iterator[tuple[Blob, _Read]]:
        """Yield each item with a function that reads from its start, and read many at once."""
        by_file: dict[str, set[Blob]] = defaultdict(set)
        for blob in blobs:
            by_file[blob.file].add(blob)
        for file, found in sorted(by_file.items()):
            ordered = sorted(found)
            for low in range(0, len(ordered), _BATCH_BLOBS):
                batch = ordered[low : low + _BATCH_BLOBS]
                read = _windows(self.store, join(self.directory, file), batch)
                yield from ((blob, partial(read, blob)) for blob in batch)


def _windows(store: Store, path: str, blobs: Iterable[Blob]) -> Callable[[Blob, int, int], bytes]:
    """Read the two ends of many items of a file; return a function that reads from an item."""
    spans: list[list[int]] = []
    for _, begin, num_bytes in blobs:
        stop = begin + num_bytes
        for low, high in (
            (begin, min(begin + EDGE_BYTES, stop)),
            (max(begin, stop - EDGE_BYTES), stop),
        ):
            if spans and low - spans[-1][1] <= _GAP_BYTES:
                spans[-1][1] = max(high, spans[-1][1])
            else:
                spans.append([low, high])
    windows = {low: bytearray(high - low) for low, high in spans}
    store.read_ranges(path, [(low, (memoryview(data),)) for low, data in windows.items()])
    starts = list(windows)

    def read(blob: Blob, start: int, length: int) -> bytes:
        low = blob.offset_bytes + start
        window = starts[max(0, bisect_right(starts, low) - 1)]
        at = low - window
        if at >= 0 and at + length <= len(windows[window]):
            return bytes(windows[window][at : at + length])
        return store.read_range(path, low, length)

    return read
