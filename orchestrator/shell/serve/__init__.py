"""Serves a run's page, status and metrics."""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
    from orchestrator.shell.serve.discovery import announce, targets_path, withdraw
    from orchestrator.shell.serve.http import StatusPage
    from orchestrator.shell.serve.live import NUM_NODES, Live
    from orchestrator.shell.serve.metrics import NUM_TOLD, RunCollector


__getattr__ = lazy_door(__name__)
