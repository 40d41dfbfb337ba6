"""The document of a run. All views of the run are made from it.

``tell`` makes it from the journal and from a living controller's view. ``/status`` returns its
``status``, ``orchestrator.report.page`` draws the page and the report, and the terminal and the
metrics are tables of labels and paths into it. A new fact is one key here, and one row in each
table that shows it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from orchestrator.core import RunStats
from orchestrator.detection import Limits, as_seconds
from workers.keeper import SILENT_S
from workers.protocol import LEASE_S, StepCost, WorkerReport

if TYPE_CHECKING:
    from orchestrator.config import RunConfig

#: A status lists this many of the newest incidents, each with these keys.
_INCIDENTS_SHOWN = 3
_OF_INCIDENT = ("number", "kind", "guilty", "who", "evidence", "lost_steps", "recovery_s")
#: Keys that the status copies from the state of the run (``core.describe``).
_OF_STATE = (
    *("phase", "attempt", "step", "layout", "other_layouts", "processes", "shared", "cause"),
    *("sent", "waits_for", "reason"),
)
_OF_OFFER = ("asked", "granted", "refused", "grant_s", "why")
#: Keys of a worker's own report.
_OF_FACTS = ("data_s", "device_bytes", "device_bytes_max")
_OF_REPORT = ("phase", "step", "last_heartbeat_s", "compute_s", *_OF_FACTS)
#: Period over which the rate is computed.
_RATE_S = 60.0


class Scale(NamedTuple):
    """The size of a run's steps."""

    goal: int  #: The last step; 0 if unknown.
    samples: float  #: Samples of one step; 0 if unknown.
    tokens: float  #: Tokens of one step; 0 if unknown.

    @property
    def unit(self) -> str:
        """Return the unit of throughput."""
        return "tokens" if self.tokens else "samples" if self.samples else "steps"

    @property
    def per_step(self) -> float:
        """Return how many units a step has."""
        return self.tokens or self.samples or 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A living controller's view of its workers and nodes; empty without a controller."""

    at_s: float = math.nan  #: The current time on the run's clock.
    reports: Mapping[str, WorkerReport] = field(default_factory=dict)  #: The last of each worker.
    seen_at_s: Mapping[str, float] = field(default_factory=dict)  #: When each of these came.
    #: The newest cost of a step that each worker has reported.
    costs: Mapping[str, StepCost] = field(default_factory=dict)
    #: One row per node; if there are many, those in trouble first.
    nodes: Sequence[Mapping[str, Any]] = ()
    node_states: Mapping[str, int] = field(default_factory=dict)  #: Number of nodes in each state.


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDocument:
    """The facts of a run."""

    stats: RunStats  #: Its folded journal.
    scale: Scale
    #: ``usd``, ``usd_per_hour`` and ``usd_per_million_tokens``; null if unknown.
    cost: Mapping[str, float | None]
    #: The document of ``/status``: what the run does now. Empty in a report.
    status: dict[str, Any] = field(default_factory=dict)


def tell(
    described: Mapping[str, Any],
    stats: RunStats,
    config: RunConfig,
    *,
    seen: Seen,
    **more: Any,
) -> RunDocument:
    """Return the document of a run.

    In its status, unknown values are null. In ``capacity`` each alternative that was requested has
    a row: ``waits_s`` counts from the first open request or the last grant, and ``grant_s`` is how
    long a machine takes to come. Times are 0 while no request is open. ``incidents`` lists the
    newest ones in order; ``found_s`` is the seconds since each was found.
    """
    at_s, is_seen = seen.at_s, math.isfinite(seen.at_s)
    is_priced = any(each.usd_per_hour for each in config.alternatives())
    cost = {
        "usd": round(stats.cost_usd, 6) if is_priced else None,
        "usd_per_hour": stats.usd_per_hour if is_priced else None,
        "usd_per_million_tokens": stats.usd_per_million_tokens(config.tokens_per_step),
    }

    def ago(instant_s: float | None, digits: int = 1) -> float | None:
        return None if instant_s is None else finite([round(at_s - instant_s, digits)])

    def open_for(instant_s: float | None) -> float | None:
        return 0.0 if instant_s is None and is_seen else ago(instant_s, 3)

    names = config.alternative_names()
    status = {
        **{name: described[name] for name in _OF_STATE},
        **_seen(described, seen),
        "pending_capacity": len(described["pending_reservations"]),
        "capacity": [
            {
                **{name: row[name] for name in _OF_OFFER},
                "alternative": names[row["alternative"]],
                "waits_s": open_for(row["since_s"]),
                "refused_for_s": open_for(row["refused_s"]),
            }
            for row in described["capacity"]
        ],
        "suspects": [{**one, "for_s": ago(one["since_s"])} for one in described["suspects"]],
        "at_s": finite([round(at_s, 3)]),
        "cost": cost,
        "goal": config.train.steps,
        "steps_per_s": round(rate(stats), 4) or None,
        "phase_for_s": ago(stats.phase_since_s),
        "busy": stats.busy(at_s) if is_seen else "",
        "incidents": [
            {**{name: getattr(one, name) for name in _OF_INCIDENT}, "found_s": ago(one.t_detect_s)}
            for one in stats.incidents[-_INCIDENTS_SHOWN:]
        ],
        "directory": config.run.directory,
        "loaded": stats.loaded,
        "passed_over": list(stats.passed_over),
        "evidence": stats.evidence,
        **more,
    }
    scale = Scale(config.train.steps, config.train.global_batch, config.tokens_per_step)
    return RunDocument(stats=stats, scale=scale, cost=cost, status=status)


def _seen(described: Mapping[str, Any], seen: Seen) -> dict[str, Any]:
    """Return the part of the status that workers and nodes reported."""
    rows = (seen.reports.get(row["worker"]) for row in described["members"])
    members = [row for row in rows if row is not None and row.attempt == described["attempt"]]
    tokens = [
        one.facts.tokens for one in seen.reports.values() if one.attempt == described["attempt"]
    ]
    has_all = len(tokens) == described["num_members"]
    reservations = {row["node"]: row["reservations"] for row in described["nodes"]}
    return {
        "loss": finite(each.loss for each in members),
        "grad_norm": finite(each.facts.grad_norm for each in members),
        "lr": finite(each.facts.lr for each in members),
        "validation_loss": finite(each.facts.validation_loss for each in members),
        # The tokens of only some members would look like a slow run.
        "step_tokens": (finite([sum(tokens)]) or None) if has_all else None,
        "workers": [_worker(row, seen) for row in described["members"]],
        "standbys": [_worker(row, seen) for row in described["standbys"]],
        "node_states": dict(seen.node_states),
        "nodes": [{**row, "reservations": reservations.get(row["node"], [])} for row in seen.nodes],
    }


def _worker(row: Mapping[str, Any], seen: Seen) -> dict[str, Any]:
    """Return a row of ``core.describe``, extended by the worker's last report."""
    report, cost = seen.reports.get(row["worker"]), seen.costs.get(row["worker"])
    if report is None:
        return {**row, **dict.fromkeys(_OF_REPORT)}
    told = {name: finite([getattr(report.facts, name)]) for name in _OF_FACTS}
    return {
        **row,
        "phase": str(report.phase),
        "step": report.step,
        "last_heartbeat_s": round(report.beat_age_s + seen.at_s - seen.seen_at_s[row["worker"]], 3),
        "compute_s": None if cost is None else cost.compute_s,
        **told,
    }


def finite(values: Iterable[float]) -> float | None:
    """Return the first finite value, which JSON can express; None without one."""
    return next((value for value in values if math.isfinite(value)), None)


def rate(stats: RunStats) -> float:
    """Return steps per second over the last minute, or over the whole run if it is over.

    Pauses count; steps that are redone do not.
    """
    if not stats.progress:
        return 0.0
    if stats.outcome:
        trained_s = stats.wall_s - stats.startup_s
        return stats.step / trained_s if trained_s > 0.0 else 0.0
    now_s, now_step = stats.progress[-1]
    for at_s, step in reversed(stats.progress):
        first_s, first_step = at_s, step
        if now_s - at_s > _RATE_S:
            break
    return (now_step - first_step) / (now_s - first_s) if now_s > first_s else 0.0


def bounds_document(
    config: RunConfig, limits: Limits, *, lease_s: float = LEASE_S
) -> dict[str, float]:
    """Return the bound of every wait in seconds, shortest first.

    Args:
        config: Has the bounds of the controller, of its guard and of the collectives.
        limits: The bounds for finding hangs, given the steps so far.
        lease_s: How long trainers continue without a controller.
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
