"""Faults of the virtual cluster, drawn from the seed."""

from orchestrator.simulation.faults import faults

__all__ = [
    "faults",
]
