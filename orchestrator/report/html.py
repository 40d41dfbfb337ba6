"""Run directory to one HTML page that works offline.

The page answers, in this order: did the curve stay the same, what did it cost, what happened.
``orchestrator.run_directory`` reads, ``orchestrator.report.charts`` draws, this module selects.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import Any

import jinja2
from markupsafe import Markup

from orchestrator.core import PHASES, Incident
from orchestrator.report.charts import Band, Series, chart
from orchestrator.run_directory import RunRecord, StepRecord, read_run
from ucp_core.numerics import format_bytes
from ucp_core.storage import join, open_store

REPORT_NAME = "report.html"

_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("orchestrator.report", "templates"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters["human"] = format_bytes


class Verdict(StrEnum):
    """How two runs that should be one curve ended."""

    SAME = "same"
    CLOSE = "close"
    DIFFERENT = "different"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Whether the run ended like the undisturbed one."""

    verdict: Verdict
    headline: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KindRow:
    """All incidents of one kind in numbers; durations are None if none is known."""

    kind: str
    count: int
    lost_steps: int
    cost_usd: float
    median_s: float | None
    longest_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
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
    longest_s = max((i.recovery_s or 0.0 for i in run.incidents), default=0.0)
    return _TEMPLATES.get_template("report.html.j2").render(
        run=run,
        other=other,
        comparison=compare_ends(run, other) if other is not None else None,
        tiles=_tiles(run, other),
        loss_chart=Markup(_loss_chart(run, other)),  # noqa: S704 - escapes what it draws
        progress_chart=Markup(_progress_chart(run, other)),  # noqa: S704 - as above
        incidents=run.incidents,
        kinds=_kinds(run.incidents),
        start_s=_start_s(run),
        knows_prices=bool(run.summary.get("cost_usd")),
        knows_faults=any(i.detect_s is not None for i in run.incidents),
        longest_s=longest_s,
        phases=[(name, _css(name)) for name in _phases_seen(run.incidents)],
        css=_css,
        seconds=seconds,
        spent=_spent(run),
        facts=_facts(run, other),
    )


def compare_ends(run: RunRecord, other: RunRecord) -> Comparison:
    """Return whether both runs ended with equal weights, else how near they came."""
    digests = [str(r.summary.get("weights_digest") or "") for r in (run, other)]
    if not all(digests):
        waiting = [r.name for r, digest in zip((run, other), digests, strict=True) if not digest]
        return Comparison(
            verdict=Verdict.UNKNOWN,
            headline="Not decided yet",
            detail=f"{' and '.join(waiting)} has no weights digest: the run is not complete.",
        )
    steps = [r.summary.get("steps") for r in (run, other)]
    if steps[0] != steps[1]:
        return Comparison(
            verdict=Verdict.DIFFERENT,
            headline="The runs cannot be compared",
            detail=f"{run.name} ended at step {steps[0]}, {other.name} at step {steps[1]}.",
        )
    if digests[0] == digests[1]:
        return Comparison(
            verdict=Verdict.SAME,
            headline="Same weights, bit for bit",
            detail=f"After {steps[0]} steps both runs have the digest {digests[0][:16]}.",
        )
    return _compare_losses(run, other)


def seconds(value: float | None) -> str:
    """Return a duration for people; a dash if it is not known."""
    if value is None or not math.isfinite(value):
        return "\N{EN DASH}"
    if value < 1.0:
        return f"{value * 1000:.0f} ms"
    if value < 120.0:  # noqa: PLR2004 - two minutes, where tenths stop to matter
        return f"{value:.1f} s"
    return f"{int(value // 60)} min {value % 60:.0f} s"


def _compare_losses(run: RunRecord, other: RunRecord) -> Comparison:
    losses = [_number(r.summary, "validation_loss", "final_loss") for r in (run, other)]
    if losses[0] is None or losses[1] is None:
        detail = "The weights differ and a final loss is missing."
        return Comparison(verdict=Verdict.DIFFERENT, headline="The weights differ", detail=detail)
    gap = abs(losses[0] - losses[1])
    return Comparison(
        verdict=Verdict.CLOSE,
        headline="The weights differ",
        detail=f"The losses at the end are {losses[0]:.6f} and {losses[1]:.6f}, {gap:.2g} apart.",
    )


def _number(document: Mapping[str, Any], *names: str) -> float | None:
    for name in names:
        value = document.get(name)
        if value is not None:
            return float(value)
    return None


def _tiles(run: RunRecord, other: RunRecord | None) -> list[Tile]:
    summary = run.summary
    recoveries = [i.recovery_s for i in run.incidents if i.recovery_s is not None]
    lost = int(summary.get("lost_steps", sum(i.lost_steps for i in run.incidents)))
    goodput = _number(summary, "goodput")
    num_attempts = int(summary.get("attempts", _attempts(run.steps)))
    tiles = [
        Tile(
            value=f"{run.steps[-1].step if run.steps else 0}",
            name="steps",
            note=f"in {num_attempts} attempt{'' if num_attempts == 1 else 's'}",
        ),
        Tile(
            value=f"{len(run.incidents)}",
            name="incidents",
            note=f"{lost} step{'' if lost == 1 else 's'} lost",
        ),
        Tile(
            value=seconds(max(recoveries, default=None)),
            name="longest recovery",
            note="from the fault to the first new step",
        ),
        Tile(
            value="\N{EN DASH}" if goodput is None else f"{100 * goodput:.1f} %",
            name="goodput",
            note="time in steps that counted, of all time",
        ),
        Tile(value=seconds(_number(summary, "wall_s")), name="wall time", note=_wall_note(other)),
    ]
    tiles += _costs(run)
    loss = _number(summary, "validation_loss")
    if loss is not None:
        than = _number(other.summary, "validation_loss") if other is not None else None
        note = "on held-out text" if than is None else f"undisturbed: {than:.6f}"
        tiles.append(Tile(value=f"{loss:.6f}", name="validation loss", note=note))
    return tiles


def _costs(run: RunRecord) -> list[Tile]:
    """Return what the run cost, and its incidents; nothing where no price is known."""
    usd = _number(run.summary, "cost_usd")
    if not usd:
        return []
    tokens = sum(record.tokens for record in run.steps)
    per_token = f"{1e6 * usd / tokens:.4g} per million tokens" if tokens else ""
    waste = sum(incident.cost_usd for incident in run.incidents)
    return [
        Tile(value=f"{usd:.2f} $", name="cost", note=per_token),
        Tile(value=f"{waste:.2f} $", name="cost of incidents", note="waiting, and steps redone"),
    ]


def _wall_note(other: RunRecord | None) -> str:
    wall_s = _number(other.summary, "wall_s") if other is not None else None
    return "" if wall_s is None else f"undisturbed: {seconds(wall_s)}"


def _attempts(steps: Sequence[StepRecord]) -> int:
    return len({record.attempt for record in steps})


def _loss_chart(run: RunRecord, other: RunRecord | None) -> str:
    series = []
    if other is not None:
        series.append(Series(label=other.name, css="under", points=_losses(other)))
    series.append(Series(label=run.name, css="over", points=_losses(run)))
    step_of = _step_at(run)
    bands = [
        Band(
            begin=step_of(incident.begin_s),
            end=step_of(incident.begin_s),
            label=f"{incident.number}",
            title=f"incident {incident.number}: {incident.kind}",
        )
        for incident in run.incidents
        if incident.begin_s is not None
    ]
    return chart(series, x_label="step", y_label="training loss", bands=bands)


def _kinds(incidents: Sequence[Incident]) -> list[KindRow]:
    """Return a row for each kind of incident, the most frequent first."""
    rows = []
    for kind, count in Counter(incident.kind for incident in incidents).most_common():
        mine = [incident for incident in incidents if incident.kind == kind]
        durations_s = [i.recovery_s for i in mine if i.recovery_s is not None]
        rows.append(
            KindRow(
                kind=kind,
                count=count,
                lost_steps=sum(incident.lost_steps for incident in mine),
                cost_usd=sum(incident.cost_usd for incident in mine),
                median_s=median(durations_s) if durations_s else None,
                longest_s=max(durations_s, default=None),
            )
        )
    return rows


def _losses(run: RunRecord) -> tuple[tuple[float, float], ...]:
    return tuple((float(record.step), record.loss) for record in run.steps)


def _completed(run: RunRecord) -> list[tuple[float, int]]:
    return [
        (float(record["at_s"]), int(record["step"]))
        for record in run.journal
        if record.get("kind") == "StepCompleted" and "at_s" in record and "step" in record
    ]


def _step_at(run: RunRecord) -> Callable[[float | None], float]:
    """Return a function from an instant to the last step that was complete then."""
    completed = _completed(run)

    def step_at(instant_s: float | None) -> float:
        assert instant_s is not None, "an incident without an instant has no step"
        return float(max((step for at_s, step in completed if at_s <= instant_s), default=0))

    return step_at


def _start_s(run: RunRecord) -> float:
    return float(run.journal[0].get("at_s", 0.0)) if run.journal else 0.0


def _progress_chart(run: RunRecord, other: RunRecord | None) -> str:
    series = []
    if other is not None:
        series.append(
            Series(label=other.name, css="under", points=_progress(other), staircase=True)
        )
    series.append(Series(label=run.name, css="over", points=_progress(run), staircase=True))
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
    return chart(
        series, x_label="seconds since start", y_label="step", bands=bands, y_from_zero=True
    )


def _progress(run: RunRecord) -> tuple[tuple[float, float], ...]:
    start_s = _start_s(run)
    taken = tuple((at_s - start_s, float(step)) for at_s, step in _completed(run))
    # From the start on, so that the wait for the first step shows.
    return ((0.0, 0.0), *taken) if taken else ()


def _spent(run: RunRecord) -> list[tuple[str, float, str]]:
    """Return (phase, seconds, CSS class) for all of the run's time, longest first."""
    phases = run.summary.get("phases_s") or {}
    ordered = sorted(phases.items(), key=lambda item: -float(item[1]))
    return [(name, float(value), _css(name)) for name, value in ordered if float(value) > 0.0]


#: Colour of each phase of a run (``core.stats``) and of a recovery, by CSS class.
_CSS = {
    "training": "p0",
    "recovering": "p1",
    "yielding": "p7",
    "yield": "p7",
    "forming": "p4",
    **{name: f"p{index}" for index, (name, _) in enumerate(PHASES, start=1)},
}


def _phases_seen(incidents: Sequence[Incident]) -> list[str]:
    """Return the phases of the bars, in order."""
    seen = {name for incident in incidents for name in incident.phases_s}
    order = [name for name, _ in PHASES]
    return [name for name in (*order[:1], "yield", *order[1:]) if name in seen]


def _css(phase: str) -> str:
    return _CSS.get(phase, "p9")


def _facts(run: RunRecord, other: RunRecord | None) -> list[tuple[str, str, str]]:
    """Return (name, this run's value, the other's) for each number that a sceptic checks."""
    names = (
        ("steps", "steps"),
        ("samples in the committed history", "samples_seen"),
        ("final training loss", "final_loss"),
        ("validation loss", "validation_loss"),
        ("weights digest", "weights_digest"),
        ("attempts", "attempts"),
        ("lost steps", "lost_steps"),
        ("goodput", "goodput"),
        ("wall time, s", "wall_s"),
    )

    def value(record: RunRecord | None, name: str) -> str:
        found = record.summary.get(name) if record is not None else None
        if name == "samples_seen" and found is None and record is not None and record.steps:
            found = sum(step.samples for step in record.steps)
        if isinstance(found, float):
            return f"{found:.6g}" if name in {"goodput", "wall_s"} else f"{found:.9f}"
        return "\N{EN DASH}" if found is None else f"{found}"

    return [(label, value(run, name), value(other, name)) for label, name in names]
