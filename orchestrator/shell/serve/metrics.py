"""All Prometheus metrics of a run. Their values come from ``core.log.stats``."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge

from orchestrator.core import RunStats
from workers.protocol import SaveCosts


class RunMetrics:
    """Gauges that mirror ``RunStats``. Totals are gauges too, because a replay may set them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, registry=registry)

        self._attempt = gauge("run_attempt", "Number of the newest attempt.")
        self._step = gauge("run_step", "Last completed step that need not be redone.")
        self._num_workers = gauge("run_workers", "Workers in the newest attempt.")
        self._lost_steps = gauge("run_lost_steps_total", "Completed steps that were redone.")
        self._incidents = gauge("run_incidents_total", "Interruptions and planned changes.")
        self._goodput = gauge("run_goodput_ratio", "Share of the time spent in steps that counted.")

        self._survived = gauge(
            "run_node_losses_survived", "Nodes that may be lost without losing the snapshot."
        )
        self._reduced_s = gauge(
            "run_reduced_redundancy_seconds_total",
            "Time in which fewer nodes might be lost than asked for.",
        )
        self._reduced_for_s = gauge(
            "run_reduced_redundancy_seconds", "How long that has lasted now; 0 if it does not."
        )
        self._snapshot_step = gauge("run_snapshot_step", "Newest step complete in memory.")
        self._stored_step = gauge("run_stored_step", "Newest step known to be in storage.")
        self._problems = gauge(
            "run_keeper_problems", "Problems that reduce the protection by snapshots."
        )
        self._step_s = gauge("run_step_seconds", "Median step, without saves.")
        self._snapshot_stall_s = gauge(
            "run_snapshot_stall_seconds", "Median time that a snapshot stalls training."
        )
        self._checkpoint_stall_s = gauge(
            "run_checkpoint_stall_seconds", "Median time that a checkpoint stalls training."
        )
        self._save_share = gauge(
            "run_save_cost_ratio", "Share of step time for which saves stall training."
        )
        self._save_share_max = gauge("run_save_cost_budget_ratio", "The largest share allowed.")
        self._snapshot_every = gauge("run_snapshot_every_steps", "Steps between two snapshots.")
        self._checkpoint_every = gauge(
            "run_checkpoint_every_steps", "Steps between two versions in storage."
        )

    def show_saves(self, costs: SaveCosts, *, share: float, share_max: float) -> None:
        """Set the gauges of the cost and the intervals of saves.

        Args:
            costs: As measured on one rank.
            share: Of step time for which saves stall training.
            share_max: The largest share allowed; an alert compares the two.
        """
        self._save_share.set(share)
        self._save_share_max.set(share_max)
        self._step_s.set(costs.step_s)
        self._snapshot_stall_s.set(costs.snapshot_stall_s)
        self._checkpoint_stall_s.set(costs.checkpoint_stall_s)
        self._snapshot_every.set(costs.pace.snapshot_steps)
        self._checkpoint_every.set(costs.pace.checkpoint_steps)

    def show_protection(
        self,
        *,
        survived: int,
        reduced_s: float,
        reduced_for_s: float,
        snapshot_step: int,
        stored_step: int,
        num_problems: int,
    ) -> None:
        """Set the gauges of redundancy."""
        self._survived.set(survived)
        self._reduced_s.set(reduced_s)
        self._reduced_for_s.set(reduced_for_s)
        self._snapshot_step.set(snapshot_step)
        self._stored_step.set(stored_step)
        self._problems.set(num_problems)

    def show(self, stats: RunStats) -> None:
        """Set the gauges of the journaled numbers."""
        self._attempt.set(stats.attempt)
        self._step.set(stats.step)
        self._num_workers.set(stats.num_workers)
        self._lost_steps.set(stats.lost_steps)
        self._incidents.set(len(stats.incidents))
        self._goodput.set(stats.goodput)
