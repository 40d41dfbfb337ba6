"""One page of HTML for a run, live or over; it loads nothing from other places.

``page.html`` draws the document of ``orchestrator.report.page``. The controller serves it
unchanged, and the page requests the document; a report contains the document.
"""

import contextlib
import datetime as dt
import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any, NamedTuple

from orchestrator.config import load
from orchestrator.core import RunStats
from orchestrator.errors import ConfigError
from orchestrator.report.document import RunDocument, Scale
from orchestrator.report.page import page_document, progress
from orchestrator.report.run_directory import RunRecord, log_tail, no_run, thin
from ucp_core.storage import Store, join, open_store
from workers.protocol import CHECKPOINTS

REPORT_NAME = "report.html"
_UNKNOWN = "\N{EN DASH}"
#: The place of the document in a report.
_PLACE = '<script type="application/json" id="data">'
#: Logs of dead workers in a report: of this many incidents, and this many bytes of each.
_LOGS_MAX, _LOG_BYTES = 20, 4096
_PLACES_MAX = 4
#: How many checkpoints the report names.
_NAMES_MAX = 4
#: The numbers that readers check, and their keys in a summary.
_FACTS = {
    "steps": "steps",
    "samples in the committed history": "samples_seen",
    "final training loss": "final_loss",
    "validation loss": "validation_loss",
    "weights digest": "weights_digest",
    "attempts": "attempts",
    "lost steps": "lost_steps",
    "goodput": "goodput",
    "goodput since start-up": "goodput_since_start",
    "start-up, s": "startup_s",
    "wall time, s": "wall_s",
}
#: The curve whose last value replaces a number, for a run without a summary.
_CURVES = {"final_loss": "loss", "validation_loss": "validation"}
_ROUNDED = frozenset({"goodput", "goodput_since_start", "startup_s", "wall_s"})


class Comparison(NamedTuple):
    """How the end of the run compares with that of the undisturbed one."""

    verdict: str  #: "same", "close", "different" or "unknown"; a CSS class of the page.
    headline: str  #: The verdict for people.
    detail: str  #: The numbers behind it.


def write_report(run_dir_url: str, **given: Any) -> str:
    """Write ``report.html`` into the run directory and return its path.

    Arguments and errors are those of ``report_of``.
    """
    text = report_of(run_dir_url, **given)
    store, path = open_store(run_dir_url)
    store.write_atomic(join(path, REPORT_NAME), text.encode(), fsync=False)
    return join(run_dir_url, REPORT_NAME)


def report_of(
    run_dir_url: str,
    *,
    compare: str | None = None,
    summary: Mapping[str, Any] | None = None,
    stats: RunStats | None = None,
) -> str:
    """Return the report of a run as HTML.

    Args:
        run_dir_url: Run directory, a path or an fsspec URL. The run may still be training.
        compare: Run directory of the undisturbed run, to draw both curves and to compare the ends.
        summary: The summary of a run that has not written it yet.
        stats: Its folded journal, if the caller has it.

    Raises:
        RunNotFoundError: There is no run in one of the two directories.
    """
    run = RunRecord(run_dir_url, stats=stats, summary=summary)
    other = None if compare is None else RunRecord(compare)
    for one in filter(None, (run, other)):
        if not one.is_run():
            raise no_run(one.url)
    store, path = open_store(run_dir_url)
    more = {"logs": _logs(store, path, run), "safe": _safe(store, path)}
    document = report_document(run, other, **more)
    # Texts of users may contain any markup, and "<" occurs nowhere else in JSON.
    inside = json.dumps(document, allow_nan=False).replace("<", "\\u003c")
    return live_page().replace(_PLACE, _PLACE + inside)


def live_page() -> str:
    """Return the page without a run; it requests the document from its server."""
    return files("orchestrator.report").joinpath("page.html").read_text(encoding="utf-8")


def report_document(run: RunRecord, other: RunRecord | None = None, **more: Any) -> dict[str, Any]:
    """Return the document of the page for ``run``, compared with ``other`` if given."""
    stats = run.stats
    runs = (run,) if other is None else (run, other)
    document = page_document(
        RunDocument(
            stats=stats,
            scale=Scale(goal=_goal(run), samples=run.curves.last.get("samples") or 0, tokens=0),
            cost={
                "usd": stats.cost_usd or None,
                "usd_per_hour": stats.usd_per_hour or None,
                "usd_per_million_tokens": run.summary.get("usd_per_million_tokens"),
            },
        ),
        run.curves,
        incidents=run.all_incidents,
        name=run.name,
        url=run.url,
        begun=f"{dt.datetime.fromtimestamp(stats.began_at, dt.UTC):%Y-%m-%d %H:%M} UTC"
        if stats.began_at
        else "",
        facts=[[label, *(_fact(each, name) for each in runs)] for label, name in _FACTS.items()],
        config=run.config_text,
        **more,
    )
    if other is not None:
        document["comparison"] = compare_ends(run, other)._asdict()
        document["other"] = {
            "name": other.name,
            "url": other.url,
            "loss": thin(other.curves.loss),
            "progress": progress(other.stats),
            "validation_loss": other.summary.get("validation_loss"),
        }
    return document


def compare_ends(run: RunRecord, other: RunRecord) -> Comparison:
    """Return whether both runs ended with equal weights, or how far apart they ended."""
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


def _number(document: Mapping[str, Any], *names: str) -> float | None:
    known = (document[name] for name in names if document.get(name) is not None)
    return next(map(float, known), None)


def _goal(run: RunRecord) -> int:
    """Return the last step; 0 if another version with other keys wrote the settings."""
    with contextlib.suppress(ConfigError):
        return load(run.config_text).train.steps
    return 0


def _logs(store: Store, path: str, run: RunRecord) -> dict[str, str]:
    """Return the last lines of rank 0, and of dead workers by ``attempt/rank``."""
    wanted = [
        (incident.attempt, rank)
        for incident in run.all_incidents[-_LOGS_MAX:]
        if not incident.is_planned
        for rank, _, _ in incident.places[:_PLACES_MAX]
    ]
    found = {
        f"{attempt}/{rank}": log_tail(
            store, path, attempt=attempt, rank=rank, size_bytes=_LOG_BYTES
        )
        for attempt, rank in wanted
    }
    last = log_tail(store, path, attempt=0, rank=0)
    return {**found, **({"last": last} if last else {})}


def _safe(store: Store, path: str) -> list[list[str]]:
    names = sorted(store.list(join(path, CHECKPOINTS)))
    return [["in storage", ", ".join(names[-_NAMES_MAX:])]] if names else []


def _fact(run: RunRecord, name: str) -> str:
    """Return a number of a run's summary for people."""
    found = run.summary.get(name)
    if found is None and name in _CURVES:
        # A stopped run has no result, but it has lines of its last steps.
        points = getattr(run.curves, _CURVES[name])
        found = points[-1][1] if points else None
    if isinstance(found, float):
        return f"{found:.6g}" if name in _ROUNDED else f"{found:.9f}"
    return _UNKNOWN if found is None else f"{found}"
