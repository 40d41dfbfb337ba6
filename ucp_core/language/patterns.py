"""The UCP language: how the shards of several ranks make up one tensor.

Pure values. A pattern says it in words, ``place`` in numbers: which box of which rank's shard is
which box of the whole tensor. ``ucp_core.language.operators`` turns placements into fragments,
``ucp_core.language.rules`` reads patterns from a text.

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

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, Literal, TypeAlias

from ucp_core.errors import PatternError, UnsupportedVersionError
from ucp_core.geometry import Box
from ucp_core.language.affine import AffinePiece, piece_boxes
from ucp_core.language.cuts import Cut, Piece, cut_problems, fitted_cut, listed, place_cuts

__all__ = [
    "AFFINE_MAP_VERSION",
    "Affine",
    "AffinePiece",
    "Average",
    "Cut",
    "Grid",
    "Pattern",
    "Piece",
    "Placement",
    "Replicated",
    "Unique",
    "parse_affine",
    "parse_affine_map",
    "pattern_problems",
    "place",
    "split",
]

#: Version of DeepSpeed's affine maps that ``parse_affine_map`` understands.
AFFINE_MAP_VERSION = 1


@dataclass(frozen=True, slots=True)
class Unique:
    """Exactly one rank holds the tensor: a layer of a pipeline stage, an expert."""


@dataclass(frozen=True, slots=True)
class Replicated:
    """Every rank holds the whole tensor.

    Attributes:
        check: ``equal``: the copies are compared, a difference is an error; ``first``: that of
            the first rank is taken and the others are not looked at.
    """

    check: Literal["equal", "first"] = "equal"


@dataclass(frozen=True, slots=True)
class Average:
    """Every rank updated the whole tensor by itself; its value is the mean over the ranks."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The ranks form a grid, row-major, and each of its axes cuts another dim.

    Attributes:
        cuts: One for each axis of the grid.
        degrees: Ranks along each axis; one of them may be 0, it follows from the number of ranks.
    """

    cuts: tuple[Cut, ...]
    degrees: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Affine:
    """Strided pieces, as DeepSpeed's affine maps describe them.

    Attributes:
        shape: Of the whole tensor.
        shards: Shape of the shard by rank.
        pieces: By rank.
    """

    shape: tuple[int, ...]
    shards: tuple[tuple[int, ...], ...]
    pieces: tuple[tuple[AffinePiece, ...], ...]


Pattern: TypeAlias = Unique | Replicated | Average | Cut | Grid | Affine


@dataclass(frozen=True, slots=True)
class Placement:
    """A pattern in numbers, for shards of known shapes.

    Attributes:
        shape: Of the whole tensor, without padding.
        pieces: By rank; what no piece names is padding.
        relation: What the elements held by several ranks are to each other: never there
            (``once``), equal (``replica``), or to be averaged (``average``).
        check: Of a ``Replicated``; ``equal`` for others.
        shards: Shape of each rank's shard.
    """

    shape: tuple[int, ...]
    pieces: tuple[tuple[Piece, ...], ...]
    relation: Literal["once", "replica", "average"]
    check: Literal["equal", "first"]
    shards: tuple[tuple[int, ...], ...]


def place(pattern: Pattern, shards: Sequence[Sequence[int]], *, name: str = "tensor") -> Placement:
    """Return where the elements of the shards are in the whole tensor.

    Args:
        pattern: How the tensor is spread.
        shards: Shape of the shard that each rank holds, by rank.
        name: Of the tensor, for errors.

    Raises:
        PatternError: Names the tensor, the rank and the numbers that do not fit.
    """
    shapes = tuple(tuple(shape) for shape in shards)
    if not shapes:
        raise PatternError(f"{name}: no rank holds a shard of it", name=name)
    problems = pattern_problems(pattern)
    if problems:
        raise PatternError(f"{name}: {'; '.join(problems)}", name=name)
    match pattern:
        case Unique():
            if len(shapes) > 1:
                raise PatternError(
                    f"{name}: declared unique, but {len(shapes)} ranks hold a shard of it: "
                    f"{listed(shapes)}; declare it replicated or cut",
                    name=name,
                )
            return _whole_on_each(shapes, "once", "equal")
        case Replicated(check=check):
            _check_alike(shapes, name, "replicated")
            return _whole_on_each(shapes, "replica", check)
        case Average():
            _check_alike(shapes, name, "to be averaged")
            return _whole_on_each(shapes, "average", "equal")
        case Cut():
            return _placed((pattern,), (len(shapes),), shapes, name)
        case Grid():
            return _placed(pattern.cuts, _degrees(pattern, len(shapes), name), shapes, name)
        case Affine():
            return _place_affine(pattern, shapes, name)


def split(
    pattern: Pattern, shape: Sequence[int], num_ranks: int, *, name: str = "tensor"
) -> Placement:
    """Return how ``num_ranks`` ranks hold a tensor under ``pattern``: ``place`` from its other end.

    Widths that the pattern states for another number of ranks do not apply. A cut without parts
    gives every rank ``ceil(extent / num_ranks)`` as torch does, the last ranks less; with
    ``unpadded``, the last ranks get padding instead.

    Raises:
        PatternError: The tensor cannot be spread so.
    """
    whole = tuple(shape)
    problems = pattern_problems(pattern)
    if problems:
        raise PatternError(f"{name}: {'; '.join(problems)}", name=name)
    match pattern:
        case Unique() | Replicated() | Average():
            return place(pattern, [whole] * num_ranks, name=name)
        case Affine():
            if len(pattern.shards) != num_ranks or pattern.shape != whole:
                raise PatternError(
                    f"{name}: the affine map describes {list(pattern.shape)} on "
                    f"{len(pattern.shards)} ranks, wanted is {list(whole)} on {num_ranks}; "
                    "give a cut for it",
                    name=name,
                )
            return place(pattern, pattern.shards, name=name)
        case Cut():
            grid = Grid((pattern,), (num_ranks,))
        case Grid():
            grid = pattern
    cuts, degrees = grid.cuts, _degrees(grid, num_ranks, name)
    fitted = [fitted_cut(cut, whole, n, name) for cut, n in zip(cuts, degrees, strict=True)]
    shards = []
    for coordinates in product(*(range(degree) for degree in degrees)):
        local = list(whole)
        for (cut, extents), index in zip(fitted, coordinates, strict=True):
            local[cut.dim] = extents[index]
        shards.append(tuple(local))
    return _placed(tuple(cut for cut, _ in fitted), degrees, tuple(shards), name)


def pattern_problems(pattern: Pattern) -> list[str]:
    """Return what is wrong with a pattern whatever the shards are; empty if nothing."""
    match pattern:
        case Replicated(check=check) if check not in {"equal", "first"}:
            return [f"check is {check!r}, must be equal or first"]
        case Cut():
            return list(cut_problems(pattern))
        case Grid(cuts=cuts, degrees=degrees):
            problems = [problem for cut in cuts for problem in cut_problems(cut)]
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
        (Piece(box, start, replica=relation == "replica" and rank > 0),)
        for rank in range(len(shapes))
    )
    return Placement(shapes[0], pieces, relation, check, shapes)


def _check_alike(shapes: Sequence[tuple[int, ...]], name: str, what: str) -> None:
    for rank, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise PatternError(
                f"{name}: declared {what}, but rank {rank} holds {list(shape)} and rank 0 "
                f"{list(shapes[0])}; declare it cut, or give the rule for its slot",
                name=name,
                rank=rank,
            )


def _placed(
    cuts: Sequence[Cut],
    degrees: Sequence[int],
    shapes: tuple[tuple[int, ...], ...],
    name: str,
) -> Placement:
    shape, pieces = place_cuts(cuts, degrees, shapes, name)
    return Placement(shape, pieces, "once", "equal", shapes)


def _degrees(grid: Grid, num_ranks: int, name: str) -> tuple[int, ...]:
    known = prod(degree for degree in grid.degrees if degree)
    degrees = tuple(degree or max(1, num_ranks // known) for degree in grid.degrees)
    if prod(degrees) != num_ranks:
        raise PatternError(
            f"{name}: a grid of {' x '.join(map(str, grid.degrees))} ranks does not fit "
            f"{num_ranks} ranks",
            name=name,
        )
    return degrees


def _place_affine(affine: Affine, shapes: tuple[tuple[int, ...], ...], name: str) -> Placement:
    if len(shapes) != len(affine.shards):
        raise PatternError(
            f"{name}: the affine map is for {len(affine.shards)} ranks, {len(shapes)} ranks hold a "
            "shard",
            name=name,
        )
    pieces: list[tuple[Piece, ...]] = []
    for rank, (shape, declared) in enumerate(zip(shapes, affine.shards, strict=True)):
        if shape != declared or len(shape) != len(affine.shape):
            raise PatternError(
                f"{name}: rank {rank} holds {list(shape)}, the affine map says {list(declared)} of "
                f"{list(affine.shape)}",
                name=name,
                rank=rank,
            )
        pieces.append(tuple(_affine_pieces(affine, rank, name)))
    relation: Literal["once", "replica"] = (
        "replica" if any(piece.replica for mine in pieces for piece in mine) else "once"
    )
    return Placement(affine.shape, tuple(pieces), relation, "equal", shapes)


def _affine_pieces(affine: Affine, rank: int, name: str) -> Iterator[Piece]:
    what = f"{name}: rank {rank}"
    for piece in affine.pieces[rank]:
        if piece.scale != 1:
            raise PatternError(
                f"{what}: a piece is stored times {piece.scale:g}; moments of the optimizer cannot "
                "be taken out of such a map without its lr and eps: save with a tensor parallel "
                "degree of 1, or without this layer's scaled bias",
                name=name,
                rank=rank,
            )
        if rank not in piece.locations:
            raise PatternError(
                f"{what}: a piece of it is located on ranks {list(piece.locations)} only",
                name=name,
                rank=rank,
            )
        replica = rank != min(piece.locations)
        for box, start in piece_boxes(piece, affine.shape, affine.shards[rank], what=what):
            yield Piece(box, start, replica=replica)


def parse_affine_map(document: Any, *, where: str) -> dict[str, Affine]:
    """Return the maps of a DeepSpeed checkpoint's ``affine_map`` by the regex of their names.

    Args:
        document: ``{version, params: {regex: {logical_shape, ranks: {rank: {shard_shape,
            pieces: [{shape, source: [offset, strides], dest: [offset, strides], locations,
            scale?}]}}}}}``, as DeepSpeed 0.19.8 writes it.
        where: File and key, for errors.

    Raises:
        UnsupportedVersionError: A newer form.
        PatternError: Not of this form.
    """
    if not isinstance(document, Mapping):
        raise PatternError(f"{where} is not a mapping")
    version = document.get("version")
    if version != AFFINE_MAP_VERSION:
        raise UnsupportedVersionError(
            f"{where} has version {version!r}, this program reads {AFFINE_MAP_VERSION}: update "
            "everstep",
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
    """Return one map of an ``affine_map``: ``{logical_shape, ranks}``.

    Raises:
        PatternError: Not of this form.
    """
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
