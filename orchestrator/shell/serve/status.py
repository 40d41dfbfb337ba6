"""The document that ``everstep status --json`` prints, as a living controller makes it."""

from __future__ import annotations

import math
from typing import Any

from orchestrator.config import RunConfig
from orchestrator.detection import Limits, as_seconds
from orchestrator.shell.capacity import NodeView
from workers.keeper import SILENT_S
from workers.protocol import LEASE_S, WorkerReport


def status_document(
    *,
    described: dict[str, Any],
    reports: dict[str, WorkerReport],
    seen_at_s: dict[str, float],
    nodes: dict[str, NodeView],
    at_s: float,
    **documents: Any,
) -> dict[str, Any]:
    """Return the status of a run.

    Args:
        described: ``core.state.describe``.
        reports: Last report of every worker.
        seen_at_s: When each of those came, on the run's clock.
        nodes: What the node watcher knows.
        at_s: Now, on the run's clock.
        documents: Further keys of the document.
    """
    members = [reports[row["worker"]] for row in described["members"] if row["worker"] in reports]
    current = [report for report in members if report.attempt == described["attempt"]]
    losses = [report.loss for report in current if math.isfinite(report.loss)]
    known = {row["node"]: row for row in described["nodes"]}

    def workers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [_worker(row, reports, seen_at_s, at_s) for row in rows]

    return {
        "phase": described["phase"],
        "attempt": described["attempt"],
        "step": described["step"],
        "loss": losses[0] if losses else None,
        "layout": described["layout"],
        "workers": workers(described["members"]),
        "standbys": workers(described["standbys"]),
        "nodes": [
            {
                "node": view.node,
                # Not 0, which `kill` takes for its own process group.
                "raylet_pid": view.raylet_pid or None,
                "keeper_pid": view.keeper_pid or None,
                "state": view.state,
                "notice": view.notice,
                "slots": known.get(view.node, {}).get("slots", []),
            }
            for view in nodes.values()
        ],
        "pending_capacity": len(described["pending_slots"]),
        "cause": described["cause"],
        "waits_for": described["waits_for"],
        "reason": described["reason"],
        "at_s": round(at_s, 3),
        **documents,
    }


def bounds_document(config: RunConfig, limits: Limits) -> dict[str, float]:
    """Return the bound of every wait in seconds, shortest first.

    Args:
        config: Of the run: the bounds of the controller, of its guard and of the collectives.
        limits: The bounds that find hangs, as they follow from the steps so far.
    """
    bounds_s = {
        **as_seconds(limits),
        **config.rules().bounds.as_seconds(),
        "collective": config.parallel.collective_timeout_s,
        "controller_stopped": config.controller_stopped_s,
        "machine_silent": SILENT_S,
        "lease": LEASE_S,
    }
    return {name: round(bounds_s[name], 3) for name in sorted(bounds_s, key=bounds_s.__getitem__)}


def _worker(
    row: dict[str, Any],
    reports: dict[str, WorkerReport],
    seen_at_s: dict[str, float],
    at_s: float,
) -> dict[str, Any]:
    """Return a row of ``described`` with what the worker itself reported last."""
    report = reports.get(row["worker"])
    if report is None:
        return {**row, "phase": None, "step": None, "last_heartbeat_s": None}
    heartbeat_s = round(report.beat_age_s + at_s - seen_at_s[row["worker"]], 3)
    return {
        **row,
        "phase": str(report.phase),
        "step": report.step,
        "last_heartbeat_s": heartbeat_s,
    }
