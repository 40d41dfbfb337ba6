"""Reservations, nodes and worker processes on Ray."""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
    from orchestrator.shell.capacity.autoscaler import AutoscalerWatch
    from orchestrator.shell.capacity.nodes import Nodes, NodeView
    from orchestrator.shell.capacity.rendezvous import Rendezvous
    from orchestrator.shell.capacity.reservations import Capacity
    from orchestrator.shell.capacity.workers import Workers

__all__ = [
    "AutoscalerWatch",
    "Capacity",
    "NodeView",
    "Nodes",
    "Rendezvous",
    "Workers",
]

__getattr__ = lazy_door(__name__)
