"""Run directory to one HTML page that works offline.

The page answers, in this order: did the curve stay the same, what did it cost, what happened.
``orchestrator.run_directory`` reads, ``orchestrator.report.charts`` draws, this module selects.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from markupsafe import Markup

from orchestrator.core import PHASES, Incident
from orchestrator.report.charts import TEMPLATES, Band, Point, Series, chart
from orchestrator.run_directory import RunRecord, read_run
from ucp_core.numerics import format_bytes
from ucp_core.storage import join, open_store

REPORT_NAME = "report.html"
_UNKNOWN = "\N{EN DASH}"

#: Colour of each phase of a run (``core.stats``) and of a recovery, by CSS class.
_CSS = {
    "training": "p0",
    "recovering": "p1",
    "yielding": "p7",
    "yield": "p7",
    "forming": "p4",
    **{name: f"p{index}" for index, (name, _) in enumerate(PHASES, start=1)},
}
#: The numbers that a sceptic checks, and where a summary has them.
_FACTS = {
    "steps": "steps",
    "samples in the committed history": "samples_seen",
    "final training loss": "final_loss",
    "validation loss": "validation_loss",
    "weights digest": "weights_digest",
    "attempts": "attempts",
    "lost steps": "lost_steps",
    "goodput": "goodput",
    "wall time, s": "wall_s",
}


class Comparison(NamedTuple):
    """Whether the run ended like the undisturbed one.

    Attributes:
        verdict: "same", "close", "different" or "unknown"; a CSS class of the page.
        headline: The same for people.
        detail: The numbers behind it.
    """

    verdict: str
    headline: str
    detail: str


class Tile(NamedTuple):
    """One number at the head of the page, with its meaning."""

    value: str
    name: str
    note: str = ""


def write_report(run_dir_url: str, *, compare: str | None = None) -> str:
    """Write ``report.html`` into the run directory and return where it is.

    Args:
        run_dir_url: Run directory, a path or an fsspec URL. The run may be under way.
        compare: Run directory of the undisturbed run, to draw both curves and to compare ends.

    Raises:
        RunNotFoundError: There is no run at one of the two.
    """
    run = read_run(run_dir_url)
    other = read_run(compare) if compare is not None else None
    store, path = open_store(run_dir_url)
    store.write_atomic(join(path, REPORT_NAME), render(run, other).encode(), fsync=False)
    return join(run_dir_url, REPORT_NAME)


def render(run: RunRecord, other: RunRecord | None = None) -> str:
    """Return the page for ``run``, compared with ``other`` where that is given."""
    phases_s = run.summary.get("phases_s") or {}
    spent = [(name, float(value)) for name, value in phases_s.items() if float(value) > 0.0]
    seen = {name for incident in run.incidents for name in incident.phases_s}
    order = [name for name, _ in PHASES]
    return TEMPLATES.get_template("report.html.j2").render(
        run=run,
        other=other,
        comparison=compare_ends(run, other) if other is not None else None,
        tiles=_tiles(run, other),
        loss_chart=_loss_chart(run, other),
        progress_chart=_progress_chart(run, other),
        incidents=run.incidents,
        kinds=_kinds(run.incidents),
        suspected=run.summary.get("suspected") or (),
        start_s=_start_s(run),
        knows_prices=bool(run.summary.get("cost_usd")),
        knows_faults=any(i.detect_s is not None for i in run.incidents),
        longest_s=max((i.recovery_s or 0.0 for i in run.incidents), default=0.0),
        phases=[name for name in (*order[:1], "yield", *order[1:]) if name in seen],
        css=lambda phase: _CSS.get(phase, "p9"),
        seconds=seconds,
        human=format_bytes,
        spent=sorted(spent, key=lambda each: -each[1]),
        facts=[
            (label, _fact(run, name), _fact(other, name) if other is not None else "")
            for label, name in _FACTS.items()
        ],
    )


def compare_ends(run: RunRecord, other: RunRecord) -> Comparison:
    """Return whether both runs ended with equal weights, else how near they came."""
    both = (run, other)
    digests = [str(one.summary.get("weights_digest") or "") for one in both]
    waiting = [one.name for one, digest in zip(both, digests, strict=True) if not digest]
    if waiting:
        detail = f"{' and '.join(waiting)} has no weights digest: the run is not complete."
        return Comparison("unknown", "Not decided yet", detail)
    steps = [one.summary.get("steps") for one in both]
    if steps[0] != steps[1]:
        detail = f"{run.name} ended at step {steps[0]}, {other.name} at step {steps[1]}."
        return Comparison("different", "The runs cannot be compared", detail)
    if digests[0] == digests[1]:
        detail = f"After {steps[0]} steps both runs have the digest {digests[0][:16]}."
        return Comparison("same", "Same weights, bit for bit", detail)
    losses = [_number(one.summary, "validation_loss", "final_loss") for one in both]
    if losses[0] is None or losses[1] is None:
        detail = "The weights differ and a final loss is missing."
        return Comparison("different", "The weights differ", detail)
    gap = abs(losses[0] - losses[1])
    detail = f"The losses at the end are {losses[0]:.6f} and {losses[1]:.6f}, {gap:.2g} apart."
    return Comparison("close", "The weights differ", detail)


def seconds(value: float | None) -> str:
    """Return a duration for people; a dash if it is not known."""
    if value is None or not math.isfinite(value):
        return _UNKNOWN
    if value < 1.0:
        return f"{value * 1000:.0f} ms"
    if value < 120.0:  # noqa: PLR2004 - two minutes, where tenths stop to matter
        return f"{value:.1f} s"
    return f"{int(value // 60)} min {value % 60:.0f} s"


def _number(document: Mapping[str, Any], *names: str) -> float | None:
    known = (document[name] for name in names if document.get(name) is not None)
    return next(map(float, known), None)


def _tiles(run: RunRecord, other: RunRecord | None) -> list[Tile]:
    summary, compared = run.summary, other.summary if other is not None else {}
    recoveries = [i.recovery_s for i in run.incidents if i.recovery_s is not None]
    lost = int(summary.get("lost_steps", sum(i.lost_steps for i in run.incidents)))
    goodput = _number(summary, "goodput")
    num_attempts = int(summary.get("attempts", len({record.attempt for record in run.steps})))
    wall_s, loss, usd = (
        _number(summary, name) for name in ("wall_s", "validation_loss", "cost_usd")
    )
    than_s, than = (_number(compared, name) for name in ("wall_s", "validation_loss"))
    tiles = [
        Tile(
            f"{run.steps[-1].step if run.steps else 0}",
            "steps",
            f"in {num_attempts} attempt{'' if num_attempts == 1 else 's'}",
        ),
        Tile(f"{len(run.incidents)}", "incidents", f"{lost} step{'' if lost == 1 else 's'} lost"),
        Tile(
            seconds(max(recoveries, default=None)),
            "longest recovery",
            "from the fault to the first new step",
        ),
        Tile(
            _UNKNOWN if goodput is None else f"{100 * goodput:.1f} %",
            "goodput",
            "time in steps that counted, of all time",
        ),
        Tile(
            seconds(wall_s),
            "wall time",
            "" if than_s is None else f"undisturbed: {seconds(than_s)}",
        ),
    ]
    if usd:
        tokens = sum(record.tokens for record in run.steps)
        per_token = f"{1e6 * usd / tokens:.4g} per million tokens" if tokens else ""
        waste = sum(incident.cost_usd for incident in run.incidents)
        tiles.append(Tile(f"{usd:.2f} $", "cost", per_token))
        tiles.append(Tile(f"{waste:.2f} $", "cost of incidents", "waiting, and steps redone"))
    if loss is not None:
        note = "on held-out text" if than is None else f"undisturbed: {than:.6f}"
        tiles.append(Tile(f"{loss:.6f}", "validation loss", note))
    return tiles


def _kinds(incidents: Sequence[Incident]) -> list[dict[str, Any]]:
    """Return all incidents of each kind in numbers, the most frequent first.

    Durations are None if none is known.
    """
    rows = []
    for kind, count in Counter(incident.kind for incident in incidents).most_common():
        mine = [incident for incident in incidents if incident.kind == kind]
        durations_s = [i.recovery_s for i in mine if i.recovery_s is not None]
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


def _completed(run: RunRecord) -> list[Point]:
    """Return when each step was completed, and the step."""
    return [
        (float(record["at_s"]), float(record["step"]))
        for record in run.journal
        if record.get("kind") == "StepCompleted" and "at_s" in record and "step" in record
    ]


def _start_s(run: RunRecord) -> float:
    return float(run.journal[0].get("at_s", 0.0)) if run.journal else 0.0


def _both(run: RunRecord, other: RunRecord | None) -> list[tuple[RunRecord, str]]:
    """Return the runs to draw, each with its CSS class; the last one lies above."""
    return [*([(other, "under")] if other is not None else []), (run, "over")]


def _loss_chart(run: RunRecord, other: RunRecord | None) -> Markup:
    completed = _completed(run)
    bands = []
    for incident in run.incidents:
        if incident.begin_s is not None:
            before = (step for at_s, step in completed if at_s <= incident.begin_s)
            step = max(before, default=0.0)
            title = f"incident {incident.number}: {incident.kind}"
            bands.append(Band(begin=step, end=step, label=f"{incident.number}", title=title))
    series = [
        Series(label=one.name, css=css, points=[(float(r.step), r.loss) for r in one.steps])
        for one, css in _both(run, other)
    ]
    return chart(series, x_label="step", y_label="training loss", bands=bands)


def _progress_chart(run: RunRecord, other: RunRecord | None) -> Markup:
    start_s = _start_s(run)
    bands = [
        Band(
            begin=incident.begin_s - start_s,
            end=(incident.end_s or incident.begin_s) - start_s,
            label=f"{incident.number}",
            title=f"incident {incident.number}: {incident.kind}, {seconds(incident.recovery_s)}",
        )
        for incident in run.incidents
        if incident.begin_s is not None
    ]
    series = [
        Series(label=one.name, css=css, points=_progress(one), staircase=True)
        for one, css in _both(run, other)
    ]
    labels = {"x_label": "seconds since start", "y_label": "step"}
    return chart(series, **labels, bands=bands, y_from_zero=True)


def _progress(run: RunRecord) -> list[Point]:
    start_s = _start_s(run)
    taken = [(at_s - start_s, step) for at_s, step in _completed(run)]
    # From the start on, so that the wait for the first step shows.
    return [(0.0, 0.0), *taken] if taken else []


def _fact(run: RunRecord, name: str) -> str:
    """Return a number of a run's summary for people."""
    found = run.summary.get(name)
    if name == "samples_seen" and found is None and run.steps:
        found = sum(step.samples for step in run.steps)
    if isinstance(found, float):
        return f"{found:.6g}" if name in {"goodput", "wall_s"} else f"{found:.9f}"
    return _UNKNOWN if found is None else f"{found}"
