"""The boxes that each rank of a layout holds: the paper's UcpInfo (``GenUcpMetadata``). Pure.

Pipeline stages and tensor parallelism follow rules. Data-parallel sharding follows the framework:
FSDP2 cuts dim 0 of every local tensor, ZeRO cuts flattened ones. A rank computes only its own part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from math import prod
from typing import Literal, NamedTuple, TypeAlias

from ucp_core.errors import PatternError
from ucp_core.geometry import Box, StateMap, TensorKey, flat_range
from ucp_core.language.patterns import Placement, Replicated, split
from ucp_core.language.rules import Rules
from ucp_core.layout import ParallelLayout
from ucp_core.reading import Part

#: How data-parallel ranks share what a tensor-parallel rank holds: ``dim0`` as FSDP2 does,
#: ``zero12`` and ``zero3`` as the stages of DeepSpeed's ZeRO do.
Sharding: TypeAlias = Literal["dim0", "zero12", "zero3"]

#: ZeRO-1 and 2 pad the flattened group to a multiple of this for each rank.
ZERO_ALIGNMENT = 2

#: Dtype and shape of the whole tensors, in the order in which ZeRO flattens them.
Shapes: TypeAlias = Mapping[TensorKey, tuple[str, tuple[int, ...]]]


class Target(NamedTuple):
    """A box that a rank needs, and its place in the rank's memory.

    Attributes:
        part: The box, in coordinates of the whole tensor.
        local: The same elements in coordinates of the rank's local tensor.
        shape: That of the local tensor with padding; under ZeRO, of the tensor-parallel shard.
        flat: Under ZeRO: the elements of the flattened local tensor that the rank holds.
    """

    part: Part
    local: Box
    shape: tuple[int, ...]
    flat: tuple[int, int] | None = None


def shapes_of(state_map: StateMap) -> dict[TensorKey, tuple[str, tuple[int, ...]]]:
    """Return dtype and shape of every tensor of a map."""
    return {key: (entry.dtype, entry.shape) for key, entry in state_map.entries.items()}


def target_map(
    shapes: Shapes,
    rules: Rules,
    layout: ParallelLayout,
    rank: int,
) -> list[Part]:
    """Return the boxes that one rank of a layout needs: the parts of ``target_pieces``."""
    return [target.part for target in target_pieces(shapes, rules, layout, rank)]


def target_pieces(
    shapes: Shapes,
    rules: Rules,
    layout: ParallelLayout,
    rank: int,
    *,
    sharding: Sharding = "dim0",
) -> list[Target]:
    """Return the boxes that one rank of a layout needs, and their places in its memory.

    Args:
        shapes: All tensors of one parameter group (ZeRO) or of the model.
        rules: How tensor-parallel ranks hold a tensor, and which stage has it.
        layout: ``dp_shard * cp`` ranks share what a tensor-parallel rank holds.
        sharding: How the ranks share it.

    Raises:
        PatternError: No rule describes a tensor, or it cannot be sharded so.
    """
    if layout.ep > 1:
        raise PatternError(
            f"a target with ep={layout.ep} is not described by rules; give its boxes", ep=layout.ep
        )
    place = layout.coordinates(rank)
    num_shares = layout.dp_shard * layout.cp
    share = place["dp_shard"] * layout.cp + place["cp"]
    held = {
        key: (dtype, _placement(key, shape, rules, layout.tp))
        for key, (dtype, shape) in _of_stage(shapes, rules, layout.pp, place["pp"]).items()
    }
    ranges = _flat_ranges(held, place["tp"], (share, num_shares), sharding)
    targets: list[Target] = []
    for key, (dtype, placement) in held.items():
        if sharding == "dim0" or not placement.shape:
            targets += _rows(key, dtype, placement, place["tp"], (share, num_shares))
        else:
            targets += _flattened(key, dtype, placement, place["tp"], ranges[key])
    return targets


def _of_stage(shapes: Shapes, rules: Rules, pp: int, stage: int) -> Shapes:
    if pp == 1:
        return shapes
    stages = rules.stages_of({key.fqn for key in shapes}, pp)
    return {key: value for key, value in shapes.items() if stage in stages[key.fqn]}


def _placement(key: TensorKey, shape: tuple[int, ...], rules: Rules, tp: int) -> Placement:
    if tp == 1 or not shape:
        return split(Replicated(), shape, tp, name=str(key))
    pattern = rules.match(key.fqn, key.slot)
    if pattern is None:
        raise PatternError(
            f"{key}: no rule says how {tp} tensor-parallel ranks hold it; add one for it",
            fqn=key.fqn,
            slot=key.slot,
        )
    return split(pattern, shape, tp, name=str(key))


def _rows(
    key: TensorKey, dtype: str, placement: Placement, tp_rank: int, of: tuple[int, int]
) -> Iterator[Target]:
    """Yield a rank's part under FSDP2: ``ceil(extent / ranks)`` rows of its local tensor."""
    share, num_shares = of
    shard = placement.shards[tp_rank]
    mine = Box.full(shard)
    if shard:
        width = -(-shard[0] // num_shares)
        low = min(shard[0], width * share)
        mine = mine.with_dim(0, low, min(shard[0], low + width))
    for local, box in _inside(placement, tp_rank, mine):
        part = Part(key, dtype, placement.shape, box)
        yield Target(part, local.relative_to(mine), mine.shape)


def _flattened(
    key: TensorKey, dtype: str, placement: Placement, tp_rank: int, flat: tuple[int, int]
) -> Iterator[Target]:
    shard = placement.shards[tp_rank]
    for held in flat_range(shard, *flat):
        for local, box in _inside(placement, tp_rank, held):
            yield Target(Part(key, dtype, placement.shape, box), local, shard, flat)


def _inside(placement: Placement, rank: int, held: Box) -> Iterator[tuple[Box, Box]]:
    """Yield the parts of pieces in ``held``: the box in the shard, and in the whole tensor."""
    for local, start, _ in placement.pieces[rank]:
        inner = local.intersect(held)
        if inner is not None:
            low = [a + s - b for a, b, s in zip(inner.start, local.start, start, strict=True)]
            high = [a + n for a, n in zip(low, inner.shape, strict=True)]
            yield inner, Box(tuple(low), tuple(high))


def _flat_ranges(
    held: Mapping[TensorKey, tuple[str, Placement]],
    tp_rank: int,
    of: tuple[int, int],
    sharding: Sharding,
) -> dict[TensorKey, tuple[int, int]]:
    """Return which elements of each flattened local tensor the rank holds under ZeRO."""
    share, num_shares = of
    sizes = {key: prod(placement.shards[tp_rank]) for key, (_, placement) in held.items()}
    if sharding == "zero3":
        widths = {key: -(-size // num_shares) for key, size in sizes.items()}
        return {
            key: (min(size, widths[key] * share), min(size, widths[key] * (share + 1)))
            for key, size in sizes.items()
        }
    # Every slot is one buffer: all its tensors in order, then padding.
    buffers: dict[str, int] = defaultdict(int)
    starts: dict[TensorKey, int] = {}
    for key, size in sizes.items():
        if held[key][1].shape:
            starts[key] = buffers[key.slot]
            buffers[key.slot] += size
    unit = num_shares * ZERO_ALIGNMENT
    ranges: dict[TensorKey, tuple[int, int]] = {}
    for key, start in starts.items():
        width = -(-buffers[key.slot] // unit) * ZERO_ALIGNMENT
        low, high = width * share - start, width * (share + 1) - start
        ranges[key] = (min(max(low, 0), sizes[key]), min(max(high, 0), sizes[key]))
    return ranges
