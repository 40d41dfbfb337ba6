"""Writes any checkpoint as a directory of torch's distributed checkpoint (DCP).

Layout of torch 2.13: ``__0_N.distcp`` files hold ``torch.save`` blobs side by side, one for each
chunk of a tensor and for each small value. ``.metadata``, a pickle that says where each blob is, is
written last and commits. Nothing here imports torch.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from ucp_core.errors import UcpError
from ucp_core.formats.shared import NUMBER_DTYPES, restored
from ucp_core.geometry import Box, TensorKey
from ucp_core.native import Checkpoint, Slab, check_memory, refuse_taken, stream
from ucp_core.storage import Buffer, Store, join, undone
from ucp_core.torch_files import (
    DTYPE_NAMES,
    Instance,
    Named,
    Size,
    TensorData,
    pickle_tree,
    torch_file_chunks,
)

#: A loader reads whole chunks even if it needs only a part, and takes 0.3 ms to open each.
CHUNK_BYTES = 64 << 20
#: Size at which a new file begins.
FILE_BYTES = 5_000_000_000

_METADATA_NAME = ".metadata"
_METADATA = "torch.distributed.checkpoint.metadata"
_STORAGE_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
_LAYOUT = "torch.serialization._get_layout"
#: The version of torch 2.13; older ones ignore it.
_VERSION = "1.0.0"
_CLASSES = (
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
)
_ALLOWED = frozenset(
    {
        _STORAGE_INFO,
        _LAYOUT,
        "torch.Size",
        *(f"{_METADATA}.{name}" for name in _CLASSES),
        *(f"torch.{name}" for name in DTYPE_NAMES.values()),
    }
)

#: Keys that lead to a value in a nested state dict.
_Path: TypeAlias = tuple[str | int, ...]


def write(  # noqa: PLR0913 - the options of a format
    checkpoint: Checkpoint,
    store: Store,
    directory: str,
    *,
    memory_bytes: int,
    progress: Callable[[int, int], None] | None = None,
    model: str = "model",
    optimizer: str = "optim",
    flatten_optimizer: bool = False,
    fsync: bool = True,
) -> None:
    """Write the whole state to ``directory``, for ``torch.distributed.checkpoint.load``.

    Weights are ``<model>.<fqn>``, tied names too. Slots are ``<optimizer>.state.<fqn>.<slot>``. A
    tensor with the role ``extra``, which is not part of the model, has its name as its key. Every
    value of ``extra`` is at the top level under its name, flattened as DCP does.

    See ``export`` for the other arguments and the errors.

    Args:
        model: Key of the model's state dict. If it is empty, the names are at the top level.
        optimizer: Key of the optimizer's state dict.
        flatten_optimizer: Write groups as ``<optimizer>.param_groups.<fqn>.<name>``, one value for
            each parameter, as ``StateDictOptions(flatten_optimizer_state_dict=True)`` does.
            Otherwise they are ``<optimizer>.param_groups.<index>.<name>``.
    """
    check_memory(memory_bytes)
    names = store.list(directory)
    refuse_taken(directory, (n for n in names if n == _METADATA_NAME or n.endswith(".distcp")))
    checkpoint.state_map.prove_coverage()
    contents = Contents()
    for name, value in checkpoint.extra.items():
        contents.value((name,), restored(value))
    contents.tensors(checkpoint, model, optimizer)
    contents.groups(checkpoint, optimizer, is_flat=flatten_optimizer)
    with undone(store, directory) as written:
        writer = DcpFiles(checkpoint, store, directory, contents, memory_bytes, progress)
        writer.write(written, fsync=fsync)


class Rows(NamedTuple):
    """Rows of a larger tensor: ``size`` rows from ``first``, repeated every ``distance`` rows."""

    first: int
    size: int
    distance: int


@dataclass(slots=True)
class Part:
    """A tensor to write: the whole tensor of its keys, or a part of it."""

    dtype: str
    shape: tuple[int, ...]  #: Shape of the keys' tensor.
    keys: list[str]  #: Its keys; several where names are tied.
    layer: int | None = None  #: Index along the first dim, if that counts layers.
    rows: Rows | None = None  #: Rows of the keys' tensor or layer; None means all.
    #: Boxes of the keys' tensor, with the places of their blobs.
    chunks: list[tuple[Box, Instance]] = field(default_factory=list)

    def placed(self, box: Box) -> Iterator[tuple[Box, int]]:
        """Yield the boxes of the keys' tensor that make up a box, and their numbers of rows."""
        low, high = (box.start[0], box.stop[0]) if box.start else (0, 1)
        rows = self.rows or Rows(0, high, 0)
        while True:
            group, row = divmod(low, max(1, rows.size))
            count = min(high - low, rows.size - row)
            start = rows.first + group * rows.distance + row
            part = box.with_dim(0, start, start + count) if box.start else box
            if self.layer is not None:
                part = Box((self.layer, *part.start), (self.layer + 1, *part.stop))
            yield part, count
            low += count
            if low >= high:
                return


@dataclass(slots=True)
class Contents:
    """The values to write, by key."""

    #: The path in the nested state dict of every key.
    paths: dict[str, _Path] = field(default_factory=dict)
    parts: dict[TensorKey, Part] = field(default_factory=dict)  #: The tensors of the source.
    values: dict[str, Any] = field(default_factory=dict)  #: Small values by key.
    #: Small values that are tensors, by key.
    small: dict[str, TensorData] = field(default_factory=dict)
    #: Places, among the small values, of tensors outside the model, by name.
    places: dict[str, _Path] = field(default_factory=dict)

    def tensors(self, checkpoint: Checkpoint, model: str, optimizer: str) -> None:
        """Name every tensor, and a tied weight also under each alias."""
        for key, entry in sorted(checkpoint.state_map.entries.items()):
            path: _Path
            if checkpoint.manifest.roles.get(key.fqn) == "extra":
                path = self.places.get(key.fqn, (key.fqn,))
            elif key.slot == "weight":
                path = (model, key.fqn) if model else (key.fqn,)
            else:
                path = (optimizer, "state", key.fqn, key.slot)
            self.parts[key] = Part(entry.dtype, entry.shape, [self._key(path)])
        for alias, owner in sorted(checkpoint.manifest.ties.items()):
            held = self.parts.get(TensorKey(owner, "weight"))
            if held is not None and TensorKey(alias, "weight") not in self.parts:
                held.keys.append(self._key((model, alias) if model else (alias,)))

    def groups(self, checkpoint: Checkpoint, optimizer: str, *, is_flat: bool) -> None:
        """Name the hyper-parameters of every group."""
        for index, group in enumerate(checkpoint.param_groups):
            for name, value in group.items():
                if not is_flat:
                    path: _Path = (optimizer, "param_groups", index, name)
                    self.values[self._key(path)] = hyper(name, value)
                    continue
                for fqn in group.get("params", ()) if name != "params" else ():
                    path = (optimizer, f"param_groups.{fqn}.{name}")
                    self.values[self._key(path)] = hyper(name, value)

    def value(self, path: _Path, value: Any) -> None:
        """Name a small value by DCP's own rule (``_traverse.traverse_state_dict``)."""
        if isinstance(value, dict) and value.keys() == {"tensor"}:
            self.places[value["tensor"]] = path
        elif isinstance(value, dict):
            for name, inner in value.items():
                self.value((*path, name), inner)
        elif isinstance(value, list) and not _is_terminal(value):
            for index, inner in enumerate(value):
                self.value((*path, index), inner)
        elif isinstance(value, TensorData) and (
            value.dtype == "U8" or (not value.shape and value.dtype in NUMBER_DTYPES)
        ):
            # The reader takes such a tensor for a small value; others are objects here.
            self.small[self._key(path)] = value
        else:
            self.values[self._key(path)] = value

    def _key(self, path: _Path) -> str:
        key = ".".join(map(str, path))
        if key in self.paths:
            raise UcpError(
                f"{key} names two values, {self.paths[key]} and {path}: rename one, or give "
                "the model and the optimizer other keys"
            )
        self.paths[key] = path
        return key


def _is_terminal(values: list[Any]) -> bool:
    return not any(
        isinstance(value, dict | TensorData)
        or (isinstance(value, list) and not _is_terminal(value))
        for value in values
    )


def hyper(name: str, value: Any) -> Any:
    """Return a hyper-parameter as torch's optimizers hold it: betas as a tuple, names as a list."""
    return tuple(value) if isinstance(value, list) and name != "params" else value


@dataclass(slots=True)
class DcpFiles:
    """Writes contents as the files of one directory."""

    checkpoint: Checkpoint
    store: Store
    directory: str
    contents: Contents
    memory_bytes: int
    progress: Callable[[int, int], None] | None
    names: list[str] = field(default_factory=list)
    _slabs: Iterator[Slab] = field(default_factory=lambda: iter(()))
    _ahead: Slab | None = None  #: The next slab.
    _file_bytes: int = 0
    _done_bytes: int = 0
    _values: dict[str, Instance] = field(default_factory=dict)  #: Places of small values.
    _small: list[Part] = field(default_factory=list)  #: Small values that are tensors.

    def write(self, written: list[str], *, fsync: bool) -> None:
        """Write the data files, then the metadata, which commits the checkpoint.

        Args:
            written: Receives the path of every file before the file is begun.
        """
        slabs = stream(
            self.checkpoint,
            [self.checkpoint.state_map.entries[key] for key in self.contents.parts],
            memory_bytes=self.memory_bytes,
            piece_bytes_max=CHUNK_BYTES,
        )
        with closing(slabs) as self._slabs:
            self._ahead = next(self._slabs, None)
            while self._ahead is not None or not self.names:
                self.names.append(f"__0_{len(self.names)}.distcp")
                self._file_bytes = 0
                written.append(join(self.directory, self.names[-1]))
                self.store.write_file(written[-1], self._chunks(), fsync=fsync)
        metadata, _ = pickle_tree(self._metadata(), allow=_ALLOWED)
        written.append(join(self.directory, _METADATA_NAME))
        self.store.write_atomic(written[-1], metadata, fsync=fsync)

    def _chunks(self) -> Iterator[Buffer]:
        """Yield the content of one file, to the slab that no longer fits."""
        if len(self.names) == 1:
            yield from self._beside()
        while (slab := self._ahead) is not None:
            if self._file_bytes and self._file_bytes + len(slab.data) > FILE_BYTES:
                return
            entry, box = slab.piece
            tensor = self.contents.parts[entry.key]
            row_bytes = len(slab.data) // (box.shape[0] if box.shape else 1)
            begin = 0
            for part, count in tensor.placed(box):
                data = slab.data[begin : begin + count * row_bytes]
                begin += len(data)
                blob = TensorData.of_bytes(entry.dtype, part.shape, data)
                tensor.chunks.append((part, (yield from self._blob(blob))))
            self._done_bytes += len(slab.data)
            if self.progress is not None:
                self.progress(self._done_bytes, self.checkpoint.state_map.num_bytes)
            self._ahead = next(self._slabs, None)

    def _beside(self) -> Iterator[Buffer]:
        """Yield small values, and an empty chunk for each empty tensor, as DCP does."""
        for key, value in self.contents.values.items():
            self._values[key] = yield from self._blob(value)
        for key, value in self.contents.small.items():
            chunk = Box.full(value.shape), (yield from self._blob(value))
            self._small.append(Part(value.dtype, value.shape, [key], chunks=[chunk]))
        for name, tensor in self.contents.parts.items():
            box = Box.full(self.checkpoint.state_map.entries[name].shape)
            if box.is_empty:
                box, _ = next(tensor.placed(box))
                blob = TensorData.of_bytes(tensor.dtype, box.shape, b"")
                tensor.chunks.append((box, (yield from self._blob(blob))))

    def _blob(self, tree: Any) -> Generator[Buffer, None, Instance]:
        """Yield what ``torch.save`` would write and return where it lies."""
        begin = self._file_bytes
        for chunk in torch_file_chunks(tree):
            self._file_bytes += memoryview(chunk).nbytes
            yield chunk
        length = self._file_bytes - begin
        state = {"relative_path": self.names[-1], "offset": begin, "length": length}
        return Instance(_STORAGE_INFO, state=state)

    def _metadata(self) -> Instance:
        """Return the metadata; call this after all files are written."""
        described: dict[str, Instance] = {}
        places: dict[Instance, Instance] = {}
        by_name: dict[str, list[Part]] = {}
        for tensor in (*self._small, *self.contents.parts.values()):
            # Keys of tied names point to the same bytes.
            for name in tensor.keys:
                by_name.setdefault(name, []).append(tensor)
        for name, tensors in by_name.items():
            chunks = [chunk for one in tensors for chunk in one.chunks]
            described[name] = _describe(tensors[0], [box for box, _ in chunks])
            for number, (box, place) in enumerate(chunks):
                index = {"fqn": name, "index": number, "offset": Size(box.start)}
                places[_named("MetadataIndex", index)] = place
        for name, place in self._values.items():
            described[name] = _named("BytesStorageMetadata", {})
            places[_named("MetadataIndex", {"fqn": name, "index": None})] = place
        return _named(
            "Metadata",
            {
                "state_dict_metadata": described,
                "planner_data": dict(self.contents.paths),
                "storage_data": places,
                "storage_meta": None,
                "version": _VERSION,
            },
        )


class _Attributes(dict[str, Any]):
    """Attributes of an object that serves as a key of a dict."""

    __hash__ = object.__hash__  # type: ignore[assignment]


def _named(name: str, attributes: Mapping[str, Any]) -> Instance:
    return Instance(f"{_METADATA}.{name}", state=_Attributes(attributes))


def _describe(tensor: Part, boxes: Iterable[Box]) -> Instance:
    """Return the metadata of the tensor of a key, of which ``tensor`` is at least a part."""
    properties = Instance(
        f"{_METADATA}.TensorProperties",
        state=(
            Named(f"torch.{DTYPE_NAMES[tensor.dtype]}"),
            Instance(_LAYOUT, ("torch.strided",)),
            False,
            # The contiguous format.
            Instance(f"{_METADATA}._MEM_FORMAT_ENCODING", (0,)),
            False,
        ),
    )
    chunks = [
        _named("ChunkStorageMetadata", {"offsets": Size(box.start), "sizes": Size(box.shape)})
        for box in boxes
    ]
    size = Size(tensor.shape)
    return _named(
        "TensorStorageMetadata", {"properties": properties, "size": size, "chunks": chunks}
    )
