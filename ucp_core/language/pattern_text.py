"""A pattern as the plain values that its text form has: what ``syntax`` reads back as it was.

Pure. JSON is YAML, so a manifest that says ``{"cut": {"dim": 0, "parts": 8}}`` can be quoted in a
text of rules. Counterpart: ``ucp_core.language.syntax``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucp_core.language.patterns import (
    Affine,
    AffinePiece,
    Average,
    Cut,
    Grid,
    Pattern,
    Replicated,
    Unique,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["plain"]


def plain(pattern: Pattern) -> str | dict[str, Any]:
    """Return a pattern as JSON, in the words of ``RULES.md``."""
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
            return {"cut": _cut(pattern)}
        case Grid(cuts=cuts, degrees=degrees):
            return {"grid": {"cuts": [_cut(cut) for cut in cuts], "degrees": list(degrees)}}
        case Affine():
            return {"affine": _affine(pattern)}


def _cut(cut: Cut) -> int | dict[str, Any]:
    """Return a cut: its dim alone if that is all."""
    found: dict[str, Any] = {"dim": cut.dim}
    for name in ("widths", "parts", "ratio", "unpadded"):
        value = getattr(cut, name)
        if value is not None:
            found[name] = list(value) if isinstance(value, tuple) else value
    if cut.part_widths is not None:
        found["part_widths"] = [list(widths) for widths in cut.part_widths]
    return found if len(found) > 1 else cut.dim


def _affine(affine: Affine) -> dict[str, Any]:
    ranks = {
        str(rank): {"shard_shape": list(shard), "pieces": [_piece(piece) for piece in pieces]}
        for rank, (shard, pieces) in enumerate(zip(affine.shards, affine.pieces, strict=True))
    }
    return {"logical_shape": list(affine.shape), "ranks": ranks}


def _piece(piece: AffinePiece) -> dict[str, Any]:
    found: dict[str, Any] = {
        "shape": list(piece.shape),
        "source": _view(piece.source_offset, piece.source_strides),
        "dest": _view(piece.dest_offset, piece.dest_strides),
        "locations": list(piece.locations),
    }
    return found if piece.scale == 1 else found | {"scale": piece.scale}


def _view(offset: int, strides: Sequence[int]) -> list[Any]:
    return [offset, list(strides)]
