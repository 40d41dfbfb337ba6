"""Writes containers of torch DCP chunk by chunk: any layout, any rank, any damage, no processes."""

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ucp_core.storage import Store


@dataclass(kw_only=True)
class Chunk:
    """A box of a tensor: where it begins, its elements, and the rank that writes it."""

    offsets: tuple[int, ...]
    data: torch.Tensor
    rank: int = 0


@dataclass(kw_only=True)
class Save:
    """The content of one save."""

    #: Shape and chunks by key.
    tensors: dict[str, tuple[tuple[int, ...], list[Chunk]]] = field(default_factory=dict)
    #: Values that are no tensors, by key; rank 0 writes them.
    objects: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, tuple[Any, ...]] | None = None  #: Where keys were in the nested state.

    def whole(self, key: str, tensor: torch.Tensor, rank: int = 0) -> None:
        """Add a tensor in one chunk."""
        chunk = Chunk(offsets=(0,) * tensor.ndim, data=tensor, rank=rank)
        self.tensors[key] = (tuple(tensor.shape), [chunk])

    def cut(self, key: str, tensor: torch.Tensor, dim: int, ranks: Sequence[int]) -> None:
        """Add a tensor in one chunk for each rank, uneven as FSDP cuts it."""
        chunks: list[Chunk] = []
        low = 0
        for rank, part in zip(ranks, tensor.chunk(len(ranks), dim), strict=False):
            offsets = tuple(low if d == dim else 0 for d in range(tensor.ndim))
            chunks.append(Chunk(offsets=offsets, data=part.clone(), rank=rank))
            low += part.shape[dim]
        self.tensors[key] = (tuple(tensor.shape), chunks)

    def stack(self, key: str, tensor: torch.Tensor, dim: int, ranks: Sequence[int]) -> None:
        """Add layers (dim 0), each cut along another dim, as Megatron does."""
        chunks: list[Chunk] = []
        for layer in range(tensor.shape[0]):
            low = 0
            for rank, part in zip(ranks, tensor[layer].chunk(len(ranks), dim), strict=True):
                offsets = [0] * part.ndim
                offsets[dim] = low
                data = part.clone().unsqueeze(0)
                chunks.append(Chunk(offsets=(layer, *offsets), data=data, rank=rank))
                low += part.shape[dim]
        self.tensors[key] = (tuple(tensor.shape), chunks)


def blob(value: Any) -> bytes:
    """Return what ``torch.save`` makes of a value."""
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def write(store: Store, directory: str, save: Save, *, name: str = ".metadata") -> Metadata:
    """Write the data files and then the metadata; return what was pickled."""
    files: dict[str, bytearray] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    described: dict[str, Any] = {}

    def put(file: str, data: bytes) -> _StorageInfo:
        content = files.setdefault(file, bytearray())
        content += data
        return _StorageInfo(file, len(content) - len(data), len(data))

    for key, value in save.objects.items():
        described[key] = BytesStorageMetadata()
        places[MetadataIndex(key)] = put("__0_0.distcp", blob(value))
    for key, (shape, chunks) in save.tensors.items():
        described[key] = TensorStorageMetadata(
            TensorProperties(dtype=chunks[0].data.dtype),
            torch.Size(shape),
            [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.data.shape)) for c in chunks],
        )
        for chunk in chunks:
            index = MetadataIndex(key, torch.Size(chunk.offsets))
            places[index] = put(f"__{chunk.rank}_0.distcp", blob(chunk.data))
    metadata = Metadata(
        described, save.paths, places, StorageMeta(checkpoint_id=directory), "1.0.0"
    )
    for file, content in files.items():
        store.write_atomic(f"{directory}/{file}", bytes(content), fsync=False)
    store.write_atomic(f"{directory}/{name}", pickle.dumps(metadata), fsync=False)
    return metadata


def rewrite(store: Store, directory: str, metadata: Metadata) -> None:
    """Put other metadata in place, as a test damaged them."""
    store.write_atomic(f"{directory}/.metadata", pickle.dumps(metadata), fsync=False)


def random_tensors(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, torch.Tensor]:
    """Return fp32 tensors of random bits that are numbers."""
    generator = torch.Generator().manual_seed(seed)
    return {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}
