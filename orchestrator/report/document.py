"""The content of a run's page, as one JSON document. Pure.

The live page and the report are one page: the controller makes this document of what it holds, and
``write_report`` of the run directory. Instants count from the run's first record.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from orchestrator.core import Incident, RunStats
from orchestrator.report.advice import advice, named_nodes
from orchestrator.run_directory import Point, thin

#: Incidents that have a row; the table of kinds counts all.
INCIDENTS_MAX = 100
#: The rate is that of the last steps within this.
_RATE_S = 60.0
_RATES_MAX = 120
#: Steps are reported once a second: a mean of less time than this counts one too many or too few.
_MEAN_S = 4.0


class Scale(NamedTuple):
    """The size of a run's steps."""

    goal: int  #: The last step; 0 if it is not known.
    samples: float  #: Samples of one step; 0 if they are not known.
    tokens: float  #: Tokens likewise.

    @property
    def unit(self) -> str:
        """Return in what throughput is told."""
        return "tokens" if self.tokens else "samples" if self.samples else "steps"

    @property
    def per_step(self) -> float:
        """Return how many of these a step has."""
        return self.tokens or self.samples or 1


def run_document(
    *,
    stats: RunStats,
    incidents: Sequence[Incident],
    scale: Scale,
    cost: Mapping[str, float | None],
    loss: Sequence[Point],
    validation: Sequence[Point],
    why_refused: str = "",
    **more: Any,
) -> dict[str, Any]:
    """Return the document of a run.

    Args:
        stats: Its folded journal.
        incidents: Oldest first.
        scale: The size of its steps.
        cost: ``usd``, ``usd_per_hour`` and ``usd_per_million_tokens``; null where not known.
        loss: Training loss by step.
        validation: Validation loss by step.
        why_refused: Why the last request for capacity was refused.
        more: Further keys; ``name`` and ``url`` are needed.
    """
    began_s = stats.began_s
    rows = [_incident(one, stats, before) for one, before in _newest(incidents, stats)]
    return {
        **numbers_of(stats, scale),
        "cost": {**cost, "incidents_usd": sum(incident.cost_usd for incident in incidents)},
        "loss": thin(loss),
        "validation": thin(validation),
        "progress": progress(stats),
        "sizes": [(_since(at_s, began_s), num) for at_s, num in stats.sizes],
        "throughput": throughput(stats, scale.per_step),
        "incidents": rows,
        "num_incidents": len(incidents),
        "kinds": kinds(incidents),
        "named": [one._asdict() for one in named_nodes(incidents)],
        "suspected": [(_since(at_s, began_s), text) for at_s, text in stats.suspected],
        "advice": advice(
            stats, incidents, goal=scale.goal, why_refused=why_refused, validation=validation
        ),
        **more,
    }


def numbers_of(stats: RunStats, scale: Scale) -> dict[str, Any]:
    """Return how far a run is, how fast, and where its time went."""
    steps_per_s, left = rate(stats), scale.goal - stats.step
    is_far = steps_per_s > 0.0 and left > 0 and not stats.outcome
    told = (
        *("phase", "outcome", "reason", "step", "attempt", "num_workers", "layout", "lost_steps"),
        *("wall_s", "startup_s", "goodput", "goodput_since_start"),
    )
    return {
        **{name: getattr(stats, name) for name in told},
        "goal": scale.goal,
        "steps_per_s": steps_per_s,
        "unit": scale.unit,
        "units_per_s": steps_per_s * scale.per_step,
        "eta_s": left / steps_per_s if is_far else None,
        "parts_s": stats.parts_s,
    }


def progress(stats: RunStats) -> list[Point]:
    """Return completed steps over the time since the first record."""
    return [(_since(at_s, stats.began_s), step) for at_s, step in stats.progress]


def rate(stats: RunStats) -> float:
    """Return steps per second over the last minute, or over the whole if the run is over.

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


def throughput(stats: RunStats, per_step: float) -> list[Point]:
    """Return what was done in a second over time: steps, or samples or tokens of them.

    A point is the mean of the time since the point before.
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
    """Return all incidents of each kind in numbers, the most frequent first.

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


def _newest(incidents: Sequence[Incident], stats: RunStats) -> list[tuple[Incident, int]]:
    """Return the newest incidents, newest first, each with the step before it."""
    instants = [at_s for at_s, _ in stats.progress]
    found = []
    for incident in incidents[-INCIDENTS_MAX:]:
        index = bisect_right(instants, incident.begin_s or 0.0)
        found.append((incident, stats.progress[index - 1][1] if index else 0))
    return found[::-1]


def _incident(incident: Incident, stats: RunStats, step: int) -> dict[str, Any]:
    def since(at_s: float | None) -> float | None:
        return None if at_s is None else _since(at_s, stats.began_s)

    return {
        "number": incident.number,
        "kind": incident.kind,
        "who": incident.who,
        "is_planned": incident.is_planned,
        "is_start": incident.is_start,
        "evidence": incident.evidence,
        "attempt": incident.attempt,
        "step": step,
        "begin_s": since(incident.begin_s),
        "end_s": since(incident.end_s),
        "detect_s": incident.detect_s,
        "recovery_s": incident.recovery_s,
        "phases_s": incident.phases_s,
        "lost_steps": incident.lost_steps,
        "cost_usd": incident.cost_usd,
        "layout_before": incident.layout_before,
        "layout_after": incident.layout_after,
        "other_layouts": incident.other_layouts,
        "sources": incident.sources,
        "skipped": incident.skipped[:4],
        "num_skipped": len(incident.skipped),
        "rule": incident.rule,
        "places": incident.places,
        "folder": incident.folder,
    }


def _since(at_s: float, began_s: float) -> float:
    return round(at_s - began_s, 3)
