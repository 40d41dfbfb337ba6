"""The document that ``everstep status --json`` prints, put together from what the shell knows."""

from __future__ import annotations

import math
from typing import Any

from orchestrator.config import RunConfig
from orchestrator.detection import Limits, as_seconds
from orchestrator.shell.capacity import KEEPER_SILENT_S, NodeView
from workers.protocol import WorkerReport


def status_document(
    *,
    described: dict[str, Any],
    redundancy: dict[str, Any],
    cadence: dict[str, Any],
    loaded: dict[str, int],
    reports: dict[str, WorkerReport],
    seen_at_s: dict[str, float],
    nodes: dict[str, NodeView],
    at_s: float,
) -> dict[str, Any]:
    """Return the status of a run.

    Args:
        described: ``core.state.describe``.
        redundancy: ``shell.protection.ProtectionWatch.redundancy``.
        cadence: ``shell.memory.CadenceWatch.document``.
        loaded: Bytes that the newest attempt loaded, by kind of source.
        reports: Last report of every worker.
        seen_at_s: When each of those came, on the run's clock.
        nodes: What the node watcher knows.
        at_s: Now, on the run's clock.
    """
    rows = described["members"] + [{"rank": -1, **row} for row in described["standbys"]]
    workers = [_worker(row, reports, seen_at_s, at_s) for row in rows]
    members = [reports[row["worker"]] for row in described["members"] if row["worker"] in reports]
    current = [report for report in members if report.attempt == described["attempt"]]
    losses = [report.loss for report in current if math.isfinite(report.loss)]
    known = {row["node"]: row for row in described["nodes"]}
    return {
        "phase": described["phase"],
        "attempt": described["attempt"],
        "step": described["step"],
        "loss": losses[0] if losses else None,
        "layout": described["layout"],
        "workers": workers,
        "nodes": [
            {
                "node": view.node,
                # Not 0, which to `kill` is its own process group.
                "raylet_pid": view.raylet_pid or None,
                "keeper_pid": view.keeper_pid or None,
                "state": view.state,
                "slots": known.get(view.node, {}).get("slots", []),
            }
            for view in nodes.values()
        ],
        "pending_capacity": len(described["pending_slots"]),
        "redundancy": redundancy,
        "cadence": cadence,
        "loaded": loaded,
        "cause": described["cause"],
        "reason": described["reason"],
        "at_s": round(at_s, 3),
    }


def bounds_document(config: RunConfig, limits: Limits) -> dict[str, float]:
    """Return the bound of every wait in seconds, from the shortest on.

    Args:
        config: Says those of the controller, of its guard and of the collectives.
        limits: Those by which hangs are found, as they follow from the steps so far.
    """
    bounds_s = {
        **as_seconds(limits),
        **config.rules().bounds.as_seconds(),
        "collective": config.parallel.collective_timeout_s,
        "controller_stopped": config.controller_stopped_s,
        "keeper_silent": KEEPER_SILENT_S,
    }
    return {name: round(bounds_s[name], 3) for name in sorted(bounds_s, key=bounds_s.__getitem__)}


def _worker(
    row: dict[str, Any],
    reports: dict[str, WorkerReport],
    seen_at_s: dict[str, float],
    at_s: float,
) -> dict[str, Any]:
    report = reports.get(row["worker"])
    heartbeat_s = None
    if report is not None:
        heartbeat_s = round(report.beat_age_s + at_s - seen_at_s[row["worker"]], 3)
    return {
        "rank": row["rank"],
        "worker": row["worker"],
        "node": row["node"],
        "pid": row["pid"],
        "state": row["state"],
        "phase": str(report.phase) if report is not None else None,
        "step": report.step if report is not None else None,
        "last_heartbeat_s": heartbeat_s,
    }
