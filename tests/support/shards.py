"""Tensors cut by numpy alone, the slow and plain way, to judge patterns by."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ucp_core.geometry import Fragment
from ucp_core.language import Cut, Grid, Pattern, Replicated, Unique

Array = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Spread:
    """A tensor, its shards by rank, and the pattern that says how they belong together."""

    whole: Array
    shards: list[Array]
    pattern: Pattern

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [shard.shape for shard in self.shards]


def random_spread(rng: random.Random, ranks: int) -> Spread:
    """Return a tensor spread by a random pattern over ``ranks`` ranks (1 where it is unique)."""
    kinds = [_unique, _replicated, _cut, _padded, _fused, _fused_unevenly, _experts, _grid]
    return rng.choice(kinds)(rng, ranks)


def random_average(rng: random.Random, ranks: int) -> tuple[Array, list[Array]]:
    """Return a tensor and copies of it whose mean it is."""
    whole = random_array(rng, _shape(rng)) // 8
    shifts = [rng.randint(-50, 50) for _ in range(ranks - 1)]
    return whole, [whole + shift for shift in [*shifts, -sum(shifts)]]


def random_array(rng: random.Random, shape: tuple[int, ...]) -> Array:
    return np.random.default_rng(rng.randrange(2**32)).integers(-(2**30), 2**30, shape, np.int32)


def garbage(count: int) -> Array:
    return np.full(count, 0x7F7F7F7F, np.int32)


def _shape(rng: random.Random, low: int = 0) -> tuple[int, ...]:
    return tuple(rng.choice((1, 2, 3, 4, 5, 6)) for _ in range(rng.randint(low, 3)))


def _sizes(rng: random.Random, count: int, low: int = 0) -> list[int]:
    return [rng.randint(low, 4) for _ in range(count)]


def _whole_of(rng: random.Random, extent: int) -> tuple[int, Array]:
    shape = list(_shape(rng, 1))
    dim = rng.randrange(len(shape))
    shape[dim] = extent
    return dim, random_array(rng, tuple(shape))


def _ranges(whole: Array, dim: int, widths: list[int]) -> list[Array]:
    assert sum(widths) == whole.shape[dim]
    return [np.ascontiguousarray(s) for s in np.split(whole, np.cumsum(widths)[:-1], dim)]


def _unique(rng: random.Random, _ranks: int) -> Spread:
    whole = random_array(rng, _shape(rng))
    return Spread(whole, [whole], Unique())


def _replicated(rng: random.Random, ranks: int) -> Spread:
    whole = random_array(rng, _shape(rng))
    return Spread(whole, [whole] * ranks, Replicated(rng.choice(("equal", "first"))))


def _cut(rng: random.Random, ranks: int) -> Spread:
    widths = _sizes(rng, ranks)
    dim, whole = _whole_of(rng, sum(widths))
    given = rng.choice((None, tuple(widths)))
    signed = rng.choice((dim, dim - whole.ndim))
    return Spread(whole, _ranges(whole, dim, widths), Cut(signed, widths=given))


def _padded(rng: random.Random, ranks: int) -> Spread:
    width = rng.randint(1, 4)
    unpadded = rng.randint(1, width * ranks)
    dim, whole = _whole_of(rng, unpadded)
    widths = [(0, width * ranks - unpadded if d == dim else 0) for d in range(whole.ndim)]
    padded = np.pad(whole, widths, constant_values=0x7F7F7F7F)
    return Spread(whole, _ranges(padded, dim, [width] * ranks), Cut(dim, unpadded=unpadded))


def _fused(rng: random.Random, ranks: int) -> Spread:
    ratio = _sizes(rng, rng.randint(1, 4), 1)
    unit = rng.randint(1, 2) * ranks
    parts = [unit * share for share in ratio]
    dim, whole = _whole_of(rng, sum(parts))
    cut = rng.choice((Cut(dim, parts=tuple(parts)), Cut(dim, ratio=tuple(ratio))))
    widths = [[part // ranks] * ranks for part in parts]
    return Spread(whole, _fuse(whole, dim, widths), cut)


def _fused_unevenly(rng: random.Random, ranks: int) -> Spread:
    widths = [_sizes(rng, ranks) for _ in range(rng.randint(1, 3))]
    dim, whole = _whole_of(rng, sum(map(sum, widths)))
    cut = Cut(dim, part_widths=tuple(map(tuple, widths)))
    return Spread(whole, _fuse(whole, dim, widths), cut)


def _experts(rng: random.Random, ranks: int) -> Spread:
    """The paper's way for ``[experts * out, in]``: view it with an expert axis, cut that view."""
    experts, out, width = rng.randint(1, 4), rng.randint(1, 2) * ranks, rng.randint(1, 3)
    whole = random_array(rng, (experts * out, width))
    pieces = np.split(whole.reshape(experts, out, width), ranks, 1)
    return Spread(whole, [piece.reshape(-1, width) for piece in pieces], Cut(0, parts=experts))


def _fuse(whole: Array, dim: int, widths: list[list[int]]) -> list[Array]:
    parts = _ranges(whole, dim, [sum(part) for part in widths])
    cut = [_ranges(part, dim, width) for part, width in zip(parts, widths, strict=True)]
    return [np.concatenate(mine, dim) for mine in zip(*cut, strict=True)]


def _grid(rng: random.Random, ranks: int) -> Spread:
    rows = next(n for n in (3, 2, 1) if ranks % n == 0)
    columns = ranks // rows
    first, second = _sizes(rng, rows), [rng.randint(1, 2)] * columns
    shape = [sum(first), sum(second), *_shape(rng)[:1]]
    whole = random_array(rng, tuple(shape))
    shards = [s for part in _ranges(whole, 0, first) for s in _ranges(part, 1, second)]
    degrees = rng.choice(((rows, columns), (0, columns), (rows, 0)))
    return Spread(whole, shards, Grid((Cut(0), Cut(-whole.ndim + 1)), degrees))


def zero_partitions(rng: random.Random, shards: list[Array], ranks: int) -> ZeroPartitions:
    """Lay shards one behind the other, with random gaps, and cut the whole in equal ranges."""
    starts, pieces, at = [], [], 0
    for shard in shards:
        starts.append(at)
        gap = garbage(rng.choice((0, 0, 1, 3)))
        pieces += [shard.reshape(-1), gap]
        at += shard.size + gap.size
    pieces.append(garbage(-at % ranks))
    return ZeroPartitions(np.split(np.concatenate(pieces), ranks), starts)


@dataclass(frozen=True)
class ZeroPartitions:
    """Equal ranges of one flat buffer, and where each shard begins in it."""

    data: list[Array]
    starts: list[int]

    def overlaps(self, index: int, size: int) -> Iterator[tuple[int, int, tuple[int, int]]]:
        """Yield partition, element in it, and range of the flattened shard, for each overlap."""
        width = self.data[0].size
        for rank in range(len(self.data)):
            low = max(self.starts[index], rank * width)
            high = min(self.starts[index] + size, (rank + 1) * width)
            if low < high:
                begin = self.starts[index]
                yield rank, low - rank * width, (low - begin, high - begin)


def assembled(shape: tuple[int, ...], fragments: list[Fragment], files: dict[str, bytes]) -> Array:
    """Return the tensor that primary fragments describe, by numpy's strides."""
    whole = np.full(shape, 0x55555555, np.int32)
    for fragment in fragments:
        if fragment.replica:
            continue
        held = np.ndarray(
            fragment.box.shape,
            np.int32,
            files[fragment.file][fragment.offset_bytes :][: fragment.num_bytes],
            strides=fragment.strides,
        )
        whole[tuple(map(slice, *fragment.box))] = held
    return whole
