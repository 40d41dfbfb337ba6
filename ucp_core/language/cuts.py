"""Ranges along dims: the arithmetic behind ``ucp_core.language.patterns``.

Pure. One cut gives every rank some ranges along one dim; several cuts along different dims give
it the boxes that these ranges span.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import NamedTuple

from ucp_core.errors import PatternError
from ucp_core.geometry import Box


@dataclass(frozen=True, slots=True)
class Cut:
    """The ranks hold consecutive ranges along one dim, in order of rank.

    Attributes:
        dim: Which dim; negative counts from the last.
        widths: Extent along ``dim`` by rank; None: what the shards have.
        parts: The tensor is several tensors fused along ``dim``, and a rank's shard is its piece
            of the first, its piece of the second, and so on: their extents in the whole tensor,
            or a number of equal parts.
        ratio: The same where only the proportions are known, as in ``(4, 1, 1)``.
        part_widths: ``part_widths[part][rank]``: extents of the pieces, where uneven.
        unpadded: True extent along ``dim``; what the shards hold behind it is padding.
    """

    dim: int = 0
    widths: tuple[int, ...] | None = None
    parts: tuple[int, ...] | int | None = None
    ratio: tuple[int, ...] | None = None
    part_widths: tuple[tuple[int, ...], ...] | None = None
    unpadded: int | None = None


class Piece(NamedTuple):
    """A box of one rank's shard, and where it lies in the whole tensor.

    Attributes:
        local: In coordinates of the shard.
        start: Where it begins in the whole tensor; it has the same shape there.
        replica: Another rank's piece holds the same elements and is the primary one.
    """

    local: Box
    start: tuple[int, ...]
    replica: bool = False


def cut_problems(cut: Cut) -> Iterator[str]:
    """Yield what is wrong with a cut whatever the shards are."""
    given = [n for n in ("widths", "parts", "ratio") if getattr(cut, n) is not None]
    if len(given) > 1:
        yield f"{' and '.join(given)} exclude each other; uneven parts have part_widths"
    if cut.part_widths is not None and {"widths", "ratio"} & set(given):
        yield f"part_widths and {given[0]} exclude each other"
    numbers = [*(cut.widths or ()), *(w for part in cut.part_widths or () for w in part)]
    if any(number < 0 for number in numbers) or (cut.unpadded or 0) < 0:
        yield "extents must not be negative"
    parts = (cut.parts,) if isinstance(cut.parts, int) else cut.parts
    if any(number < 1 for number in (*(parts or ()), *(cut.ratio or ()))):
        yield "parts and ratio must be at least 1"
    if any(value == () for value in (cut.widths, parts, cut.ratio, cut.part_widths)):
        yield "a list is empty"
    if cut.part_widths is not None:
        if len({len(widths) for widths in cut.part_widths}) > 1:
            yield "part_widths has not the same number of ranks for every part"
        count = parts if parts is None else parts[0] if isinstance(cut.parts, int) else len(parts)
        if count is not None and count != len(cut.part_widths):
            yield f"part_widths has {len(cut.part_widths)} parts, parts has {count}"
        sums = tuple(sum(widths) for widths in cut.part_widths)
        if isinstance(cut.parts, tuple) and len(cut.parts) == len(sums) and cut.parts != sums:
            yield f"part_widths add up to {list(sums)}, parts says {list(cut.parts)}"


def listed(values: Sequence[object]) -> str:
    """Return the first of some shapes or numbers, for messages."""
    shown = ", ".join(str(list(v) if isinstance(v, tuple) else v) for v in values[:4])
    return shown if len(values) <= 4 else f"{shown} and {len(values) - 4} more"  # noqa: PLR2004


class _Segment(NamedTuple):
    """A range along one dim of a rank's shard, and where it begins in the whole tensor."""

    local: int
    length: int
    start: int


def place_cuts(
    cuts: Sequence[Cut],
    degrees: Sequence[int],
    shapes: tuple[tuple[int, ...], ...],
    name: str,
) -> tuple[tuple[int, ...], tuple[tuple[Piece, ...], ...]]:
    """Return the shape of the whole tensor, and the pieces of every rank of a row-major grid.

    Raises:
        PatternError: The shards' shapes do not fit the cuts.
    """
    ndim = len(shapes[0])
    cuts = [replace(cut, dim=_dim(cut.dim, ndim, name)) for cut in cuts]
    if len({cut.dim for cut in cuts}) != len(cuts):
        raise PatternError(f"{name}: two cuts along dim {cuts[0].dim}", name=name)
    coordinates = list(product(*(range(degree) for degree in degrees)))
    extents = [
        _extents(shapes, coordinates, axis, (cut.dim, degrees[axis]), name)
        for axis, cut in enumerate(cuts)
    ]
    _check_others(shapes, {cut.dim for cut in cuts}, name)
    shape = list(shapes[0])
    segments: list[list[list[_Segment]]] = []
    for cut, along in zip(cuts, extents, strict=True):
        shape[cut.dim] = sum(along) if cut.unpadded is None else cut.unpadded
        segments.append(_segments(cut, along, name))
    pieces = tuple(
        tuple(_pieces(shapes[rank], cuts, [segments[a][i] for a, i in enumerate(place_of)]))
        for rank, place_of in enumerate(coordinates)
    )
    return tuple(shape), pieces


def _dim(dim: int, ndim: int, name: str) -> int:
    if not -ndim <= dim < ndim:
        raise PatternError(
            f"{name}: cut along dim {dim}, but its shards have {ndim} dims", name=name
        )
    return dim % ndim


def _extents(
    shapes: Sequence[tuple[int, ...]],
    coordinates: Sequence[tuple[int, ...]],
    axis: int,
    along: tuple[int, int],
    name: str,
) -> list[int]:
    """Return the extent of the shards along a dim, by their place on one axis of the grid."""
    dim, degree = along
    extents = [-1] * degree
    for rank, (shape, place_of) in enumerate(zip(shapes, coordinates, strict=True)):
        if len(shape) != len(shapes[0]):
            raise PatternError(
                f"{name}: rank {rank} holds {list(shape)}, rank 0 {list(shapes[0])}: not of as "
                "many dims",
                name=name,
                rank=rank,
            )
        index = place_of[axis]
        if extents[index] not in {-1, shape[dim]}:
            raise PatternError(
                f"{name}: rank {rank} holds {list(shape)}, but other ranks at place {index} of "
                f"grid axis {axis} have {extents[index]} along dim {dim}",
                name=name,
                rank=rank,
            )
        extents[index] = shape[dim]
    return extents


def _check_others(shapes: Sequence[tuple[int, ...]], dims: set[int], name: str) -> None:
    for rank, shape in enumerate(shapes):
        for dim, extent in enumerate(shape):
            if dim not in dims and extent != shapes[0][dim]:
                raise PatternError(
                    f"{name}: cut along dim {listed(sorted(dims))}, but rank {rank} holds "
                    f"{list(shape)} and rank 0 {list(shapes[0])}: dim {dim} differs too",
                    name=name,
                    rank=rank,
                )


def _segments(cut: Cut, extents: Sequence[int], name: str) -> list[list[_Segment]]:
    """Return by rank which ranges along the cut dim it holds, padding left out."""
    widths = _widths(cut, extents, name)
    limit = sum(extents) if cut.unpadded is None else cut.unpadded
    if limit > sum(extents):
        raise PatternError(
            f"{name}: unpadded is {limit}, but the shards {listed(extents)} add up to only "
            f"{sum(extents)} along dim {cut.dim}",
            name=name,
        )
    segments: list[list[_Segment]] = [[] for _ in extents]
    local = [0] * len(extents)
    start = 0
    for part in widths:
        for rank, width in enumerate(part):
            length = min(width, limit - start)
            if length > 0:
                _append(segments[rank], _Segment(local[rank], length, start))
            local[rank] += width
            start += width
    return segments


def _append(segments: list[_Segment], new: _Segment) -> None:
    if segments:
        last = segments[-1]
        if (last.local + last.length, last.start + last.length) == (new.local, new.start):
            segments[-1] = last._replace(length=last.length + new.length)
            return
    segments.append(new)


def _widths(cut: Cut, extents: Sequence[int], name: str) -> Sequence[Sequence[int]]:
    """Return ``widths[part][rank]``, which add up to the extents of the shards."""
    if cut.part_widths is not None:
        widths: Sequence[Sequence[int]] = cut.part_widths
    elif cut.parts is not None or cut.ratio is not None:
        sizes = _sizes(cut, sum(extents), name)
        widths = [[_even(size, len(extents), name)] * len(extents) for size in sizes]
    else:
        widths = [cut.widths or extents]
    if len(widths[0]) != len(extents):
        raise PatternError(
            f"{name}: widths are given for {len(widths[0])} ranks, {len(extents)} ranks hold it",
            name=name,
        )
    for rank, extent in enumerate(extents):
        mine = [part[rank] for part in widths]
        if sum(mine) != extent:
            raise PatternError(
                f"{name}: rank {rank} holds {extent} along dim {cut.dim}, the pattern says "
                f"{' + '.join(map(str, mine))}" + (f" = {sum(mine)}" if len(mine) > 1 else ""),
                name=name,
                rank=rank,
            )
    return widths


def _sizes(cut: Cut, whole: int, name: str) -> tuple[int, ...]:
    if isinstance(cut.parts, tuple):
        if sum(cut.parts) != whole:
            raise PatternError(
                f"{name}: the parts {listed(cut.parts)} add up to {sum(cut.parts)}, the shards "
                f"to {whole} along dim {cut.dim}",
                name=name,
            )
        return cut.parts
    ratio = cut.ratio or (1,) * (cut.parts or 1)
    unit, rest = divmod(whole, sum(ratio))
    if rest:
        raise PatternError(
            f"{name}: {whole} elements along dim {cut.dim} cannot be divided into parts of ratio "
            f"{':'.join(map(str, ratio))}; give the parts in numbers",
            name=name,
        )
    return tuple(unit * share for share in ratio)


def _even(size: int, num_ranks: int, name: str) -> int:
    if size % num_ranks:
        raise PatternError(
            f"{name}: a part of {size} cannot be divided evenly over {num_ranks} ranks; give "
            "part_widths",
            name=name,
        )
    return size // num_ranks


def _pieces(
    shape: tuple[int, ...], cuts: Sequence[Cut], segments: Sequence[Sequence[_Segment]]
) -> Iterator[Piece]:
    for chosen in product(*segments):
        low, high, start = [0] * len(shape), list(shape), [0] * len(shape)
        for cut, segment in zip(cuts, chosen, strict=True):
            low[cut.dim] = segment.local
            high[cut.dim] = segment.local + segment.length
            start[cut.dim] = segment.start
        yield Piece(Box(tuple(low), tuple(high)), tuple(start))


def fitted_cut(cut: Cut, whole: Sequence[int], degree: int, name: str) -> tuple[Cut, list[int]]:
    """Return the cut for another number of ranks, and the extents of the ranks' shards.

    Raises:
        PatternError: The dim cannot be cut so.
    """
    dim = _dim(cut.dim, len(whole), name)
    cut = replace(cut, dim=dim)
    extent = whole[dim]
    if cut.part_widths is not None:
        if len(cut.part_widths[0]) == degree and sum(map(sum, cut.part_widths)) == extent:
            return cut, [sum(part[rank] for part in cut.part_widths) for rank in range(degree)]
        parts = tuple(sum(part) for part in cut.part_widths)
        cut = replace(cut, part_widths=None, parts=parts)
    if cut.parts is not None or cut.ratio is not None:
        sizes = _sizes(cut, extent, name)
        return cut, [sum(_even(size, degree, name) for size in sizes)] * degree
    if cut.widths is not None and len(cut.widths) == degree and sum(cut.widths) == extent:
        return cut, list(cut.widths)
    width = -(-extent // degree)
    if cut.unpadded is not None:
        return replace(cut, widths=None, unpadded=extent), [width] * degree
    marks = [min(extent, width * rank) for rank in range(degree + 1)]
    return replace(cut, widths=None), [b - a for a, b in pairwise(marks)]
