"""Makes ``universal_checkpoint_info``: how a written checkpoint's tensors are sharded.

Without it DeepSpeed's own converter can silently combine shards wrongly.
``ucp_core.formats.deepspeed.reading.tensor_parallel`` reads it.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

from ucp_core.language import Placement

_VERSION = 0.4
_AFFINE_VERSION = 1


def universal_info(
    names: Iterable[str],
    placements: Mapping[str, Placement] | None,
    *,
    tied: Iterable[str] = (),
) -> dict[str, Any]:
    """Return the document for parameters and buffers.

    ``placements`` is None with one tensor-parallel rank; several pipeline stages hold ``tied``.
    """
    replicated: list[str] = []
    averaged: list[str] = []
    rows: list[str] = []
    padded: dict[tuple[int, tuple[int, ...]], list[str]] = {}
    affine: dict[str, Any] = {}
    for name in names if placements else ():
        placement, regex = (placements or {})[name], _regex(name)
        is_replica, shards = placement.relation == "replica", placement.shards
        held = sum(piece.local.num_elements for mine in placement.pieces for piece in mine)
        if placement.relation == "average":
            averaged.append(regex)
        elif not is_replica and held < sum(map(prod, shards)):
            key = placement.shape[0], tuple(shape[0] for shape in shards)
            padded.setdefault(key, []).append(regex)
        else:
            affine[regex] = _affine(placement)
            if is_replica and all(shape == placement.shape for shape in shards):
                replicated.append(regex)
            elif not is_replica and placement.shape[1:2] != shards[0][1:2]:
                rows.append(regex)
    info: dict[str, Any] = {
        "universal_checkpoint_version": _VERSION,
        "pipeline_replicated_parameter_patterns": [_regex(name) for name in tied],
        "tp_replicated_parameter_patterns": replicated,
        "parameter_to_average_patterns": averaged,
        "parameter_with_row_parallelism_patterns": rows,
        "affine_map": {"version": _AFFINE_VERSION, "params": affine},
        "vocabulary_parameter_patterns": [],
    }
    if padded:
        # The document can state only one size.
        (extent, heights), first = next(iter(padded.items()))
        others = [regex for key, group in padded.items() if group is not first for regex in group]
        info |= {
            "vocabulary_parameter_patterns": first,
            "original_vocab_size": extent,
            "padded_vocab_size": sum(heights),
            "autotp_unsupported_parameter_patterns": dict.fromkeys(
                others, "padded differently from the vocabulary"
            ),
        }
    return info


def _regex(name: str) -> str:
    return f"^{re.escape(name)}$"


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
