"""The document that ``everstep status --json`` prints, as a living controller makes it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from orchestrator.config import RunConfig
from orchestrator.core import RunStats
from orchestrator.detection import Limits, as_seconds
from orchestrator.report import rate
from orchestrator.shell.capacity import NodeView
from workers.keeper import SILENT_S
from workers.protocol import LEASE_S, StepCost, WorkerReport

#: Incidents that a status names, the newest ones.
INCIDENTS_SHOWN = 3


def status_document(
    *,
    described: dict[str, Any],
    reports: dict[str, WorkerReport],
    seen_at_s: dict[str, float],
    costs: Mapping[str, StepCost],
    nodes: dict[str, NodeView],
    at_s: float,
    alternatives: Sequence[str],
    **documents: Any,
) -> dict[str, Any]:
    """Return the status of a run.

    Args:
        described: ``core.state.describe``.
        reports: Last report of every worker.
        seen_at_s: When each of those came, on the run's clock.
        costs: The last that a worker told of its own work.
        at_s: Now, on the run's clock.
        alternatives: The names of those of capacity.
        documents: Further keys of the document.
    """
    members = [reports[row["worker"]] for row in described["members"] if row["worker"] in reports]
    current = [report for report in members if report.attempt == described["attempt"]]
    known = {row["node"]: row for row in described["nodes"]}

    def workers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [_worker(row, reports, seen_at_s, costs, at_s) for row in rows]

    return {
        "phase": described["phase"],
        "attempt": described["attempt"],
        "step": described["step"],
        "loss": _finite(report.loss for report in current),
        "grad_norm": _finite(report.facts.grad_norm for report in current),
        "lr": _finite(report.facts.lr for report in current),
        "validation_loss": _finite(report.facts.validation_loss for report in current),
        "step_tokens": _tokens(reports.values(), described),
        "layout": described["layout"],
        "other_layouts": described["other_layouts"],
        "workers": workers(described["members"]),
        "standbys": workers(described["standbys"]),
        "processes": described["processes"],
        "nodes": [
            {
                "node": view.node,
                # Not 0, which `kill` takes for its own process group.
                "raylet_pid": view.raylet_pid or None,
                "keeper_pid": view.keeper_pid or None,
                "state": view.state,
                "notice": view.notice,
                "taken_in_s": round(view.taken_s - at_s) if math.isfinite(view.taken_s) else None,
                "reservations": known.get(view.node, {}).get("reservations", []),
            }
            for view in nodes.values()
        ],
        "pending_capacity": len(described["pending_reservations"]),
        "capacity": capacity_rows(described, alternatives, at_s),
        "shared": described["shared"],
        "cause": described["cause"],
        "suspects": [
            {**one, "for_s": round(at_s - one["since_s"], 1)} for one in described["suspects"]
        ],
        "sent": described["sent"],
        "waits_for": described["waits_for"],
        "reason": described["reason"],
        "at_s": round(at_s, 3),
        **documents,
    }


def capacity_rows(
    described: Mapping[str, Any], alternatives: Sequence[str], at_s: float | None
) -> list[dict[str, Any]]:
    """Return what became of the requests for each alternative that was asked for.

    Keys: ``alternative`` (its name), ``asked``, ``granted``, ``refused``, ``waits_s`` (since the
    first request that is open, or the last grant), ``refused_for_s``, ``grant_s`` (how long a
    machine takes to come) and ``why`` it was refused last. What is not known is null, and times
    are 0 where nothing is asked for in vain.
    """

    def ago(since_s: float | None) -> float | None:
        if at_s is None:
            return None
        return 0.0 if since_s is None else round(at_s - since_s, 3)

    return [
        {
            **{key: row[key] for key in ("asked", "granted", "refused", "grant_s", "why")},
            "alternative": alternatives[row["alternative"]],
            "waits_s": ago(row["since_s"]),
            "refused_for_s": ago(row["refused_s"]),
        }
        for row in described["capacity"]
    ]


def progress_document(stats: RunStats, goal: int, *, at_s: float | None) -> dict[str, Any]:
    """Return how far a run is and what happened to it last.

    Keys: ``goal`` (its last step), ``steps_per_s`` (null before there is one), ``phase_for_s``,
    ``busy`` (that machines are; "" if they do not seem so) and ``incidents[{number, kind, who,
    evidence, lost_steps, recovery_s, found_s}]``, the newest last, with the seconds since it was
    found. A value that depends on ``at_s``, now on the run's clock, is null or "" without it.
    """

    def ago(instant_s: float | None) -> float | None:
        known = at_s is not None and instant_s is not None
        return round(at_s - instant_s, 1) if known else None  # type: ignore[operator]

    return {
        "goal": goal,
        "steps_per_s": round(rate(stats), 4) or None,
        "phase_for_s": ago(stats.phase_since_s),
        "busy": "" if at_s is None else stats.busy(at_s),
        "incidents": [
            {
                "number": one.number,
                "kind": one.kind,
                "who": one.who,
                "evidence": one.evidence,
                "lost_steps": one.lost_steps,
                "recovery_s": one.recovery_s,
                "found_s": ago(one.t_detect_s),
            }
            for one in stats.incidents[-INCIDENTS_SHOWN:]
        ],
    }


def cost_document(stats: RunStats, config: RunConfig) -> dict[str, float | None]:
    """Return what a run has cost; null where no price is known, or no tokens are."""
    is_known = any(each.usd_per_hour for each in config.alternatives())
    return {
        "usd": round(stats.cost_usd, 6) if is_known else None,
        "usd_per_hour": stats.usd_per_hour if is_known else None,
        "usd_per_million_tokens": stats.usd_per_million_tokens(config.tokens_per_step),
    }


def bounds_document(
    config: RunConfig, limits: Limits, *, lease_s: float = LEASE_S
) -> dict[str, float]:
    """Return the bound of every wait in seconds, shortest first.

    Args:
        config: Configuration of the run: the bounds of the controller, of its guard and of the
            collectives.
        limits: The bounds that find hangs, as they follow from the steps so far.
        lease_s: How long trainers go on without a controller.
    """
    bounds_s = {
        **as_seconds(limits),
        **config.rules().bounds.as_seconds(),
        "collective": config.parallel.collective_timeout_s,
        "controller_stopped": config.controller_stopped_s,
        "machine_silent": SILENT_S,
        "lease": lease_s,
    }
    return {name: round(bounds_s[name], 3) for name in sorted(bounds_s, key=bounds_s.__getitem__)}


def _worker(
    row: dict[str, Any],
    reports: dict[str, WorkerReport],
    seen_at_s: dict[str, float],
    costs: Mapping[str, StepCost],
    at_s: float,
) -> dict[str, Any]:
    """Return a row of ``described`` with what the worker itself reported last."""
    report = reports.get(row["worker"])
    if report is None:
        return {**row, "phase": None, "step": None, "last_heartbeat_s": None}
    facts, cost = report.facts, costs.get(row["worker"])
    heartbeat_s = round(report.beat_age_s + at_s - seen_at_s[row["worker"]], 3)
    return {
        **row,
        "phase": str(report.phase),
        "step": report.step,
        "last_heartbeat_s": heartbeat_s,
        "compute_s": None if cost is None else cost.compute_s,
        "data_s": _finite([facts.data_s]),
        "device_bytes": _finite([facts.device_bytes]),
        "device_bytes_max": _finite([facts.device_bytes_max]),
    }


def _tokens(reports: Iterable[WorkerReport], described: Mapping[str, Any]) -> float | None:
    """Return the tokens of a step over all members; None while one has told none."""
    told = [one.facts.tokens for one in reports if one.attempt == described["attempt"]]
    return (_finite([sum(told)]) or None) if len(told) == described["num_members"] else None


def _finite(values: Iterable[float]) -> float | None:
    """Return the first of the values that JSON has, None if it has none of them."""
    return next((value for value in values if math.isfinite(value)), None)
