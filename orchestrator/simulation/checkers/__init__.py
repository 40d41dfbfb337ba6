"""What must never happen, checked against the truth of the virtual cluster."""

from orchestrator.simulation.checkers.monitor import SLOW_LASTS_S, SLOW_SEEN_S, Monitor

__all__ = ["SLOW_LASTS_S", "SLOW_SEEN_S", "Monitor"]
