"""The device mesh of an attempt."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from ucp_core.layout import AXES, ParallelLayout
from workers.errors import StateError
from workers.parallel.placements import Cut, cuts_of, replicas_over

#: The axes along which FSDP2 shards and copies a model.
_DATA_AXES: Final = ("dp_replicate", "dp_shard")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The mesh that the model is sharded over, and this rank's place in it.

    Attributes:
        sharding: The mesh for FSDP2: ``(dp_shard,)`` or ``(dp_replicate, dp_shard)``.
        tensor: The mesh for tensor parallelism; None if each weight is whole on a rank.
        stages: The ranks with the other stages of the same pipeline, in order; None without stages.
        layout: Degrees of all axes.
    """

    sharding: DeviceMesh
    tensor: DeviceMesh | None = None
    stages: ProcessGroup | None = None
    layout: ParallelLayout
    rank: int

    @property
    def data_rank(self) -> int:
        """Return this data-parallel rank, ``0 <= data_rank < layout.dp``."""
        return self.layout.data_rank(self.rank)

    @property
    def replicas(self) -> ProcessGroup | None:
        """Return the group of ranks that hold the same state; None if only this rank holds it."""
        return self.sharding.get_group(0) if self.layout.dp_replicate > 1 else None

    @property
    def sharers(self) -> tuple[int, ...]:
        """Return the ranks that have what no axis cuts, such as buffers, with this one."""
        return replicas_over(self.layout, self.rank, ())

    @property
    def counts(self) -> bool:
        """Return whether the loss of this rank counts: others have the same samples."""
        place = self.layout.coordinates(self.rank)
        return place["tp"] == 0 and place["pp"] == self.layout.pp - 1

    @property
    def tensor_rank(self) -> int:
        """Return this rank's place among those that have parts of the same tensors."""
        return self.layout.coordinates(self.rank)["tp"]

    @property
    def stage(self) -> int:
        """Return the number of this rank's pipeline stage."""
        return self.layout.coordinates(self.rank)["pp"]

    def cuts_of(self, tensor: DTensor) -> list[Cut]:
        """Return how the axes cut ``tensor``, under the axes' names in the layout."""
        return [replace(cut, axis=cut.axis.rpartition("_")[0]) for cut in cuts_of(tensor)]


def build_mesh(layout: ParallelLayout, *, device_type: str, attempt: int, rank: int) -> Mesh:
    """Return the mesh of ``layout``. Every rank calls it after the process groups are formed.

    Axis names contain the attempt. Meshes of the same shape and names are equal whatever their
    process groups (torch 2.13), so caches keyed by meshes would return groups of older attempts.

    Raises:
        StateError: The layout uses an axis that this worker cannot build.
    """
    unusable = [axis for axis in ("cp", "ep") if getattr(layout, axis) > 1]
    if unusable:
        raise StateError(
            f"layout {layout}: {', '.join(unusable)} above 1 cannot be built by this worker; "
            "use pp, dp_replicate, dp_shard and tp",
            layout=str(layout),
        )
    used = [axis for axis in AXES if axis == "dp_shard" or getattr(layout, axis) > 1]
    names = {axis: f"{axis}_{attempt}" for axis in used}
    mesh = init_device_mesh(
        device_type,
        tuple(getattr(layout, axis) for axis in used),
        mesh_dim_names=tuple(names.values()),
    )
    data = tuple(names[axis] for axis in used if axis in _DATA_AXES)
    return Mesh(
        sharding=mesh[data] if len(data) < len(used) else mesh,
        tensor=mesh[names["tp"]] if layout.tp > 1 else None,
        stages=mesh.get_group(names["pp"]) if layout.pp > 1 else None,
        layout=layout,
        rank=rank,
    )
