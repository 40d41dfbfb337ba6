"""Reads data files of torch DCP that hold safetensors instead of torch files.

``FileSystemWriter(serialization_format=SAFETENSORS)`` writes a rank's small values, then one
safetensors file with all its tensors. For every tensor the metadata give the offset of this file;
its header says where each tensor is. No other form repeats an offset.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from ucp_core.errors import CheckpointCorruptError
from ucp_core.formats.dcp.container import Blob, Chunk, Container, StoredTensor
from ucp_core.formats.safetensors_header import TensorRange, read_header
from ucp_core.geometry import DTYPE_BYTES, Box, packed_strides
from ucp_core.storage import Store, join
from ucp_core.torch_files import TensorRef, extents_of

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
        wanted = {key: (item.chunks[place].box, item.dtype) for key, item, place in members}
        start = chunks[0][0].blob.offset_bytes
        refs = _refs(container.store, container.directory, file, start, wanted)
        for key, item, place in members:
            _put(container, item, item.chunks[place].box, refs[key], place)


def sharded_container(store: Store, directory: str, names: Iterable[str]) -> Container | None:
    """Return what ``HuggingFaceStorageWriter(save_distributed=True)`` wrote, or None.

    It writes no metadata: each rank's file says where its boxes begin in the whole tensors.
    """
    shards = {name: int(m[1]) for name in names for m in [_SHARD.fullmatch(name)] if m}
    if not shards:
        return None
    missing = set(range(1, max(shards.values()))) - set(shards.values())
    if missing:
        raise CheckpointCorruptError(
            f"{directory} lacks the files of shard {min(missing)}: bring them back or use another "
            "checkpoint",
            path=directory,
        )
    container = Container(store, directory, sizes=store.sizes(directory))
    container.metadata_names = tuple(sorted(shards))
    for file in sorted(shards):
        path = join(directory, file)
        header, start = read_header(store, path, container.sizes[file])
        try:
            offsets = json.loads(header.metadata["DCP_SHARDING_INFO"])
            for tensor in header.tensors:
                low = extents_of(offsets[tensor.name]["saved_offsets"])
                _add_shard(container, file, start, tensor, low)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise CheckpointCorruptError(
                f"{path} does not say where its boxes begin ({type(error).__name__}: {error})",
                path=path,
            ) from error
    return container


def _add_shard(
    container: Container, file: str, start: int, tensor: TensorRange, low: tuple[int, ...]
) -> None:
    stop = tuple(a + b for a, b in zip(low, tensor.shape, strict=True))
    item = container.tensors.setdefault(tensor.name, StoredTensor(tensor.dtype, stop, []))
    if item.dtype != tensor.dtype or len(item.shape) != len(stop):
        msg = f"{tensor.name} is {tensor.dtype}{list(tensor.shape)}, {item.dtype} elsewhere"
        raise ValueError(msg)
    item.shape = tuple(map(max, item.shape, stop))
    box = Box(low, stop)
    if not box.is_empty:
        ref = _ref(tensor, box, file, start)
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


def _refs(
    store: Store,
    directory: str,
    file: str,
    offset_bytes: int,
    wanted: Mapping[str, tuple[Box, str]],
) -> dict[str, TensorRef]:
    """Return where the tensors of one file are, by key."""
    path = join(directory, file)
    header, start = read_header(store, path, store.size(path), offset_bytes)
    found = {tensor.name: tensor for tensor in header.tensors}
    refs: dict[str, TensorRef] = {}
    for key, (box, dtype) in wanted.items():
        tensor = found.get(key)
        if tensor is None or (tensor.dtype, tuple(tensor.shape)) != (dtype, box.shape):
            what = "nothing" if tensor is None else f"{tensor.dtype}{list(tensor.shape)}"
            raise CheckpointCorruptError(
                f"{path} has {what} as {key}, the metadata say {dtype}{list(box.shape)}: "
                "another save overwrote this one, or two boxes of one tensor were saved as one",
                path=path,
            )
        refs[key] = _ref(tensor, box, file, start)
    return refs


def _ref(tensor: TensorRange, box: Box, file: str, start: int) -> TensorRef:
    offset = start + tensor.start_byte
    return TensorRef(tensor.dtype, box.shape, packed_strides(box.shape, 1), file, offset, None)
