"""The run's effects on Ray: the world into events, actions into effects, and no decisions."""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
    from orchestrator.shell.clock import monotonic_s, wall_time
    from orchestrator.shell.connect import connect_ray
    from orchestrator.shell.controller import OPTIONS, Controller
    from orchestrator.shell.local import HostedCluster
    from orchestrator.shell.names import RunNames
    from orchestrator.shell.serve import bounds_document
    from orchestrator.shell.storage import config_of, next_life, read_segments

__all__ = [
    "OPTIONS",
    "Controller",
    "HostedCluster",
    "RunNames",
    "bounds_document",
    "config_of",
    "connect_ray",
    "monotonic_s",
    "next_life",
    "read_segments",
    "wall_time",
]

__getattr__ = lazy_door(
    __name__,
    {
        "orchestrator.shell.clock": ("monotonic_s", "wall_time"),
        "orchestrator.shell.connect": ("connect_ray",),
        "orchestrator.shell.controller": ("Controller", "OPTIONS"),
        "orchestrator.shell.local": ("HostedCluster",),
        "orchestrator.shell.names": ("RunNames",),
        "orchestrator.shell.serve": ("bounds_document",),
        "orchestrator.shell.storage": ("config_of", "next_life", "read_segments"),
    },
)
