"""Checkpoints as a foreign framework may leave them: strided, padded, replicated, averaged."""

import random
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tests.support.checkpoints import cuts
from ucp_core.geometry import (
    DTYPE_BYTES,
    Box,
    Extent,
    Fragment,
    StateMap,
    TensorEntry,
    TensorKey,
    packed_strides,
)
from ucp_core.manifest import Kind, Manifest
from ucp_core.native import Checkpoint
from ucp_core.numerics import crc32, decode, encode
from ucp_core.storage import MemoryStore

DIRECTORY = "foreign"


class Foreign(NamedTuple):
    """A foreign checkpoint and the bytes of every tensor that it holds, by numpy."""

    checkpoint: Checkpoint
    values: dict[TensorKey, NDArray[Any]]


def index(box: Box) -> tuple[Any, ...]:
    """Return a box as numpy's index."""
    return (*map(slice, box.start, box.stop), ...)


class Builder:
    """Lays fragments into files, each in a way of its own."""

    def __init__(self, rng: random.Random, store: MemoryStore, block_bytes: int) -> None:
        self._rng = rng
        self._store = store
        self._block_bytes = block_bytes
        self._files = [bytearray() for _ in range(rng.randint(1, 3))]
        self._extents: list[list[Extent]] = [[] for _ in self._files]
        self.entries: dict[TensorKey, TensorEntry] = {}
        self.values: dict[TensorKey, NDArray[Any]] = {}

    def tensor(self, key: TensorKey, dtype: str, shape: tuple[int, ...], copies: int = 1) -> None:
        """Add a tensor of random values, cut at random."""
        itemsize = DTYPE_BYTES[dtype]
        fragments: list[Fragment] = []
        terms: list[NDArray[Any]] = []
        for copy in range(copies):
            if copies == 1:
                data = self._rng.randbytes(prod(shape) * itemsize)
            else:
                normal = [self._rng.gauss(0, 1) for _ in range(prod(shape))]
                data = encode(dtype, np.array(normal, np.float64)).tobytes()
            array = np.asarray(np.frombuffer(data, f"u{itemsize}").reshape(shape))
            terms.append(array)
            boxes = [box for box in cuts(self._rng, shape, 3) if not box.is_empty]
            fragments += [self._fragment(array, box, copy=copy) for box in boxes]
            replicas = [box for box in boxes if self._rng.random() < 0.3]
            fragments += [self._fragment(array, box, copy=copy, replica=True) for box in replicas]
        self._rng.shuffle(fragments)
        self.entries[key] = TensorEntry(
            key=key, dtype=dtype, shape=shape, fragments=tuple(fragments), copies=copies
        )
        value = terms[0]
        if copies > 1:
            total = sum(decode(dtype, memoryview(term.tobytes())) for term in terms)
            value = encode(dtype, np.asarray(total) / copies).view(value.dtype).reshape(shape)
        self.values[key] = value

    def _fragment(
        self, whole: NDArray[Any], box: Box, *, copy: int = 0, replica: bool = False
    ) -> Fragment:
        number = self._rng.randrange(len(self._files))
        array, itemsize = whole[index(box)], whole.itemsize
        low = self._rng.randint(0, 9)
        self._files[number] += self._rng.randbytes(low)
        start = len(self._files[number])
        way = self._rng.choice(["checked", "plain", "strided"])
        if way == "strided":
            first, strides, data = self._strided(array)
        else:
            first, strides, data = 0, None, array.tobytes()
        self._files[number] += data
        self._extents[number].append(Extent(start, len(data), crc32(data)))
        num_bytes = array.nbytes
        if strides is not None and array.size:
            steps = zip(array.shape, strides, strict=True)
            num_bytes = sum((n - 1) * stride for n, stride in steps) + itemsize
        crc: int | None = None
        blocks: tuple[int, ...] = ()
        if way == "checked":
            size = self._block_bytes
            crc = crc32(data)
            blocks = tuple(crc32(data[i : i + size]) for i in range(0, len(data), size)) or (crc,)
        name = f"rank{number}.pt"
        return Fragment(box, name, start + first, num_bytes, crc, blocks, replica, strides, copy)

    def _strided(self, array: NDArray[Any]) -> tuple[int, tuple[int, ...], bytes]:
        """Return a larger array's bytes that hold ``array`` permuted, spread and shifted."""
        order = list(range(array.ndim))
        self._rng.shuffle(order)
        shape = [array.shape[d] for d in order]
        steps = [self._rng.randint(1, 2) for _ in shape]
        shift = [self._rng.randint(0, 2) for _ in shape]
        outer = [s + n * step + 1 for n, step, s in zip(shape, steps, shift, strict=True)]
        holder = np.frombuffer(
            bytearray(self._rng.randbytes(prod(outer) * array.itemsize)), array.dtype
        ).reshape(outer)
        where = zip(shift, shape, steps, strict=True)
        cuts: tuple[Any, ...] = tuple(slice(s, s + n * step, step) for s, n, step in where)
        view = holder[(*cuts, ...)]
        view[...] = array.transpose(order)
        packed = packed_strides(outer, array.itemsize)
        first = sum(s * stride for s, stride in zip(shift, packed, strict=True))
        strides = [0] * array.ndim
        for place, dim in enumerate(order):
            strides[dim] = packed[place] * steps[place]
        return first, tuple(strides), holder.tobytes()

    def checkpoint(self) -> Checkpoint:
        """Return the checkpoint of all that was added."""
        names = [f"rank{number}.pt" for number in range(len(self._files))]
        for name, data in zip(names, self._files, strict=True):
            self._store.write_atomic(f"{DIRECTORY}/{name}", data, fsync=False)
        extents = {
            name: tuple(found) for name, found in zip(names, self._extents, strict=True) if found
        }
        state_map = StateMap(entries=self.entries, block_bytes=self._block_bytes, extents=extents)
        manifest = Manifest(kind=Kind.FOREIGN, step=1, attempt=0, state_map=state_map, files={})
        return Checkpoint(store=self._store, directory=DIRECTORY, manifest=manifest)


def random_foreign(rng: random.Random, store: MemoryStore, *, block_bytes: int) -> Foreign:
    """Return a checkpoint of a few tensors of every kind."""
    builder = Builder(rng, store, block_bytes)
    for number in range(rng.randint(1, 4)):
        shape = tuple(rng.choice((0, 1, 2, 3, 5, 7)) for _ in range(rng.randint(0, 3)))
        builder.tensor(TensorKey(f"w{number}", "weight"), rng.choice(sorted(DTYPE_BYTES)), shape)
        floating = rng.choice(("BF16", "F16", "F32", "F64", "F8_E4M3", "F8_E5M2"))
        if rng.random() < 0.5:
            key = TensorKey(f"norm{number}", "weight")
            builder.tensor(key, floating, shape, copies=rng.randint(2, 4))
    return Foreign(builder.checkpoint(), builder.values)


def random_box(rng: random.Random, shape: Sequence[int]) -> Box:
    """Return a box inside ``shape``, now and then the whole or an empty one."""
    if rng.random() < 0.2:
        return Box.full(shape)
    pairs = [sorted((rng.randint(0, n), rng.randint(0, n))) for n in shape]
    return Box(tuple(a for a, _ in pairs), tuple(b for _, b in pairs))
