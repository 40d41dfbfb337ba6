"""Faults of the virtual cluster, drawn from the seed."""

from orchestrator.simulation.faults import drawing

__all__ = [
    "drawing",
]
