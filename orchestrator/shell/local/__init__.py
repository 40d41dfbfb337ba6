"""A simulated cluster on this machine, and faults made on purpose."""

from orchestrator.shell.local.cluster import HostedCluster

__all__ = [
    "HostedCluster",
]
