"""Faults of the virtual cluster, drawn from the seed."""

from tests.simulation.faults import drawing

__all__ = [
    "drawing",
]
