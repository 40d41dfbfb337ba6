"""Checks that broken promises never happen, against the truth of the virtual cluster."""

from tests.simulation.checkers.invariants import check
from tests.simulation.checkers.monitor import SLOW_SEEN_S, SLOW_STEADY_S, Monitor

__all__ = ["SLOW_SEEN_S", "SLOW_STEADY_S", "Monitor", "check"]
