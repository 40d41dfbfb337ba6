"""Build the device mesh of an attempt."""

from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from ucp_core.layout import AXES, ParallelLayout
from workers.parallel.placements import Cut, cuts_of, replicas_over
from workers.parallel.torch_names import draw_by_own_states

#: The axes along which FSDP2 shards and replicates a model.
_DATA_AXES: Final = ("dp_replicate", "dp_shard")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMesh:
    """The meshes for experts: other views of the same ranks."""

    #: The ranks that share the experts evenly; each gets the tokens of its experts from the others.
    ranks: DeviceMesh
    #: The mesh for FSDP2: the ranks with the same experts, over all replicas of the model. It
    #: includes the ranks of a tensor-parallel group, each of which sends part of the tokens.
    sharding: DeviceMesh
    same_tokens: DeviceMesh  #: The tensor-parallel group of a rank; the rank may be alone in it.


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The mesh that the model is sharded over, and this rank's position in it."""

    #: The mesh for FSDP2: ``(dp_shard,)`` or ``(dp_replicate, dp_shard)``. Ranks with other parts
    #: of a sequence have other shards, so ``dp_shard`` includes ``cp``.
    sharding: DeviceMesh
    #: The mesh for tensor parallelism; None if every rank has whole weights.
    tensor: DeviceMesh | None = None
    #: The ranks with the other parts of the same sequences, in order; None if each rank has whole
    #: sequences.
    context: ProcessGroup | None = None
    #: The expert-parallel meshes; None if each rank computes all experts.
    experts: ExpertMesh | None = None
    #: The ranks with the other stages of the same pipeline, in order; None without stages.
    stages: ProcessGroup | None = None
    layout: ParallelLayout  #: The degree of each axis.
    rank: int

    @property
    def data_rank(self) -> int:
        """Return this rank's position along data parallelism, ``0 <= data_rank < layout.dp``."""
        return self.layout.data_rank(self.rank)

    @property
    def replicas(self) -> ProcessGroup | None:
        """Return the group of the ranks with the same shard in each replica; None if none."""
        return self.sharding.get_group(0) if self.layout.dp_replicate > 1 else None

    def exchanging(self, *, deterministic: bool) -> list[ProcessGroup]:
        """Return the groups that exchange in pairs; for gradients only if ``deterministic``."""
        groups = [self.stages, self.context]
        if self.experts is not None:
            groups.append(self.experts.ranks.get_group())
        if deterministic:
            groups.append(self.sharding.get_group(self.sharding.ndim - 1))
        return [group for group in groups if group is not None]

    @property
    def sharers(self) -> tuple[int, ...]:
        """Return the ranks with the same uncut tensors, such as buffers, including this one."""
        return replicas_over(self.layout, self.rank, ())

    @property
    def counts(self) -> bool:
        """Return whether this rank's loss counts. Other ranks may have the same samples."""
        place = self.layout.coordinates(self.rank)
        return place["tp"] == 0 and place["pp"] == self.layout.pp - 1

    @property
    def tensor_rank(self) -> int:
        """Return this rank's position among those with parts of the same tensors."""
        return self.layout.coordinates(self.rank)["tp"]

    @property
    def stage(self) -> int:
        """Return this rank's position in its pipeline, which is the number of its first stage."""
        return self.layout.coordinates(self.rank)["pp"]

    @property
    def part(self) -> int:
        """Return which part of each sequence this rank has, from 0."""
        return self.layout.coordinates(self.rank)["cp"]

    def cuts_of(self, tensor: DTensor) -> list[Cut]:
        """Return how the axes cut ``tensor``, by the axes' names in the layout."""
        return [replace(cut, axis=cut.axis.rpartition("_")[0]) for cut in cuts_of(tensor)]


def build_mesh(layout: ParallelLayout, *, device_type: str, attempt: int, rank: int) -> Mesh:
    """Return the mesh of ``layout``. Every rank must call it once the process groups are formed.

    Axis names contain the attempt. Meshes of equal shape and names compare equal whatever their
    process groups (torch 2.13), so caches keyed by a mesh would return groups of older attempts.
    """
    has_experts = layout.ep > 1
    always = ("dp_shard", "tp") if has_experts else ("dp_shard",)
    degrees = {axis: getattr(layout, axis) for axis in AXES if axis != "cp"}
    degrees["dp_shard"] *= layout.cp
    used = [axis for axis, degree in degrees.items() if axis in always or degree > 1]
    names = {axis: f"{axis}_{attempt}" for axis in used}
    if layout.cp > 1:
        names["dp_shard"] = f"dp_shard+cp_{attempt}"
    mesh = init_device_mesh(
        device_type,
        tuple(degrees[axis] for axis in used),
        mesh_dim_names=tuple(names.values()),
    )
    draw_by_own_states(mesh)
    data = tuple(names[axis] for axis in used if axis in _DATA_AXES)
    return Mesh(
        sharding=mesh[data] if len(data) < len(used) else mesh,
        tensor=mesh[names["tp"]] if layout.tp > 1 else None,
        context=_context(layout, attempt) if layout.cp > 1 else None,
        experts=_experts(layout, mesh[names["tp"]], attempt) if has_experts else None,
        stages=mesh.get_group(names["pp"]) if layout.pp > 1 else None,
        layout=layout,
        rank=rank,
    )


def _context(layout: ParallelLayout, attempt: int) -> ProcessGroup:
    """Return this rank's group along cp; every rank creates all of them."""
    ranks = {layout.ranks_along(rank, ["cp"]): None for rank in range(layout.world_size)}
    group: Any
    group, _ = dist.new_subgroups_by_enumeration(
        [list(each) for each in ranks], group_desc=f"cp_{attempt}"
    )
    assert isinstance(group, ProcessGroup), "each rank is in one of them"
    return group


def _experts(layout: ParallelLayout, same_tokens: DeviceMesh, attempt: int) -> ExpertMesh:
    ranks = torch.arange(layout.world_size)
    inner = [axis for axis in ("cp", "tp") if getattr(layout, axis) > 1]
    ranks = ranks.view(layout.pp, layout.dp_replicate, layout.efsdp, layout.ep, -1)
    # The last dim has the ranks with other experts, the one before it those with the same.
    ranks = ranks.transpose(3, 4).flatten(2, 3)
    alike = "+".join(("efsdp", *inner))
    names = tuple(f"{axis}_{attempt}" for axis in ("pp", "dp_replicate", alike, "ep"))
    mesh = DeviceMesh(same_tokens.device_type, ranks, mesh_dim_names=names)
    data = names[1:3] if layout.dp_replicate > 1 else names[2:3]
    return ExpertMesh(ranks=mesh[names[3]], sharding=mesh[data], same_tokens=same_tokens)
