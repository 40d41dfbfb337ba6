"""Patterns: how the shards of several ranks form one tensor. Pure.

A pattern describes this in words. ``place`` computes which box of which rank's shard is which box
of the whole tensor. ``operators`` turns placements into fragments.

========================  =============================================================
paper (ATC'25, table 1)   here
========================  =============================================================
unique                    ``Unique()``
replicate                 ``Replicated()``
partial                   ``Average()``
Shard-V, Shard-H          ``Cut(0)``, ``Cut(1)``
Shard-Hy                  ``Grid((Cut(0), Cut(1)), degrees=(2, 4))``
Shard-NC, fused experts   ``Cut(0, parts=num_experts)``
Shard-NC, GQA             ``Cut(0, parts=(q, k, v))`` or ``Cut(0, ratio=(4, 1, 1))``
========================  =============================================================
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise, product
from math import prod
from typing import Any, Literal, NamedTuple, TypeAlias

from ucp_core.errors import PatternError
from ucp_core.geometry import Box
from ucp_core.language.affine import Affine, AffinePiece, piece_boxes
from ucp_core.numerics import shortened


@dataclass(frozen=True, slots=True)
class Unique:
    """Exactly one rank holds the tensor, such as a layer of a pipeline stage or an expert."""


@dataclass(frozen=True, slots=True)
class Replicated:
    """Every rank holds the whole tensor."""

    #: ``equal``: compare the copies, and a difference is an error; ``first``: take the first rank's
    #: copy and ignore the others.
    check: Literal["equal", "first"] = "equal"


@dataclass(frozen=True, slots=True)
class Average:
    """Every rank updated the whole tensor on its own; the value is the mean over the ranks."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The ranks hold consecutive ranges along one dim, in order of rank."""

    dim: int  #: The dim; negative counts from the last.
    #: Extent along ``dim`` by rank; by default, that of the shards.
    widths: tuple[int, ...] | None = None
    #: Several tensors are fused along ``dim``, and a shard is a piece of the first, a piece of the
    #: second, and so on: their extents in the whole tensor, or their number if they are equal.
    parts: tuple[int, ...] | int | None = None
    #: Proportions of the parts, such as ``(4, 1, 1)``, if their extents are unknown.
    ratio: tuple[int, ...] | None = None
    #: ``part_widths[part][rank]``: extents of uneven pieces.
    part_widths: tuple[tuple[int, ...], ...] | None = None
    #: True extent along ``dim``; the rest of the shards is padding.
    unpadded: int | None = None


@dataclass(frozen=True, slots=True)
class Grid:
    """The ranks form a row-major grid; each of its axes cuts another dim."""

    cuts: tuple[Cut, ...]  #: One per axis of the grid.
    #: Ranks along each axis; one may be 0 and follows from the number of ranks.
    degrees: tuple[int, ...]


Pattern: TypeAlias = Unique | Replicated | Average | Cut | Grid | Affine


class ShardPiece(NamedTuple):
    """A box of one rank's shard, and its place in the whole tensor."""

    local: Box  #: The box in the coordinates of the shard.
    start: tuple[int, ...]  #: Its first element in the whole tensor, where it has the same shape.
    replica: bool = False  #: Another rank's piece holds the same elements and is the primary one.


@dataclass(frozen=True, slots=True)
class Placement:
    """A pattern in numbers, for shards of known shapes."""

    shape: tuple[int, ...]  #: Shape of the whole tensor, without padding.
    #: By rank; elements of a shard outside of all pieces are padding.
    pieces: tuple[tuple[ShardPiece, ...], ...]
    #: Each element is on one rank (``once``), equal on several (``replica``), or must be averaged
    #: (``average``).
    relation: Literal["once", "replica", "average"]
    #: The ``check`` of a ``Replicated``; ``equal`` for other patterns.
    check: Literal["equal", "first"]
    shards: tuple[tuple[int, ...], ...]  #: Shape of each rank's shard.


def place(pattern: Pattern, shards: Sequence[Sequence[int]], *, name: str = "tensor") -> Placement:
    """Return where the elements of the shards are in the whole tensor."""
    with _described(pattern, name):
        return _place(pattern, tuple(tuple(shape) for shape in shards))


def split(
    pattern: Pattern, shape: Sequence[int], num_ranks: int, *, name: str = "tensor"
) -> Placement:
    """Return how ``num_ranks`` ranks hold a tensor under ``pattern``: the inverse of ``place``.

    Widths for another number of ranks are ignored. A cut without parts gives every rank
    ``ceil(extent / num_ranks)`` as torch does, and the last ranks less; with ``unpadded``, the last
    ranks get padding instead.
    """
    with _described(pattern, name):
        return _split(pattern, tuple(shape), num_ranks)


@contextmanager
def _described(pattern: Pattern, name: str) -> Iterator[None]:
    """Refuse a pattern that cannot fit any shards; each message starts with the tensor's name."""
    if problems := pattern_problems(pattern):
        raise PatternError(f"{name}: {'; '.join(problems)}", name=name)
    try:
        yield
    except PatternError as error:
        raise PatternError(f"{name}: {error}", name=name, **error.facts) from error


def _place(pattern: Pattern, shapes: tuple[tuple[int, ...], ...]) -> Placement:
    if not shapes:
        raise PatternError("no rank holds a shard of it")
    match pattern:
        case Unique():
            if len(shapes) > 1:
                raise PatternError(
                    f"declared unique, but {len(shapes)} ranks hold a shard of it: "
                    f"{_listed(shapes)}; declare it replicated or cut"
                )
            return _whole_on_each(shapes, "once", "equal")
        case Replicated(check=check):
            _check_alike(shapes, "replicated")
            return _whole_on_each(shapes, "replica", check)
        case Average():
            _check_alike(shapes, "to be averaged")
            return _whole_on_each(shapes, "average", "equal")
        case Cut():
            return _place_cuts((pattern,), (len(shapes),), shapes)
        case Grid():
            return _place_cuts(pattern.cuts, _degrees(pattern, len(shapes)), shapes)
        case Affine():
            return _place_affine(pattern, shapes)


def _split(pattern: Pattern, whole: tuple[int, ...], num_ranks: int) -> Placement:
    match pattern:
        case Unique() | Replicated() | Average():
            return _place(pattern, (whole,) * num_ranks)
        case Affine():
            if len(pattern.shards) != num_ranks or pattern.shape != whole:
                raise PatternError(
                    f"the affine map describes {list(pattern.shape)} on {len(pattern.shards)} "
                    f"ranks, but {list(whole)} on {num_ranks} is needed; give a cut for it"
                )
            return _place(pattern, pattern.shards)
        case Cut():
            grid = Grid((pattern,), (num_ranks,))
        case Grid():
            grid = pattern
    degrees = _degrees(grid, num_ranks)
    fitted = [_fitted_cut(cut, whole, n) for cut, n in zip(grid.cuts, degrees, strict=True)]
    shards = []
    for coordinates in product(*(range(degree) for degree in degrees)):
        local = list(whole)
        for (cut, extents), index in zip(fitted, coordinates, strict=True):
            local[cut.dim] = extents[index]
        shards.append(tuple(local))
    return _place_cuts(tuple(cut for cut, _ in fitted), degrees, tuple(shards))


def pattern_problems(pattern: Pattern) -> list[str]:
    """Return the problems of a pattern that do not depend on the shards."""
    match pattern:
        case Replicated(check=check) if check not in {"equal", "first"}:
            return [f"check is {check!r}, must be equal or first"]
        case Cut():
            return list(_cut_problems(pattern))
        case Grid(cuts=cuts, degrees=degrees):
            problems = [problem for cut in cuts for problem in _cut_problems(cut)]
            if not cuts or len(cuts) != len(degrees):
                problems.append(f"a grid of {len(cuts)} cuts has {len(degrees)} degrees")
            if len({cut.dim for cut in cuts}) != len(cuts):
                problems.append(f"two cuts of a grid along one dim: {[c.dim for c in cuts]}")
            if any(degree < 0 for degree in degrees) or degrees.count(0) > 1:
                problems.append(f"degrees {list(degrees)}: at least 1 each, and one may be 0")
            return problems
        case _:
            return []


def _whole_on_each(
    shapes: tuple[tuple[int, ...], ...],
    relation: Literal["once", "replica", "average"],
    check: Literal["equal", "first"],
) -> Placement:
    box, start = Box.full(shapes[0]), (0,) * len(shapes[0])
    pieces = tuple(
        (ShardPiece(box, start, replica=relation == "replica" and rank > 0),)
        for rank in range(len(shapes))
    )
    return Placement(shapes[0], pieces, relation, check, shapes)


def _check_alike(shapes: Sequence[tuple[int, ...]], what: str, but: Collection[int] = ()) -> None:
    """Check that all shards have the same shape, except along the dims in ``but``."""
    for rank, shape in enumerate(shapes):
        if len(shape) != len(shapes[0]) or any(
            n != m for d, (n, m) in enumerate(zip(shape, shapes[0], strict=True)) if d not in but
        ):
            raise PatternError(
                f"declared {what}, but rank {rank} holds {list(shape)} and rank 0 "
                f"{list(shapes[0])}; correct the rule, or give one for its slot",
                rank=rank,
            )


def _degrees(grid: Grid, num_ranks: int) -> tuple[int, ...]:
    known = prod(degree for degree in grid.degrees if degree)
    degrees = tuple(degree or max(1, num_ranks // known) for degree in grid.degrees)
    if prod(degrees) != num_ranks:
        raise PatternError(
            f"a grid of {' x '.join(map(str, grid.degrees))} ranks does not fit {num_ranks} ranks"
        )
    return degrees


def _place_affine(affine: Affine, shapes: tuple[tuple[int, ...], ...]) -> Placement:
    if len(shapes) != len(affine.shards):
        raise PatternError(
            f"the affine map is for {len(affine.shards)} ranks, but {len(shapes)} ranks hold a "
            "shard"
        )
    pieces: list[tuple[ShardPiece, ...]] = []
    for rank, (shape, declared) in enumerate(zip(shapes, affine.shards, strict=True)):
        if shape != declared or len(shape) != len(affine.shape):
            raise PatternError(
                f"rank {rank} holds {list(shape)}, but the affine map says {list(declared)} of "
                f"{list(affine.shape)}",
                rank=rank,
            )
        pieces.append(tuple(_affine_pieces(affine, rank)))
    relation: Literal["once", "replica"] = (
        "replica" if any(piece.replica for mine in pieces for piece in mine) else "once"
    )
    return Placement(affine.shape, tuple(pieces), relation, "equal", shapes)


def _affine_pieces(affine: Affine, rank: int) -> Iterator[ShardPiece]:
    for piece in affine.pieces[rank]:
        if piece.scale != 1:
            raise PatternError(
                f"rank {rank}: a piece is stored times {piece.scale:g}; the optimizer's moments "
                "cannot be recovered from it without lr and eps: save with a tensor "
                "parallel degree of 1, or without this layer's scaled bias",
                rank=rank,
            )
        if rank not in piece.locations:
            raise PatternError(
                f"rank {rank}: a piece of it is located on ranks {list(piece.locations)} only",
                rank=rank,
            )
        replica = rank != min(piece.locations)
        boxes = piece_boxes(piece, affine.shape, affine.shards[rank], what=f"rank {rank}")
        for box, start in boxes:
            yield ShardPiece(box, start, replica=replica)


def _cut_problems(cut: Cut) -> Iterator[str]:
    """Yield the problems of a cut that do not depend on the shards."""
    given = [n for n in ("widths", "parts", "ratio") if getattr(cut, n) is not None]
    if len(given) > 1:
        yield f"{' and '.join(given)} exclude each other; for uneven parts give part_widths"
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
            yield "part_widths must have the same number of ranks for every part"
        count = parts if parts is None else parts[0] if isinstance(cut.parts, int) else len(parts)
        if count is not None and count != len(cut.part_widths):
            yield f"part_widths has {len(cut.part_widths)} parts, parts has {count}"
        sums = tuple(sum(widths) for widths in cut.part_widths)
        if isinstance(cut.parts, tuple) and len(cut.parts) == len(sums) and cut.parts != sums:
            yield f"part_widths add up to {list(sums)}, parts says {list(cut.parts)}"


def _listed(values: Sequence[object]) -> str:
    """Return the first few shapes or numbers, for messages."""
    return shortened((list(v) if isinstance(v, tuple) else v for v in values), 4)


class _Segment(NamedTuple):
    """A range along one dim of a rank's shard, and its start in the whole tensor."""

    local: int
    length: int
    start: int


def _place_cuts(
    cuts: Sequence[Cut],
    degrees: Sequence[int],
    shapes: tuple[tuple[int, ...], ...],
) -> Placement:
    """Return where the shards of a row-major grid of ranks are in the whole tensor."""
    ndim = len(shapes[0])
    cuts = [replace(cut, dim=_dim(cut.dim, ndim)) for cut in cuts]
    if len({cut.dim for cut in cuts}) != len(cuts):
        raise PatternError(f"two cuts along dim {cuts[0].dim}")
    coordinates = list(product(*(range(degree) for degree in degrees)))
    extents = [
        _extents(shapes, coordinates, axis, (cut.dim, degrees[axis]))
        for axis, cut in enumerate(cuts)
    ]
    dims = sorted(cut.dim for cut in cuts)
    _check_alike(shapes, f"cut along dim {_listed(dims)}", dims)
    shape = list(shapes[0])
    segments: list[list[list[_Segment]]] = []
    for cut, along in zip(cuts, extents, strict=True):
        shape[cut.dim] = sum(along) if cut.unpadded is None else cut.unpadded
        segments.append(_segments(cut, along))
    pieces = tuple(
        tuple(_pieces(shapes[rank], cuts, [segments[a][i] for a, i in enumerate(place_of)]))
        for rank, place_of in enumerate(coordinates)
    )
    return Placement(tuple(shape), pieces, "once", "equal", shapes)


def _dim(dim: int, ndim: int) -> int:
    if not -ndim <= dim < ndim:
        raise PatternError(f"cut along dim {dim}, but its shards have {ndim} dims")
    return dim % ndim


def _extents(
    shapes: Sequence[tuple[int, ...]],
    coordinates: Sequence[tuple[int, ...]],
    axis: int,
    along: tuple[int, int],
) -> list[int]:
    """Return the extent of the shards along a dim, by their place on one axis of the grid."""
    dim, degree = along
    extents = [-1] * degree
    for rank, (shape, place_of) in enumerate(zip(shapes, coordinates, strict=True)):
        if len(shape) != len(shapes[0]):
            raise PatternError(
                f"rank {rank} holds {list(shape)}, but rank 0 holds {list(shapes[0])}: the numbers "
                "of dims differ",
                rank=rank,
            )
        index = place_of[axis]
        if extents[index] not in {-1, shape[dim]}:
            raise PatternError(
                f"rank {rank} holds {list(shape)}, but other ranks at place {index} of "
                f"grid axis {axis} have {extents[index]} along dim {dim}",
                rank=rank,
            )
        extents[index] = shape[dim]
    return extents


def _segments(cut: Cut, extents: Sequence[int]) -> list[list[_Segment]]:
    """Return the ranges along the cut dim for every rank, without padding."""
    widths = _widths(cut, extents)
    limit = sum(extents) if cut.unpadded is None else cut.unpadded
    if limit > sum(extents):
        raise PatternError(
            f"unpadded is {limit}, but the shards {_listed(extents)} add up to only "
            f"{sum(extents)} along dim {cut.dim}"
        )
    segments: list[list[_Segment]] = [[] for _ in extents]
    local = [0] * len(extents)
    start = 0
    for part in widths:
        for rank, width in enumerate(part):
            length = min(width, limit - start)
            if length > 0:
                last = segments[rank][-1] if segments[rank] else _Segment(-1, 0, -1)
                if (last.local + last.length, last.start + last.length) == (local[rank], start):
                    segments[rank][-1] = last._replace(length=last.length + length)
                else:
                    segments[rank].append(_Segment(local[rank], length, start))
            local[rank] += width
            start += width
    return segments


def _widths(cut: Cut, extents: Sequence[int]) -> Sequence[Sequence[int]]:
    """Return ``widths[part][rank]``; those of a rank add up to its shard's extent."""
    if cut.part_widths is not None:
        widths: Sequence[Sequence[int]] = cut.part_widths
    elif cut.parts is not None or cut.ratio is not None:
        sizes = _sizes(cut, sum(extents))
        widths = [[_even(size, len(extents))] * len(extents) for size in sizes]
    else:
        widths = [cut.widths or extents]
    if len(widths[0]) != len(extents):
        raise PatternError(
            f"widths are given for {len(widths[0])} ranks, {len(extents)} ranks hold it"
        )
    for rank, extent in enumerate(extents):
        mine = [part[rank] for part in widths]
        if sum(mine) != extent:
            raise PatternError(
                f"rank {rank} holds {extent} along dim {cut.dim}, the pattern says "
                f"{' + '.join(map(str, mine))}" + (f" = {sum(mine)}" if len(mine) > 1 else ""),
                rank=rank,
            )
    return widths


def _sizes(cut: Cut, whole: int) -> tuple[int, ...]:
    if isinstance(cut.parts, tuple):
        if sum(cut.parts) != whole:
            raise PatternError(
                f"the parts {_listed(cut.parts)} add up to {sum(cut.parts)}, the shards "
                f"to {whole} along dim {cut.dim}"
            )
        return cut.parts
    ratio = cut.ratio or (1,) * (cut.parts or 1)
    unit, rest = divmod(whole, sum(ratio))
    if rest:
        raise PatternError(
            f"{whole} elements along dim {cut.dim} cannot be divided into parts of ratio "
            f"{':'.join(map(str, ratio))}; give the parts in numbers"
        )
    return tuple(unit * share for share in ratio)


def _even(size: int, num_ranks: int) -> int:
    if size % num_ranks:
        raise PatternError(
            f"a part of {size} cannot be divided evenly over {num_ranks} ranks; give part_widths"
        )
    return size // num_ranks


def _pieces(
    shape: tuple[int, ...], cuts: Sequence[Cut], segments: Sequence[Sequence[_Segment]]
) -> Iterator[ShardPiece]:
    for chosen in product(*segments):
        low, high, start = [0] * len(shape), list(shape), [0] * len(shape)
        for cut, segment in zip(cuts, chosen, strict=True):
            low[cut.dim] = segment.local
            high[cut.dim] = segment.local + segment.length
            start[cut.dim] = segment.start
        yield ShardPiece(Box(tuple(low), tuple(high)), tuple(start))


def _fitted_cut(cut: Cut, whole: Sequence[int], degree: int) -> tuple[Cut, list[int]]:
    """Return the cut for another number of ranks, with the extents of their shards."""
    dim = _dim(cut.dim, len(whole))
    cut = replace(cut, dim=dim)
    extent = whole[dim]
    if cut.part_widths is not None:
        if len(cut.part_widths[0]) == degree and sum(map(sum, cut.part_widths)) == extent:
            return cut, [sum(part[rank] for part in cut.part_widths) for rank in range(degree)]
        parts = tuple(sum(part) for part in cut.part_widths)
        cut = replace(cut, part_widths=None, parts=parts)
    if cut.parts is not None or cut.ratio is not None:
        sizes = _sizes(cut, extent)
        return cut, [sum(_even(size, degree) for size in sizes)] * degree
    if cut.widths is not None and len(cut.widths) == degree and sum(cut.widths) == extent:
        return cut, list(cut.widths)
    width = -(-extent // degree)
    if cut.unpadded is not None:
        return replace(cut, widths=None, unpadded=extent), [width] * degree
    marks = [min(extent, width * rank) for rank in range(degree + 1)]
    return replace(cut, widths=None), [b - a for a, b in pairwise(marks)]


def plain(pattern: Pattern) -> str | dict[str, Any]:
    """Return a pattern as JSON, in the words of ``RULES.md``; ``syntax`` reads it back."""
    match pattern:
        case Unique():
            return "unique"
        case Replicated(check="equal"):
            return "replicated"
        case Replicated(check=check):
            return {"replicated": {"check": check}}
        case Average():
            return "average"
        case Cut():
            return {"cut": _plain_cut(pattern)}
        case Grid(cuts=cuts, degrees=degrees):
            return {"grid": {"cuts": [_plain_cut(cut) for cut in cuts], "degrees": list(degrees)}}
        case Affine():
            return {"affine": _plain_affine(pattern)}


def _plain_cut(cut: Cut) -> int | dict[str, Any]:
    """Return a cut as JSON: only its dim if nothing else is set."""
    found: dict[str, Any] = {"dim": cut.dim}
    for name in ("widths", "parts", "ratio", "unpadded"):
        value = getattr(cut, name)
        if value is not None:
            found[name] = list(value) if isinstance(value, tuple) else value
    if cut.part_widths is not None:
        found["part_widths"] = [list(widths) for widths in cut.part_widths]
    return found if len(found) > 1 else cut.dim


def _plain_affine(affine: Affine) -> dict[str, Any]:
    ranks = {
        str(rank): {"shard_shape": list(shard), "pieces": [_plain_piece(piece) for piece in pieces]}
        for rank, (shard, pieces) in enumerate(zip(affine.shards, affine.pieces, strict=True))
    }
    return {"logical_shape": list(affine.shape), "ranks": ranks}


def _plain_piece(piece: AffinePiece) -> dict[str, Any]:
    found: dict[str, Any] = {
        "shape": list(piece.shape),
        "source": _plain_view(piece.source_offset, piece.source_strides),
        "dest": _plain_view(piece.dest_offset, piece.dest_strides),
        "locations": list(piece.locations),
    }
    return found if piece.scale == 1 else found | {"scale": piece.scale}


def _plain_view(offset: int, strides: Sequence[int]) -> list[Any]:
    return [offset, list(strides)]
