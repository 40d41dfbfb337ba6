"""Strided pieces of a tensor and of a rank's shard, and the boxes they consist of. Pure.

A piece is given by strides as in ``torch.as_strided``, once in the whole tensor and once in the
shard: the form of DeepSpeed's affine maps (``deepspeed/checkpoint/affine.py``, 0.19.8).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from ucp_core.errors import PatternError, UnsupportedVersionError
from ucp_core.geometry import Box

#: Version of DeepSpeed's affine maps that ``parse_affine_map`` understands.
AFFINE_MAP_VERSION = 1
#: A piece of more boxes would have to be copied element by element.
BOXES_MAX = 1 << 14


class AffinePiece(NamedTuple):
    """Elements of the whole tensor and their place in one rank's shard."""

    shape: tuple[int, ...]  #: Shape of the view, on both sides.
    source_offset: int  #: First element in the whole tensor.
    #: Strides in the whole tensor, in elements, for each dim of ``shape``.
    source_strides: tuple[int, ...]
    dest_offset: int  #: First element in the shard.
    dest_strides: tuple[int, ...]  #: Strides in the shard, in elements.
    #: All ranks with these elements; the lowest is the primary one.
    locations: tuple[int, ...]
    scale: float = 1.0  #: The shard holds the elements multiplied by this factor.


@dataclass(frozen=True, slots=True)
class Affine:
    """Strided pieces, as DeepSpeed's affine maps describe them."""

    shape: tuple[int, ...]
    shards: tuple[tuple[int, ...], ...]  #: Shape of the shard by rank.
    pieces: tuple[tuple[AffinePiece, ...], ...]  #: By rank.


class _Dim(NamedTuple):
    size: int
    source: int
    dest: int


class _View(NamedTuple):
    dims: tuple[_Dim, ...]
    source: int
    dest: int


class _Aligned(NamedTuple):
    """The box that a view spans; its extent is 1 along axes without a dim of the view."""

    start: tuple[int, ...]
    extents: tuple[int, ...]
    axes: tuple[int, ...]


class _Change(NamedTuple):
    """How to change dim ``dim`` of a view so that it can become boxes.

    ``cut`` splits it after that many elements, and ``fold`` makes rows of that many. If both are 0,
    every index gets a view of its own.
    """

    dim: int
    cut: int = 0
    fold: int = 0


def piece_boxes(
    piece: AffinePiece, whole: Sequence[int], shard: Sequence[int], *, what: str
) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """Yield the boxes of a piece in the shard, each with its start in the whole tensor."""
    if 0 in piece.shape:
        return
    if not len(piece.shape) == len(piece.source_strides) == len(piece.dest_strides):
        raise PatternError(
            f"{what}: a piece of shape {list(piece.shape)} has {len(piece.source_strides)} source "
            f"and {len(piece.dest_strides)} destination strides; there must be one for each dim"
        )
    _check_inside(piece, piece.source_offset, piece.source_strides, whole, f"{what}: the tensor")
    _check_inside(piece, piece.dest_offset, piece.dest_strides, shard, f"{what}: the shard")
    todo = [_merged(piece)]
    done = 0
    while todo:
        view = todo.pop()
        source = _align(whole, view.source, [(d.size, d.source) for d in view.dims])
        dest = _align(shard, view.dest, [(d.size, d.dest) for d in view.dims])
        if isinstance(source, _Change):
            change = source
        elif isinstance(dest, _Change):
            change = dest
        elif (source.extents, source.axes) != (dest.extents, dest.axes):
            change = _Change(0)
        else:
            done += 1
            stop = tuple(a + n for a, n in zip(dest.start, dest.extents, strict=True))
            yield Box(dest.start, stop), source.start
            continue
        more = 2 if change.cut or change.fold else view.dims[change.dim].size
        if done + len(todo) + more > BOXES_MAX:
            raise PatternError(
                f"{what}: the piece of shape {list(piece.shape)} at {piece.source_offset} with "
                f"strides {list(piece.source_strides)} (in the shard {list(piece.dest_strides)}) "
                f"is not made of boxes of shape {list(whole)}: more than {BOXES_MAX} would be "
                "needed; describe it by a cut with parts"
            )
        todo += _changed(view, change)


def _check_inside(
    piece: AffinePiece, offset: int, strides: Sequence[int], shape: Sequence[int], what: str
) -> None:
    last = offset + sum((n - 1) * s for n, s in zip(piece.shape, strides, strict=True))
    if offset < 0 or last >= prod(shape) or any(stride < 0 for stride in strides):
        raise PatternError(
            f"{what} of shape {list(shape)} has {prod(shape)} elements, but a piece of shape "
            f"{list(piece.shape)} reaches from {offset} to {last} with strides {list(strides)}"
        )


def _merged(piece: AffinePiece) -> _View:
    """Return the view with the outermost dims first, joining dims that are one on both sides."""
    dims: list[_Dim] = []
    given = map(_Dim, piece.shape, piece.source_strides, piece.dest_strides)
    for dim in sorted((d for d in given if d.size > 1), key=lambda d: -d.source):
        outer = dims[-1] if dims else None
        if outer and (outer.source, outer.dest) == (dim.source * dim.size, dim.dest * dim.size):
            dims[-1] = _Dim(outer.size * dim.size, dim.source, dim.dest)
        else:
            dims.append(dim)
    return _View(tuple(dims), piece.source_offset, piece.dest_offset)


def _align(
    shape: Sequence[int], offset: int, dims: Sequence[tuple[int, int]]
) -> _Aligned | _Change:
    """Return the box that the dims span from ``offset`` on, or the change they need."""
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    start: list[int] = []
    rest = offset
    for stride in strides:
        index, rest = divmod(rest, stride)
        start.append(index)
    extents = [1] * len(shape)
    used: list[int] = []
    for number, (size, stride) in enumerate(dims):
        axes = [a for a, s in enumerate(strides) if s == stride and shape[a] > 1]
        if not axes or extents[axes[0]] > 1:
            return _Change(number)
        axis = axes[0]
        room = shape[axis] - start[axis]
        if size > room:
            if start[axis] or size % shape[axis]:
                return _Change(number, cut=room if start[axis] else size - size % shape[axis])
            return _Change(number, fold=shape[axis])
        extents[axis] = size
        used.append(axis)
    return _Aligned(tuple(start), tuple(extents), tuple(used))


def _changed(view: _View, change: _Change) -> list[_View]:
    dims = list(view.dims)
    size, source, dest = dims[change.dim]
    if change.cut:
        low, high = list(dims), list(dims)
        low[change.dim] = _Dim(change.cut, source, dest)
        high[change.dim] = _Dim(size - change.cut, source, dest)
        behind = (view.source + change.cut * source, view.dest + change.cut * dest)
        return [_View(_real(high), *behind), view._replace(dims=_real(low))]
    if change.fold:
        rows = _Dim(size // change.fold, source * change.fold, dest * change.fold)
        dims[change.dim : change.dim + 1] = [rows, _Dim(change.fold, source, dest)]
        return [view._replace(dims=_real(dims))]
    return [
        _View(
            (*dims[: change.dim], *dims[change.dim + 1 :]),
            view.source + index * source,
            view.dest + index * dest,
        )
        for index in reversed(range(size))
    ]


def _real(dims: Sequence[_Dim]) -> tuple[_Dim, ...]:
    return tuple(dim for dim in dims if dim.size > 1)


def parse_affine_map(document: Any, *, where: str) -> dict[str, Affine]:
    """Return the maps of a DeepSpeed checkpoint's ``affine_map``, keyed by regular expression.

    Args:
        document: ``{version, params: {regex: {logical_shape, ranks: {rank: {shard_shape,
            pieces: [{shape, source: [offset, strides], dest: [offset, strides], locations,
            scale?}]}}}}}``, as DeepSpeed 0.19.8 writes it.
        where: File and key, for errors.
    """
    if not isinstance(document, Mapping):
        raise PatternError(f"{where} is not a mapping")
    version = document.get("version")
    if version != AFFINE_MAP_VERSION:
        raise UnsupportedVersionError(
            f"{where} has version {version!r}, but this program reads {AFFINE_MAP_VERSION}: "
            "update everstep",
            version=version,
        )
    params = document.get("params")
    if not isinstance(params, Mapping):
        raise PatternError(f"{where}: params is not a mapping")
    maps: dict[str, Affine] = {}
    for regex, entry in params.items():
        try:
            maps[str(regex)] = parse_affine(entry)
        except PatternError as error:
            raise PatternError(f"{where}: params[{str(regex)[:80]!r}]: {error}") from error
    return maps


def parse_affine(entry: Any) -> Affine:
    """Return one map of an ``affine_map``: ``{logical_shape, ranks}``; else ``PatternError``."""
    try:
        ranks = {int(rank): value for rank, value in entry["ranks"].items()}
        if sorted(ranks) != list(range(len(ranks))):
            raise PatternError(f"ranks {sorted(ranks)[:8]} are not 0 .. {len(ranks) - 1}")
        return Affine(
            shape=_ints(entry["logical_shape"]),
            shards=tuple(_ints(ranks[rank]["shard_shape"]) for rank in range(len(ranks))),
            pieces=tuple(
                tuple(_parse_piece(piece) for piece in ranks[rank]["pieces"])
                for rank in range(len(ranks))
            ),
        )
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise PatternError(
            f"not an affine map of version {AFFINE_MAP_VERSION}: {type(error).__name__} {error}"
        ) from error


def _parse_piece(piece: Mapping[str, Any]) -> AffinePiece:
    (source_offset, source_strides), (dest_offset, dest_strides) = piece["source"], piece["dest"]
    return AffinePiece(
        shape=_ints(piece["shape"]),
        source_offset=int(source_offset),
        source_strides=_ints(source_strides),
        dest_offset=int(dest_offset),
        dest_strides=_ints(dest_strides),
        locations=_ints(piece["locations"]),
        scale=float(piece.get("scale", 1.0)),
    )


def _ints(values: Any) -> tuple[int, ...]:
    numbers = tuple(int(value) for value in values)
    if any(number < 0 for number in numbers):
        raise ValueError(f"a negative number in {list(numbers)[:8]}")
    return numbers
