"""The device mesh of an attempt."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from ucp_core.layout import ParallelLayout
from workers.errors import StateError
from workers.parallel.placements import Cut, cuts_of

__all__ = ["Mesh", "build_mesh"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The mesh that the model is sharded over, and this rank's place in it.

    Attributes:
        sharding: The mesh for FSDP2: ``(dp_shard,)`` or ``(dp_replicate, dp_shard)``.
        layout: Degrees of all axes.
        rank: This rank.
        data_rank: This data-parallel rank, ``0 <= data_rank < layout.dp``.
    """

    sharding: DeviceMesh
    layout: ParallelLayout
    rank: int
    data_rank: int

    @property
    def replicas(self) -> ProcessGroup | None:
        """Return the group of ranks that hold the same state; None if only this rank holds it."""
        return self.sharding.get_group(0) if self.layout.dp_replicate > 1 else None

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
    unusable = [axis for axis in ("pp", "cp", "tp", "ep") if getattr(layout, axis) > 1]
    if unusable:
        raise StateError(
            f"layout {layout}: {', '.join(unusable)} above 1 cannot be built by this worker; "
            "use dp_replicate and dp_shard",
            layout=str(layout),
        )
    degrees = {"dp_shard": layout.dp_shard}
    if layout.dp_replicate > 1:
        degrees = {"dp_replicate": layout.dp_replicate, **degrees}
    mesh = init_device_mesh(
        device_type,
        tuple(degrees.values()),
        mesh_dim_names=tuple(f"{axis}_{attempt}" for axis in degrees),
    )
    return Mesh(
        sharding=mesh,
        layout=layout,
        rank=rank,
        data_rank=layout.data_rank(rank),
    )
