"""A virtual cluster in virtual time that drives the real machine; one seed is one history."""

from orchestrator.simulation.campaign import run_campaign

__all__ = [
    "run_campaign",
]
