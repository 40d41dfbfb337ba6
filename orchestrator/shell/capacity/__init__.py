"""Reservations, nodes and worker processes on Ray."""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
    from orchestrator.shell.capacity.actors import ActorPool, answer
    from orchestrator.shell.capacity.autoscaler import AutoscalerWatch
    from orchestrator.shell.capacity.keepers import Keepers
    from orchestrator.shell.capacity.link_watch import LinkWatch
    from orchestrator.shell.capacity.node_view import NodeView, told_nodes
    from orchestrator.shell.capacity.nodes import Nodes
    from orchestrator.shell.capacity.notices import DRAINED
    from orchestrator.shell.capacity.probes import probe_links
    from orchestrator.shell.capacity.rendezvous import Rendezvous
    from orchestrator.shell.capacity.reservations import Capacity
    from orchestrator.shell.capacity.workers import Workers


__getattr__ = lazy_door(__name__)
