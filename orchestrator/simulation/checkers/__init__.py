"""What must never happen, checked against the truth of the virtual cluster."""

from orchestrator.simulation.checkers.monitor import Monitor

__all__ = ["Monitor"]
