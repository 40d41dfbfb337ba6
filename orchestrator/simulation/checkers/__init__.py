"""What must never happen, checked against the truth of the virtual cluster."""

from orchestrator.simulation.checkers.violations import Monitor, Violation, require

__all__ = [
    "Monitor",
    "Violation",
    "require",
]
