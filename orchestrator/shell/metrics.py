"""The run's Prometheus metrics: the one catalogue. Values come from ``core.stats``."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge

from orchestrator.core.stats import RunStats


class RunMetrics:
    """Gauges that mirror ``RunStats``; totals are gauges too, because a replay may set them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, registry=registry)

        self._attempt = gauge("run_attempt", "Number of the newest attempt.")
        self._step = gauge("run_step", "Last completed step that is not to be redone.")
        self._num_workers = gauge("run_workers", "Workers in the newest attempt.")
        self._lost_steps = gauge("run_lost_steps_total", "Completed steps that were redone.")
        self._incidents = gauge("run_incidents_total", "Losses of service and planned changes.")
        self._goodput = gauge("run_goodput_ratio", "Share of the time in steps of the history.")

    def show(self, stats: RunStats) -> None:
        """Set every gauge."""
        self._attempt.set(stats.attempt)
        self._step.set(stats.step)
        self._num_workers.set(stats.num_workers)
        self._lost_steps.set(stats.lost_steps)
        self._incidents.set(len(stats.incidents))
        self._goodput.set(stats.goodput)
