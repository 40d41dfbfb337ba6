"""Boxes follow from placements: those of all ranks tile the tensor, whatever the mesh."""

from math import prod
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

from ucp_core.geometry import DTYPE_BYTES, Box, Fragment, StateMap, TensorEntry, TensorKey
from ucp_core.layout import EXPERT_AXES, ParallelLayout
from workers.parallel import LocalShard
from workers.parallel.placements import Cut, boxes_of, replicas_over
from workers.state import StateEntry, TrainingState

SHAPES = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)
LAYOUTS = st.builds(
    lambda efsdp, ep, **degrees: ParallelLayout(dp_shard=efsdp * ep, ep=ep, **degrees),
    dp_replicate=st.integers(1, 2),
    efsdp=st.integers(1, 3),
    ep=st.integers(1, 2),
    tp=st.integers(1, 3),
)


@st.composite
def placed(draw: st.DrawFn) -> tuple[tuple[int, ...], ParallelLayout, dict[str, Any]]:
    """Return a tensor's shape, a layout, and a placement for each axis, in the mesh's order.

    FSDP2 cuts what tensor or expert parallelism leaves; fused weights have slices of several parts.
    """
    shape, layout = draw(SHAPES), draw(LAYOUTS)
    if layout.ep > 1 and draw(st.booleans()):
        # As many experts on each rank; each has parts of those of its group.
        shape = (shape[0] * layout.ep, *shape[1:])
        strided = _StridedShard(0, split_factor=layout.ep)
        return shape, layout, {"dp_replicate": Replicate(), "efsdp+tp": strided, "ep": Shard(0)}
    dims = st.integers(0, len(shape) - 1)
    kinds = (
        Replicate,
        lambda: Shard(draw(dims)),
        lambda: _StridedShard(draw(dims), split_factor=2),
    )
    tensor = draw(st.sampled_from(kinds))()
    dim = draw(dims)
    is_same = isinstance(tensor, Shard | _StridedShard) and tensor.dim == dim and layout.tp > 1
    pieces = layout.tp if is_same else 1
    sharded = _StridedShard(dim, split_factor=pieces) if pieces > 1 else Shard(dim)
    return shape, layout, {"dp_replicate": Replicate(), "dp_shard": sharded, "tp": tensor}


def on_axis(layout: ParallelLayout, rank: int, axis: str) -> tuple[int, int]:
    """Return the degree of an axis, or of several that are joined, and the rank's place on it."""
    places = layout.coordinates(rank) | layout.coordinates(rank, EXPERT_AXES)
    degree, place = 1, 0
    for each in axis.split("+"):
        degree, place = degree * getattr(layout, each), place * getattr(layout, each) + places[each]
    return degree, place


def cuts(layout: ParallelLayout, rank: int, placements: dict[str, Any]) -> list[Cut]:
    return [
        Cut(
            axis=axis,
            dim=placement.dim,
            num_parts=on_axis(layout, rank, axis)[0],
            part=on_axis(layout, rank, axis)[1],
            num_pieces=getattr(placement, "split_factor", 1),
        )
        for axis, placement in placements.items()
        if not isinstance(placement, Replicate)
    ]


def by_torch(
    whole: torch.Tensor, layout: ParallelLayout, rank: int, placements: dict[str, Any]
) -> torch.Tensor:
    """Return what torch leaves to a rank."""
    for axis, placement in placements.items():
        if not isinstance(placement, Replicate):
            degree, place = on_axis(layout, rank, axis)
            parts, _ = placement._split_tensor(whole, degree, with_padding=False)
            whole = parts[place]
    return whole


def shard(
    whole: torch.Tensor, layout: ParallelLayout, rank: int, placements: dict[str, Any]
) -> LocalShard:
    of_rank = cuts(layout, rank, placements)
    local = by_torch(whole, layout, rank, placements).clone()
    return LocalShard(
        fqn="w",
        shape=tuple(whole.shape),
        boxes=boxes_of(whole.shape, of_rank),
        replicas=replicas_over(layout, rank, of_rank),
        parameter=nn.Parameter(local),
        local=local,
    )


@given(placed())
def test_every_element_is_described_where_torch_puts_it(
    case: tuple[tuple[int, ...], ParallelLayout, dict[str, Any]],
) -> None:
    """A fused weight has several boxes per rank, for which torch names one."""
    shape, layout, placements = case
    whole = torch.arange(prod(shape), dtype=torch.float32).reshape(shape)
    for rank in range(layout.world_size):
        held = shard(whole, layout, rank, placements)
        assert sum(box.num_elements for box in held.boxes) == held.local.numel()
        for box, local in held.pieces(held.local):
            if not box.is_empty:
                assert torch.equal(local, whole[tuple(map(slice, *box))])


@given(placed())
def test_all_ranks_together_save_every_element_once(
    case: tuple[tuple[int, ...], ParallelLayout, dict[str, Any]],
) -> None:
    """A norm's weight under tensor parallelism, which several ranks hold, is saved in shares."""
    shape, layout, placements = case
    whole = torch.arange(prod(shape), dtype=torch.float32).reshape(shape)
    boxes: list[Box] = []
    for rank in range(layout.world_size):
        held = shard(whole, layout, rank, placements)
        optimizer = torch.optim.SGD([nn.Parameter(held.local)], lr=0.1)
        state = TrainingState([held], {"w": held.parameter}, optimizer, rank)
        saved = state.saved()
        assert all(
            torch.equal(one.tensor, whole[tuple(map(slice, *one.box))]) for one in filled(saved)
        )
        boxes += [one.box for one in filled(saved)]
    fragments = tuple(
        Fragment(box, "file", 0, box.num_elements * DTYPE_BYTES["F32"], None, ())
        for box in sorted(boxes)
    )
    key = TensorKey("w", "weight")
    entry = TensorEntry(key=key, dtype="F32", shape=shape, fragments=fragments)

    StateMap(entries={key: entry}, block_bytes=1 << 20).prove_coverage()


def filled(entries: list[StateEntry]) -> list[StateEntry]:
    return [entry for entry in entries if not entry.box.is_empty]


@given(placed())
def test_replicas_are_the_ranks_with_the_same_boxes(
    case: tuple[tuple[int, ...], ParallelLayout, dict[str, Any]],
) -> None:
    """Each rank finds its group alone; with two that differ an element is lost, or saved twice."""
    shape, layout, placements = case
    for rank in range(layout.world_size):
        of_rank = cuts(layout, rank, placements)
        group = replicas_over(layout, rank, of_rank)
        assert rank in group
        for other in group:
            of_other = cuts(layout, other, placements)
            assert boxes_of(shape, of_other) == boxes_of(shape, of_rank)
            assert replicas_over(layout, other, of_other) == group
