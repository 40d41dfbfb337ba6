"""Reads the metadata of a torch DCP directory, and checks its files against them.

``FileSystemWriter(serialization_format=SAFETENSORS)`` writes a rank's small values, then one
safetensors file with all its tensors. For every tensor the metadata give the offset of this file;
its header says where each tensor is. No other form repeats an offset. Source:
``torch.distributed.checkpoint.metadata`` and ``.filesystem`` of torch 2.0 to 2.13.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NoReturn

from ucp_core.formats.dcp.container import Blob, Chunk, Container, StoredTensor
from ucp_core.formats.dcp.recognition import METADATA_NAME, metadata_names
from ucp_core.formats.refusals import corrupt, missing
from ucp_core.formats.safetensors_header import read_header
from ucp_core.formats.shared import refusing_nonsense
from ucp_core.geometry import DTYPE_BYTES, Box, packed_strides
from ucp_core.storage import Store, join
from ucp_core.torch_files import (
    Global,
    Opaque,
    TensorRef,
    collector_paused,
    current_budget,
    expect,
    extents_of,
    known_dtype,
    read_pickle,
)

_KEY_BYTES_MAX = 4096
_PATH_PARTS_MAX = 64


def read_container(store: Store, directory: str, parts: Sequence[str] = ("",)) -> Container:
    """Read the metadata of a DCP directory, of one save or of each rank.

    Args:
        parts: Folders in the directory that together are one checkpoint.
    """
    container = Container(store, directory)
    for part in parts:
        prefix = f"{part}/" if part else ""
        sizes = store.sizes(join(directory, part))
        names = metadata_names(sizes)
        if not names:
            raise corrupt(
                join(directory, part), f"it has no {METADATA_NAME}: its save was not finished"
            )
        container.sizes.update({prefix + name: size for name, size in sizes.items()})
        container.metadata_names += tuple(prefix + name for name in names)
    for name in container.metadata_names:
        path = join(directory, name)
        current_budget().draw(container.sizes[name], path)
        metadata = read_pickle(store.read(path), where=path)
        prefix = name[: name.rfind("/") + 1]
        with refusing_nonsense(path, "torch DCP"), collector_paused():
            _add(container, metadata, prefix, path)
    find_safetensors(container)
    _check_sizes(container)
    return container


def _fields(value: Any, kind: str) -> Any:
    """Return the attributes of an object of a class of ``torch.distributed.checkpoint``."""
    expect(value, Opaque)
    if _class(value) != kind:
        msg = f"a {_class(value)} where {kind} is expected"
        raise TypeError(msg)
    return value.state


def _class(value: Opaque) -> str:
    return value.name.rpartition(".")[2]


def _add(container: Container, metadata: Any, prefix: str, path: str) -> None:
    """Add the content of one metadata file."""
    state = expect(_fields(metadata, "Metadata"), dict)
    places: dict[tuple[str, tuple[int, ...] | None], Blob] = {}
    for index, info in expect(state["storage_data"], dict).items():
        place = _fields(index, "MetadataIndex")
        key, offset = expect(place["fqn"], str), place.get("offset")
        blob = _blob(_fields(info, "_StorageInfo"), key, prefix, path)
        places[key, None if offset is None else extents_of(offset)] = blob
    for name, value in expect(state["state_dict_metadata"], dict).items():
        key = _key(name)
        if _class(expect(value, Opaque)) == "BytesStorageMetadata":
            found = places.get((key, None))
            if found is None:
                _missing(key, None, path)
            container.blobs.setdefault(key, []).append(found)
        else:
            _add_tensor(container, key, _fields(value, "TensorStorageMetadata"), places, path)
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
    fields: Mapping[str, Any],
    places: Mapping[tuple[str, tuple[int, ...] | None], Blob],
    path: str,
) -> None:
    shape = extents_of(fields["size"])
    properties = _fields(fields["properties"], "TensorProperties")
    named = properties["dtype"] if isinstance(properties, dict) else properties[0]
    dtype = known_dtype(expect(named, Global).name.removeprefix("torch."), f"{path} ({key})")
    item = container.tensors.setdefault(key, StoredTensor(dtype, shape, []))
    if (item.dtype, item.shape) != (dtype, shape):
        raise corrupt(
            path,
            f"{key} is {dtype}{list(shape)}, another rank wrote "
            f"{item.dtype}{list(item.shape)}: different saves wrote these files",
        )
    known = {chunk.box for chunk in item.chunks}
    for chunk in expect(fields["chunks"], list):
        place = _fields(chunk, "ChunkStorageMetadata")
        offsets = extents_of(place["offsets"])
        box = _box(offsets, extents_of(place["sizes"]))
        if len(box.start) != len(shape):
            msg = f"{key} has {len(shape)} dims, its box {box}"
            raise ValueError(msg)
        blob = places.get((key, offsets))
        if box.is_empty:
            # A rank without rows still writes an item, perhaps as the last one of its file.
            container.empty += [] if blob is None else [(key, blob)]
            continue
        if blob is None:
            _missing(key, box, path)
        item.chunks.append(Chunk(box, blob, box in known))
        known.add(box)


@lru_cache(maxsize=1024)
def _box(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Box:
    """Return a box; many tensors share the same."""
    return Box(offsets, tuple(a + b for a, b in zip(offsets, sizes, strict=True)))


def _missing(key: str, box: Box | None, path: str) -> NoReturn:
    what = key if box is None else f"{key}, box {box},"
    raise corrupt(path, f"{what} is in no file: the metadata are damaged")


def _blob(fields: Mapping[str, Any], key: str, prefix: str, path: str) -> Blob:
    if fields.get("transform_descriptors"):
        raise corrupt(
            path,
            f"{key} was saved through an extension, perhaps compressed: save it "
            "without the extension",
        )
    file = _key(fields["relative_path"])
    if not _is_inside(file):
        raise corrupt(
            path, f"{key} should be in {file[:80]!r}, but this checkpoint has no such file"
        )
    offset_bytes, num_bytes = extents_of((fields["offset"], fields["length"]))
    return Blob(prefix + file, offset_bytes, num_bytes)


@lru_cache(maxsize=64)
def _is_inside(path: str) -> bool:
    """Return whether a path stays in the directory; many chunks share the same path."""
    return not ({"", ".", ".."} & set(path.split("/")) or any(c in path for c in "\\@\0"))


def _check_sizes(container: Container) -> None:
    """Compare the size of each data file with the end of its last item in the metadata."""
    plain = {blob.file for blob in container.plain}
    stops: dict[str, tuple[int, str]] = {}
    for key, blob in _all_blobs(container):
        stop = blob.offset_bytes + blob.num_bytes
        if stop > stops.get(blob.file, (0, ""))[0]:
            stops[blob.file] = (stop, key)
    for file, (stop, key) in sorted(stops.items()):
        path = join(container.directory, file)
        if file in plain:
            continue
        size = container.sizes.get(file)
        if size is None:
            raise missing(container.directory, [f"{file} with {key} and more"])
        if size != stop:
            what = "it is truncated" if size < stop else "another save overwrote this one"
            raise corrupt(
                path,
                f"it has {size} bytes, but {key} ends at byte {stop} and is the last item in "
                f"{container.metadata_names[0]}: {what}; use another checkpoint",
            )


def _all_blobs(container: Container) -> Iterator[tuple[str, Blob]]:
    for key, item in container.tensors.items():
        for chunk in item.chunks:
            yield key, chunk.blob
    for key, blobs in container.blobs.items():
        for blob in blobs:
            yield key, blob
    yield from container.empty


_SHARD = re.compile(r"shard-(\d{1,9})-model-\d+-of-\d+\.safetensors")


def find_safetensors(container: Container) -> None:
    """Correct the places of tensors in files that are safetensors."""
    by_file: dict[str, list[tuple[str, StoredTensor, int]]] = defaultdict(list)
    for key, item in container.tensors.items():
        for place, chunk in enumerate(item.chunks):
            by_file[chunk.blob.file].append((key, item, place))
    for file, members in by_file.items():
        chunks = [(item.chunks[place], item.dtype) for _, item, place in members]
        if not _is_safetensors(chunks):
            continue
        size = container.store.size(join(container.directory, file))
        _, refs = _header(container, file, size, chunks[0][0].blob.offset_bytes)
        for key, item, place in members:
            ref, box = refs.get(key), item.chunks[place].box
            if ref is None or (ref.dtype, ref.shape) != (item.dtype, box.shape):
                what = "nothing" if ref is None else f"{ref.dtype}{list(ref.shape)}"
                raise corrupt(
                    join(container.directory, file),
                    f"it has {what} as {key}, the metadata say {item.dtype}{list(box.shape)}: "
                    "another save overwrote this one, or two boxes of one tensor were saved as one",
                )
            _put(container, item, box, ref, place)


def sharded_container(store: Store, directory: str, names: Iterable[str]) -> Container | None:
    """Return what ``HuggingFaceStorageWriter(save_distributed=True)`` wrote, or None.

    It writes no metadata: each rank's file says where its boxes begin in the whole tensors.
    """
    shards = {name: int(m[1]) for name in names for m in [_SHARD.fullmatch(name)] if m}
    if not shards:
        return None
    lacks = set(range(1, max(shards.values()))) - set(shards.values())
    if lacks:
        raise missing(directory, [f"the files of shard {min(lacks)}"])
    container = Container(store, directory, sizes=store.sizes(directory))
    container.metadata_names = tuple(sorted(shards))
    for file in container.metadata_names:
        metadata, refs = _header(container, file, container.sizes[file])
        with refusing_nonsense(join(directory, file), "torch DCP"):
            offsets = json.loads(metadata["DCP_SHARDING_INFO"])
            for key, ref in refs.items():
                _add_shard(container, key, extents_of(offsets[key]["saved_offsets"]), ref)
    return container


def _add_shard(container: Container, key: str, low: tuple[int, ...], ref: TensorRef) -> None:
    box = _box(low, ref.shape)
    item = container.tensors.setdefault(key, StoredTensor(ref.dtype, box.stop, []))
    if item.dtype != ref.dtype or len(item.shape) != len(low):
        msg = f"{key} is {ref.dtype}{list(ref.shape)}, {item.dtype} elsewhere"
        raise ValueError(msg)
    item.shape = tuple(map(max, item.shape, box.stop))
    if not box.is_empty:
        _put(container, item, box, ref, len(item.chunks))


def _put(container: Container, item: StoredTensor, box: Box, ref: TensorRef, place: int) -> None:
    """Set a chunk that is not a torch file; ``place`` past the last chunk adds one."""
    blob = Blob(ref.file, ref.offset_bytes, ref.num_bytes)
    replica = any(chunk.box == box for chunk in item.chunks[:place])
    item.chunks[place : place + 1] = [Chunk(box, blob, replica)]
    container.plain[blob] = ref


def _is_safetensors(chunks: Sequence[tuple[Chunk, str]]) -> bool:
    """Return whether the chunks of a file, given with their dtypes, can only be safetensors."""
    return len({chunk.blob.offset_bytes for chunk, _ in chunks}) == 1 and all(
        chunk.blob.num_bytes == chunk.box.num_elements * DTYPE_BYTES[dtype]
        for chunk, dtype in chunks
    )


def _header(
    container: Container, file: str, size: int, offset_bytes: int = 0
) -> tuple[Mapping[str, str], dict[str, TensorRef]]:
    """Return the metadata of a file that is safetensors from a byte on, and its tensors by key."""
    path = join(container.directory, file)
    header, start = read_header(container.store, path, size, offset_bytes)
    refs: dict[str, TensorRef] = {}
    for name, dtype, shape, begin, _ in header.tensors:
        refs[name] = TensorRef(dtype, shape, packed_strides(shape, 1), file, start + begin, None)
    return header.metadata, refs
