"""The device mesh of an attempt."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ucp_core.layout import ParallelLayout
from workers.errors import StateError

__all__ = ["Mesh", "build_mesh"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The mesh over which the model is spread, and this rank's place in it.

    Attributes:
        sharding: What FSDP2 is given: ``(dp_shard,)`` or ``(dp_replicate, dp_shard)``.
        layout: Degrees of all axes.
        data_rank: Which data-parallel rank this is, ``0 <= data_rank < layout.dp``.
        replica: This rank's place on ``dp_replicate``.
    """

    sharding: DeviceMesh
    layout: ParallelLayout
    data_rank: int
    replica: int

    @property
    def replicas(self) -> ProcessGroup | None:
        """Return the ranks that hold the same state as this one, or None if it is alone."""
        return self.sharding.get_group(0) if self.layout.dp_replicate > 1 else None


def build_mesh(layout: ParallelLayout, *, device_type: str, attempt: int, rank: int) -> Mesh:
    """Return the mesh of ``layout``; every rank of the attempt calls it once its groups stand.

    Axis names carry the attempt: a mesh equals another of the same shape and names whatever
    process groups it has (torch 2.13), so caches keyed by meshes would hand out dead groups.

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
    place = layout.coordinates(rank)
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
        data_rank=layout.data_rank(rank),
        replica=place["dp_replicate"],
    )
