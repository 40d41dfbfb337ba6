"""Find from placements which elements of a tensor a rank has, and which ranks have the same.

torch's ``__create_chunk_list__`` returns one chunk per rank, which is wrong for fused weights under
tensor parallelism: a rank has a slice of each fused part (torch 2.13). This module follows the
DTensor's placements instead, axis by axis, as torch splits a tensor.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard

from ucp_core.geometry import Box
from ucp_core.layout import EXPERT_AXES, ParallelLayout
from workers.parallel.torch_names import StridedShard

#: A half-open range of indices.
Run = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How one mesh axis cuts a tensor."""

    axis: str  #: Name of the axis; axes that cut as one are joined by "+".
    dim: int  #: The dim that it cuts.
    num_parts: int  #: The number of ranks along the axis.
    part: int  #: This rank's place along it.
    #: The dim is first cut into this many pieces, and a rank gets a part of each.
    num_pieces: int = 1


def cuts_of(tensor: DTensor) -> list[Cut]:
    """Return how the mesh axes cut ``tensor``, in the order of the cuts."""
    mesh: Any = tensor.device_mesh
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    place = mesh.get_coordinate()
    cuts: list[Cut] = []
    for number, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard | StridedShard):
            cut = Cut(
                axis=names[number],
                dim=placement.dim,
                num_parts=mesh.size(number),
                part=place[number],
                num_pieces=int(getattr(placement, "split_factor", 1)),
            )
            cuts.append(cut)
        else:
            assert placement.is_replicate(), f"a parameter has the placement {placement}"
    return cuts


def boxes_of(shape: Sequence[int], cuts: Iterable[Cut]) -> tuple[Box, ...]:
    """Return the elements of a tensor of ``shape`` that remain, in memory order.

    If none remain, return one empty box.
    """
    runs: list[list[Run]] = [[(0, extent)] for extent in shape]
    for cut in cuts:
        runs[cut.dim] = _part_of(runs[cut.dim], cut)
    if not all(runs):
        ends = zip(shape, runs, strict=True)
        runs = [found[:1] or [(extent, extent)] for extent, found in ends]
    return tuple(
        Box(tuple(start for start, _ in each), tuple(stop for _, stop in each))
        for each in itertools.product(*runs)
    )


def replicas_over(layout: ParallelLayout, rank: int, cuts: Iterable[Cut]) -> tuple[int, ...]:
    """Return the ranks with the same elements as ``rank``, including it, in order.

    They differ from it only along axes that do not cut the tensor. Pipeline stages have different
    tensors.
    """
    cutting = {"pp", *(axis for cut in cuts for axis in cut.axis.split("+"))}
    if "dp_shard" in cutting:
        cutting |= {"efsdp", "ep"}
    return layout.ranks_along(rank, [axis for axis in EXPERT_AXES if axis not in cutting])


def _part_of(runs: Sequence[Run], cut: Cut) -> list[Run]:
    """Return the part of ``runs``, along a dim, that remains after a cut."""
    length = sum(stop - start for start, stop in runs)
    left: list[Run] = []
    for piece in range(cut.num_pieces):
        first, last = _chunk(length, cut.num_pieces, piece)
        low, high = _chunk(last - first, cut.num_parts, cut.part)
        for run in _within(runs, first + low, first + high):
            if left and left[-1][1] == run[0]:
                left[-1] = (left[-1][0], run[1])
            else:
                left.append(run)
    return left


def _chunk(length: int, num_parts: int, part: int) -> Run:
    """Return one part as ``torch.chunk`` makes it; the last ones are shorter or empty."""
    size = -(-length // num_parts)
    return min(part * size, length), min((part + 1) * size, length)


def _within(runs: Iterable[Run], low: int, high: int) -> Iterable[Run]:
    """Yield the indices at positions ``[low, high)`` of ``runs``."""
    position = 0
    for start, stop in runs:
        first, last = max(low - position, 0), min(high - position, stop - start)
        if first < last:
            yield start + first, start + last
        position += stop - start
