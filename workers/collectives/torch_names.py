"""Names of torch that this room uses and torch does not promise. Checked on 2.11, 2.13 to 2.15.

``make test-torch`` runs the tests with the oldest and the newest release.
"""

import gc
import os
from datetime import timedelta
from typing import Final

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _collective_utils, _redistribute
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

__all__ = [
    "REDUCE_SCATTER",
    "REDUCE_SCATTER_COALESCED",
    "check_exchange",
    "clear_mesh_caches",
    "distributed_c10d",
    "is_registered",
    "new_gloo",
    "restart_group_count",
]

_HAS_NEW_NAMES: Final = hasattr(dist.ProcessGroup, "reduce_scatter_single")
#: The methods of ``ProcessGroup``, renamed in torch 2.12.
REDUCE_SCATTER: Final = "reduce_scatter_single" if _HAS_NEW_NAMES else "_reduce_scatter_base"
REDUCE_SCATTER_COALESCED: Final = (
    "reduce_scatter_single_coalesced" if _HAS_NEW_NAMES else "reduce_scatter_tensor_coalesced"
)


def is_registered(backend: str) -> bool:
    """Return whether torch knows a backend of this name."""
    return backend.upper() in dist.Backend._plugins  # noqa: SLF001


def new_gloo(
    store: dist.Store, rank: int, size: int, timeout: timedelta, address: str
) -> dist.ProcessGroupGloo:
    """Return a group of gloo whose members reach this one at ``address``.

    By default that is the address of the host's name. On Debian that is 127.0.1.1, which no other
    machine reaches. GLOO_SOCKET_IFNAME overrides ``address``.
    """
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001
    options._timeout = timeout  # noqa: SLF001
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]  # noqa: SLF001
    return dist.ProcessGroupGloo(store, rank, size, options)


def restart_group_count() -> None:
    """Make torch name the next groups as in a process that has created none.

    It names groups by a count, and a group that was aborted while it formed stays counted. A new
    process would wait for it under another name, until the timeout.
    """
    distributed_c10d._world.group_count = 0  # noqa: SLF001


def check_exchange(operations: list[dist.P2POp]) -> None:
    """Raise the error of torch's ``batch_isend_irecv`` if ``operations`` cannot be one batch."""
    distributed_c10d._check_p2p_op_list(operations)  # noqa: SLF001


def clear_mesh_caches() -> None:
    """Drop DTensor's four caches of meshes.

    Two meshes of the same shape are equal even if their groups differ. So a cached plan would call
    groups of the old attempt, and the caches keep those groups alive.
    """
    _clear_sharding_prop_cache()
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()  # noqa: SLF001
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
    # torch 2.11 counts one reference too many to the mesh of a DTensor that was viewed, so the mesh
    # is never freed. This removes its groups from it.
    for mesh in gc.get_objects() if not _HAS_NEW_NAMES else ():
        if type(mesh) is DeviceMesh:
            mesh._pg_registry.clear()  # noqa: SLF001
