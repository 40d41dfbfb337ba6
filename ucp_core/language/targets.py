"""The boxes that each rank of a layout holds: the paper's UcpInfo (``GenUcpMetadata``). Pure.

Pipeline stages and tensor parallelism follow the rules. Data-parallel ranks share each local tensor
by rows, as FSDP2 does. A rank computes only its own part.
"""

from collections.abc import Iterator, Mapping
from typing import TypeAlias

from ucp_core.errors import PatternError
from ucp_core.geometry import Box, StateMap, TensorKey
from ucp_core.language.patterns import Placement, Replicated, split
from ucp_core.language.rules import Rules
from ucp_core.layout import ParallelLayout
from ucp_core.reading import Part

#: Dtype and shape of the whole tensors.
Shapes: TypeAlias = Mapping[TensorKey, tuple[str, tuple[int, ...]]]


def shapes_of(state_map: StateMap) -> dict[TensorKey, tuple[str, tuple[int, ...]]]:
    """Return the dtype and shape of every tensor of a map."""
    return {key: (entry.dtype, entry.shape) for key, entry in state_map.entries.items()}


def target_map(shapes: Shapes, rules: Rules, layout: ParallelLayout, rank: int) -> list[Part]:
    """Return the boxes that one rank of a layout needs, in the order of its local tensors.

    Args:
        shapes: All tensors of the model.
        rules: How tensor-parallel ranks hold a tensor, and which stage has it.
        layout: ``dp_shard * cp`` ranks share what one tensor-parallel rank holds.
    """
    if layout.ep > 1:
        raise PatternError(
            f"a target with ep={layout.ep} is not described by rules; give its boxes", ep=layout.ep
        )
    place = layout.coordinates(rank)
    num_shares = layout.dp_shard * layout.cp
    share = place["dp_shard"] * layout.cp + place["cp"]
    stages = rules.stages_of({key.fqn for key in shapes}, layout.pp) if layout.pp > 1 else {}
    return [
        Part(key, dtype, shape, box)
        for key, (dtype, shape) in shapes.items()
        if place["pp"] in stages.get(key.fqn, (0,))
        for box in _boxes(_placement(key, shape, rules, layout.tp), place["tp"], share, num_shares)
    ]


def _placement(key: TensorKey, shape: tuple[int, ...], rules: Rules, tp: int) -> Placement:
    if tp == 1 or not shape:
        return split(Replicated(), shape, tp, name=str(key))
    pattern = rules.match(key.fqn, key.slot)
    if pattern is None:
        raise PatternError(
            f"{key}: no rule says how {tp} tensor-parallel ranks hold it; add one",
            fqn=key.fqn,
            slot=key.slot,
        )
    return split(pattern, shape, tp, name=str(key))


def _boxes(placement: Placement, tp_rank: int, share: int, num_shares: int) -> Iterator[Box]:
    """Yield a rank's boxes under FSDP2: ``ceil(extent / ranks)`` rows of its local tensor."""
    shard = placement.shards[tp_rank]
    mine = Box.full(shard)
    if shard:
        width = -(-shard[0] // num_shares)
        low = min(shard[0], width * share)
        mine = mine.with_dim(0, low, min(shard[0], low + width))
    for local, start, _ in placement.pieces[tp_rank]:
        inner = local.intersect(mine)
        if inner is not None:
            low_ends = [a + s - b for a, b, s in zip(inner.start, local.start, start, strict=True)]
            high_ends = [a + n for a, n in zip(low_ends, inner.shape, strict=True)]
            yield Box(tuple(low_ends), tuple(high_ends))
