"""The JSON document that ``page.html`` draws: a view of the run's document.

Pure. The live page and the report are one page: the controller makes this document from its own
state, ``write_report`` from the run directory. Instants count from the run's first record.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from orchestrator.core import Incident, RunStats, suspects_shown
from orchestrator.report.advice import advice, named_nodes
from orchestrator.report.document import RunDocument, Scale, rate
from orchestrator.report.run_directory import Curves, Point, thin
from orchestrator.report.situation import what_it_does, what_survives

#: At most this many incidents have a row; the table of kinds counts all.
INCIDENTS_MAX = 100
_RATES_MAX = 120
#: Shortest period of a mean. Steps are reported once a second, so a shorter one would be wrong by
#: one step.
_MEAN_S = 4.0
#: Keys that the page copies: of a run, an incident, a worker, a node, a keeper, a suspicion.
_OF_STATS = (
    *("phase", "outcome", "reason", "step", "attempt", "num_workers", "layout", "lost_steps"),
    *("wall_s", "startup_s", "goodput", "goodput_since_start", "parts_s"),
)
_OF_INCIDENT = (
    *("number", "kind", "who", "is_planned", "is_start", "evidence", "attempt", "detect_s"),
    *("recovery_s", "phases_s", "lost_steps", "cost_usd", "layout_before", "layout_after"),
    *("other_layouts", "sources", "rule", "places", "folder"),
)
_OF_WORKER = ("rank", "worker", "node", "pid", "state", "device_bytes")
_OF_NODE = ("node", "state", "notice")
_OF_KEEPER = ("held_bytes", "budget_bytes")
_OF_SUSPECT = ("kind", "worker", "evidence")


def page_document(
    told: RunDocument, curves: Curves, *, incidents: Sequence[Incident], **more: Any
) -> dict[str, Any]:
    """Return the document of a run's page.

    Args:
        incidents: Oldest first.
        more: Further keys; ``name`` and ``url`` are needed.
    """
    stats, began_s, validation = told.stats, told.stats.began_s, curves.validation
    scale = told.scale._replace(tokens=told.scale.tokens or curves.tokens_per_step)
    whys = (row["why"] for row in told.status.get("capacity", ()) if row["why"])
    return {
        **numbers_of(stats, scale),
        "cost": {**told.cost, "incidents_usd": sum(incident.cost_usd for incident in incidents)},
        "loss": thin(curves.loss),
        "validation": thin(validation),
        "curves": curves.further,
        "progress": progress(stats),
        "sizes": [(_since(at_s, began_s), num) for at_s, num in stats.sizes],
        "throughput": throughput(stats, scale.per_step),
        "incidents": [_incident(one, stats) for one in incidents[: -INCIDENTS_MAX - 1 : -1]],
        "num_incidents": len(incidents),
        "kinds": kinds(incidents),
        "named": [one._asdict() for one in named_nodes(incidents)],
        "suspected": [(_since(at_s, began_s), text) for at_s, text in stats.suspected],
        "advice": advice(
            stats, incidents, goal=scale.goal, why_refused=next(whys, ""), validation=validation
        ),
        **more,
    }


def live_part(told: RunDocument, seconds: Mapping[str, str], **more: Any) -> dict[str, Any]:
    """Return the keys that only a live page has.

    ``seconds`` has the activity of each worker in the last seconds, one letter per second.
    """
    status = told.status
    keepers = {row["node"]: row for row in status["redundancy"]["keepers"]}

    def worker(row: Mapping[str, Any]) -> dict[str, Any]:
        compute_s = row["compute_s"]
        return {
            **{name: row[name] for name in _OF_WORKER if name in row},
            "seconds": seconds.get(row["worker"], ""),
            "compute_s": None if compute_s is None else round(compute_s, 4),
        }

    def node(row: Mapping[str, Any]) -> dict[str, Any]:
        keeper = keepers.get(row["node"], {})
        return {name: row[name] for name in _OF_NODE} | {
            name: keeper.get(name, 0) for name in _OF_KEEPER
        }

    return {
        "sentence": what_it_does(status),
        "since_s": round(told.stats.phase_since_s, 3),
        "safe": _safe(status["redundancy"]),
        "live": {
            "workers": list(map(worker, status["workers"])),
            "standbys": list(map(worker, status["standbys"])),
            "nodes": list(map(node, status["nodes"])),
            "node_states": status["node_states"],
            "num_workers": sum(status["processes"].values()),
            "suspects": [
                {name: one[name] for name in _OF_SUSPECT}
                for one in suspects_shown(status["suspects"], status["busy"])
            ],
            **more,
        },
    }


def numbers_of(stats: RunStats, scale: Scale) -> dict[str, Any]:
    """Return the progress and the rate of a run, and where its time went."""
    steps_per_s, left = rate(stats), scale.goal - stats.step
    is_far = steps_per_s > 0.0 and left > 0 and not stats.outcome
    return {
        **{name: getattr(stats, name) for name in _OF_STATS},
        "goal": scale.goal,
        "steps_per_s": steps_per_s,
        "unit": scale.unit,
        "units_per_s": steps_per_s * scale.per_step,
        "eta_s": left / steps_per_s if is_far else None,
    }


def progress(stats: RunStats) -> list[Point]:
    """Return the completed steps over the time since the first record."""
    return [(_since(at_s, stats.began_s), step) for at_s, step in stats.progress]


def throughput(stats: RunStats, per_step: float) -> list[Point]:
    """Return steps, samples or tokens per second over time.

    Each point is the mean over the time since the previous point.
    """
    done: list[tuple[float, int]] = [(stats.began_s + stats.startup_s, 0), *stats.progress]
    bucket_s = max(stats.wall_s / _RATES_MAX, _MEAN_S)
    points: list[Point] = []
    since_s, sum_steps = done[0][0], 0
    for (_, before), (at_s, step) in pairwise(done):
        sum_steps += max(step - before, 0)
        if at_s - since_s >= bucket_s and at_s > since_s:
            mean = sum_steps * per_step / (at_s - since_s)
            points.append((_since(at_s, stats.began_s), round(mean, 4)))
            since_s, sum_steps = at_s, 0
    return points


def kinds(incidents: Sequence[Incident]) -> list[dict[str, Any]]:
    """Return the numbers of each kind of incident, the most frequent kind first.

    Durations are None if none is known.
    """
    rows = []
    for kind, count in Counter(incident.kind for incident in incidents).most_common():
        mine = [incident for incident in incidents if incident.kind == kind]
        durations_s = [one.recovery_s for one in mine if one.recovery_s is not None]
        rows.append(
            {
                "kind": kind,
                "count": count,
                "lost_steps": sum(incident.lost_steps for incident in mine),
                "cost_usd": sum(incident.cost_usd for incident in mine),
                "median_s": median(durations_s) if durations_s else None,
                "longest_s": max(durations_s, default=None),
            }
        )
    return rows


def _incident(incident: Incident, stats: RunStats) -> dict[str, Any]:
    before = bisect_right(stats.progress, incident.begin_s or 0.0, key=lambda point: point[0])
    instants_s = {"begin_s": incident.begin_s, "end_s": incident.end_s}
    return {
        **{name: getattr(incident, name) for name in _OF_INCIDENT},
        **{
            name: None if at_s is None else _since(at_s, stats.began_s)
            for name, at_s in instants_s.items()
        },
        "step": stats.progress[before - 1][1] if before else 0,
        "skipped": incident.skipped[:4],
        "num_skipped": len(incident.skipped),
    }


def _safe(redundancy: Mapping[str, Any]) -> list[list[str]]:
    """Return what would be left after a fault now, as rows of name, text and level."""
    step, stored = redundancy["step"], redundancy["stored_step"]
    survives, is_well = what_survives(redundancy)
    memory = [f"step {step}: {survives}", "good" if is_well else "warn"] if step else ["nothing"]
    return [
        ["in memory", *memory],
        ["in storage", f"step {stored}" if stored else "nothing yet"],
        *(["problem", text, "warn"] for text in redundancy["problems"]),
    ]


def _since(at_s: float, began_s: float) -> float:
    return round(at_s - began_s, 3)
