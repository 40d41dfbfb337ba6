"""The universal checkpoint: whole tensors in safetensors files that any tool can read.

No rank, no padding and no parallelism in it. It is written as a stream of slabs, each read from
the source, verified and hashed on its way, so memory does not grow with the state.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np

from ucp_core._open import MANIFEST_NAME, Checkpoint
from ucp_core.boxes import Box
from ucp_core.checksums import BLOCK_BYTES, BlockHasher, combine, combine_blocks, crc32
from ucp_core.errors import CheckpointCorruptError, ChecksumMismatchError, UcpError
from ucp_core.manifest import FileEntry, Kind, Manifest, from_bytes, to_bytes
from ucp_core.plan import Part, plan
from ucp_core.statemap import DTYPE_BYTES, Fragment, StateMap, TensorEntry, TensorKey
from ucp_core.storage.base import Store, join
from ucp_core.transfer import Source, execute

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

#: Below this, slabs would be smaller than the blocks that are read for them.
MEMORY_BYTES_MIN = 8 * BLOCK_BYTES
#: The size that the Hugging Face tools cut at.
_FILE_BYTES_MAX = 5_000_000_000
_INDEX_NAME = "model.safetensors.index.json"
_SAFE_SLOT = re.compile(r"[A-Za-z0-9_]+")


def materialise(
    checkpoint: Checkpoint,
    destination_store: Store,
    destination_directory: str,
    *,
    memory_bytes: int,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write a universal checkpoint; its manifest, written last, commits it.

    Args:
        checkpoint: The source, native or universal.
        destination_store: Where to.
        destination_directory: Must not hold a committed checkpoint.
        memory_bytes: Bound of the buffers; at least ``MEMORY_BYTES_MIN``.
        progress: Called with the bytes done and the bytes of the whole state.

    Raises:
        UcpError: The destination holds a checkpoint already, or the bound is too small.
        CheckpointCorruptError: The source is damaged; nothing is committed.
        StorageError: A storage refused.
    """
    if memory_bytes < MEMORY_BYTES_MIN:
        raise UcpError(
            f"memory_bytes={memory_bytes} is too small: give at least {MEMORY_BYTES_MIN}",
            memory_bytes=memory_bytes,
        )
    manifest_path = join(destination_directory, MANIFEST_NAME)
    if destination_store.exists(manifest_path):
        raise UcpError(
            f"{destination_directory} holds a committed checkpoint already: give another "
            "destination or remove it",
            path=manifest_path,
        )
    checkpoint.state_map.prove_coverage()
    writer = _Materialiser(
        checkpoint, destination_store, destination_directory, memory_bytes, progress
    )
    writer.tensors()
    extra = writer.extra()
    manifest = Manifest(
        kind=Kind.UNIVERSAL,
        step=checkpoint.step,
        attempt=checkpoint.attempt,
        state_map=StateMap(entries=writer.entries, block_bytes=BLOCK_BYTES),
        files=writer.files,
        param_groups=checkpoint.param_groups,
        extra=extra,
        source=checkpoint.manifest.source,
    )
    data = to_bytes(manifest)
    # What no reader would accept must not be committed.
    from_bytes(data, where=manifest_path)
    destination_store.write_atomic(manifest_path, data, fsync=True)


class _Materialiser:
    def __init__(
        self,
        checkpoint: Checkpoint,
        store: Store,
        directory: str,
        memory_bytes: int,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._checkpoint = checkpoint
        self._source = Source(
            checkpoint.store, checkpoint.directory, checkpoint.state_map.block_bytes
        )
        self._store = store
        self._directory = directory
        # A slab, the scratch for it, and the block at either end of each.
        self._slab_bytes = memory_bytes // 4
        self._progress = progress
        self._total_bytes = checkpoint.state_map.num_bytes
        self._done_bytes = 0
        self.files: dict[str, FileEntry] = {}
        self.entries: dict[TensorKey, TensorEntry] = {}

    def tensors(self) -> None:
        """Write a family of files for each slot, and the index of the weights."""
        by_slot: dict[str, list[TensorEntry]] = {}
        for _, entry in sorted(self._checkpoint.state_map.entries.items()):
            by_slot.setdefault(entry.key.slot, []).append(entry)
        for slot, entries in sorted(by_slot.items()):
            family = _family(slot)
            groups = _files_of(entries)
            for number, group in enumerate(groups, start=1):
                self._file(f"{family}-{number:05d}-of-{len(groups):05d}.safetensors", group)
        weights = [self.entries[e.key] for e in by_slot.get("weight", [])]
        index = {
            "metadata": {"total_size": sum(entry.num_bytes for entry in weights)},
            "weight_map": {entry.key.fqn: entry.fragments[0].file for entry in weights},
        }
        self._json(_INDEX_NAME, index)

    def extra(self) -> dict[str, str]:
        """Write each small value to a file of its own and return their names."""
        names: dict[str, str] = {}
        for name, value in sorted(self._checkpoint.extra.items()):
            names[name] = f"extra/{_file_name(name)}.json"
            self._json(names[name], value)
        return names

    def _json(self, name: str, value: Any) -> None:
        data = json.dumps(value, indent=1, allow_nan=False).encode() + b"\n"
        self._store.write_atomic(join(self._directory, name), data, fsync=True)
        self.files[name] = FileEntry(num_bytes=len(data), crc32=crc32(data))

    def _file(self, name: str, entries: Sequence[TensorEntry]) -> None:
        header = _header(entries)
        total = crc32(header)
        offset_bytes = len(header)
        hashers = [BlockHasher() for _ in entries]

        def chunks() -> Iterator[memoryview]:
            yield memoryview(header)
            for entry, hasher in zip(entries, hashers, strict=True):
                for slab in self._slabs(entry):
                    hasher.update(slab)
                    yield slab

        path = join(self._directory, name)
        num_bytes = self._store.write_file(path, chunks(), fsync=True)
        for entry, hasher in zip(entries, hashers, strict=True):
            blocks = hasher.blocks()
            value = combine_blocks(blocks, hasher.num_bytes, BLOCK_BYTES)
            total = combine(total, value, hasher.num_bytes)
            fragment = Fragment(
                Box.full(entry.shape), name, offset_bytes, hasher.num_bytes, value, blocks
            )
            offset_bytes += hasher.num_bytes
            self.entries[entry.key] = replace(entry, fragments=(fragment,))
        self.files[name] = FileEntry(num_bytes=num_bytes, crc32=total)

    def _slabs(self, entry: TensorEntry) -> Iterator[memoryview]:
        """Yield the tensor's bytes in order, in slabs that fit the memory."""
        itemsize = DTYPE_BYTES[entry.dtype]
        for box in _slab_boxes(Box.full(entry.shape), max(1, self._slab_bytes // itemsize)):
            data = np.empty(box.num_elements * itemsize, dtype=np.uint8).data
            part = Part(entry.key, entry.dtype, entry.shape, box)
            reads = plan([part], [self._checkpoint.state_map], span_bytes_max=self._slab_bytes // 2)
            execute(reads, [self._source], [data], threads=1, batch_bytes=self._slab_bytes // 2)
            yield data
            self._done_bytes += len(data)
            if self._progress is not None:
                self._progress(self._done_bytes, self._total_bytes)


def _slab_boxes(box: Box, num_elements_max: int) -> Iterator[Box]:
    """Yield boxes that follow one another in the memory of ``box``, none larger than the bound."""
    if box.is_empty:
        return
    if box.num_elements <= num_elements_max:
        yield box
        return
    dim = next(d for d, extent in enumerate(box.shape) if extent > 1)
    row = box.num_elements // box.shape[dim]
    step = max(1, num_elements_max // row)
    for low in range(box.start[dim], box.stop[dim], step):
        yield from _slab_boxes(
            box.with_dim(dim, low, min(low + step, box.stop[dim])), num_elements_max
        )


def _files_of(entries: Sequence[TensorEntry]) -> list[list[TensorEntry]]:
    """Cut a family into files: by name, none above the size unless one tensor is."""
    groups: list[list[TensorEntry]] = [[]]
    num_bytes = 0
    for entry in entries:
        if groups[-1] and num_bytes + entry.num_bytes > _FILE_BYTES_MAX:
            groups.append([])
            num_bytes = 0
        groups[-1].append(entry)
        num_bytes += entry.num_bytes
    for group in groups:
        # safetensors wants every tensor aligned and no gaps between them.
        group.sort(key=lambda entry: (-DTYPE_BYTES[entry.dtype], entry.key.fqn))
    return groups


def _header(entries: Sequence[TensorEntry]) -> bytes:
    """Return the length and the JSON that begin a safetensors file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset_bytes = 0
    for entry in entries:
        header[entry.key.fqn] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [offset_bytes, offset_bytes + entry.num_bytes],
        }
        offset_bytes += entry.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _family(slot: str) -> str:
    """Return how the files of a slot begin; ``model`` is what other tools look for."""
    if slot == "weight":
        return "model"
    if slot == "model" or not _SAFE_SLOT.fullmatch(slot):
        return f"slot-{_file_name(slot)}"
    return slot


def _file_name(name: str) -> str:
    """Return ``name`` as part of a file name: anything but letters, digits and ``_-`` escaped."""
    if not name:
        return "%"
    return quote(name, safe="").replace(".", "%2E").replace("~", "%7E")


def read_extra(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the small named values of a universal checkpoint, verified.

    Raises:
        ChecksumMismatchError: A file is damaged.
    """
    values: dict[str, Any] = {}
    for name, file in checkpoint.manifest.extra.items():
        path = join(checkpoint.directory, file)
        data = checkpoint.store.read(path)
        if crc32(data) != checkpoint.manifest.files[file].crc32:
            raise ChecksumMismatchError(f"{path} is damaged; use an older checkpoint", path=path)
        try:
            values[name] = json.loads(data)
        except ValueError as error:
            raise CheckpointCorruptError(f"{path} is not JSON: {error}", path=path) from error
    return values
