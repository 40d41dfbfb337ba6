"""Makes ``universal_checkpoint_info``: how a written checkpoint's tensors are sharded.

Without it DeepSpeed's own converter can silently combine shards wrongly.
``ucp_core.formats.deepspeed.reading.tensor_parallel`` reads it.
"""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ucp_core.language import Placement

_VERSION = 0.4
_AFFINE_VERSION = 1


def universal_info(
    names: Iterable[str],
    placements: Mapping[str, Placement] | None,
    *,
    tied: Iterable[str] = (),
) -> dict[str, Any]:
    """Return the document for tensors of the given names.

    Args:
        names: Parameters and buffers.
        placements: How each is sharded over tensor-parallel ranks; None with one rank.
        tied: Names that several pipeline stages hold.
    """
    replicated: list[str] = []
    averaged: list[str] = []
    rows: list[str] = []
    padded: dict[str, Placement] = {}
    affine: dict[str, Any] = {}
    for name in names if placements else ():
        placement = (placements or {})[name]
        if placement.relation == "replica":
            affine[_regex(name)] = _affine(placement)
            if all(shape == placement.shape for shape in placement.shards):
                replicated.append(_regex(name))
        elif placement.relation == "average":
            averaged.append(_regex(name))
        elif _is_padded(placement):
            padded[name] = placement
        else:
            affine[_regex(name)] = _affine(placement)
            if len(placement.shape) > 1 and placement.shards[0][1] != placement.shape[1]:
                rows.append(_regex(name))
    info: dict[str, Any] = {
        "universal_checkpoint_version": _VERSION,
        "pipeline_replicated_parameter_patterns": [_regex(name) for name in tied],
        "tp_replicated_parameter_patterns": replicated,
        "parameter_to_average_patterns": averaged,
        "parameter_with_row_parallelism_patterns": rows,
        "affine_map": {"version": _AFFINE_VERSION, "params": affine},
    }
    return info | _vocabulary(padded)


def _regex(name: str) -> str:
    return f"^{re.escape(name)}$"


def _is_padded(placement: Placement) -> bool:
    held = sum(piece.local.num_elements for mine in placement.pieces for piece in mine)
    return held < sum(prod(shape) for shape in placement.shards)


def _vocabulary(padded: Mapping[str, Placement]) -> dict[str, Any]:
    """Return the keys for padded vocabularies, which can state only one size."""
    if not padded:
        return {"vocabulary_parameter_patterns": []}
    first = next(iter(padded.values()))
    alike = [
        name
        for name, placement in padded.items()
        if (placement.shape[0], _rows(placement)) == (first.shape[0], _rows(first))
    ]
    others = {
        _regex(name): "padded differently from the vocabulary"
        for name in padded
        if name not in alike
    }
    return {
        "vocabulary_parameter_patterns": [_regex(name) for name in alike],
        "original_vocab_size": first.shape[0],
        "padded_vocab_size": sum(_rows(first)),
        "autotp_unsupported_parameter_patterns": others,
    }


def _rows(placement: Placement) -> list[int]:
    return [shape[0] for shape in placement.shards]


def _affine(placement: Placement) -> dict[str, Any]:
    holders: dict[Any, list[int]] = {}
    for rank, pieces in enumerate(placement.pieces):
        for piece in pieces:
            holders.setdefault((piece.start, piece.local.shape), []).append(rank)
    ranks: dict[int, Any] = {}
    for rank, (shape, pieces) in enumerate(zip(placement.shards, placement.pieces, strict=True)):
        ranks[rank] = {
            "shard_shape": list(shape),
            "pieces": [
                {
                    "shape": list(piece.local.shape),
                    "source": _strided(placement.shape, piece.start),
                    "dest": _strided(shape, piece.local.start),
                    "locations": holders[piece.start, piece.local.shape],
                }
                for piece in pieces
            ],
        }
    return {"logical_shape": list(placement.shape), "ranks": ranks}


def _strided(shape: Sequence[int], start: Sequence[int]) -> list[Any]:
    """Return the flat position of ``start`` in a tensor, and the tensor's strides, in elements."""
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return [sum(a * b for a, b in zip(start, strides, strict=True)), strides]
