"""The run's effects on Ray: facts become events, actions become effects. It decides nothing."""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
    from orchestrator.shell.clock import wall_time
    from orchestrator.shell.connect import connect_ray, is_another_head, why_silent
    from orchestrator.shell.controller import OPTIONS, Controller
    from orchestrator.shell.local import (
        HostedCluster,
        LocalEntry,
        kill_local_cluster,
        local_clusters,
        own_folder,
        require_loopback,
    )
    from orchestrator.shell.names import CONTROLLER, NAMESPACE_PREFIX, RunNames, run_id
    from orchestrator.shell.serve import withdraw
    from orchestrator.shell.storage import config_of, read_journal, read_segments


__getattr__ = lazy_door(__name__)
