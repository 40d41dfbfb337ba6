"""Clusters of simulated nodes on this machine."""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
    from orchestrator.shell.local.cluster import (
        HostedCluster,
        is_over,
        is_there,
        require_loopback,
    )
    from orchestrator.shell.local.registry import (
        LocalEntry,
        kill_local_cluster,
        local_clusters,
        own_folder,
    )


__getattr__ = lazy_door(__name__)
