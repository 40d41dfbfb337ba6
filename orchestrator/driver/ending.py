"""How a run ended, in sentences: the steps done, the cost, and where the files are."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from orchestrator.driver.run import Run
from ucp_core.numerics import counted
from workers.protocol import CHECKPOINTS

#: Smaller shares of the time are not mentioned.
_SHOWN_MIN = 0.005
_ENDS = {
    "completed": "is complete",
    "stopped": "was stopped",
    "failed": "has failed",
    "no_capacity": "has ended for lack of workers",
}


def ending_lines(run: Run, summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield the sentences about a run with this ``summary.json``."""
    config, where = run.settings(), short_path(run.url)
    steps, goal, outcome = summary["steps"], config.train.steps, summary["outcome"]
    is_whole = outcome == "completed" and steps >= goal
    yield (
        f"{config.run.name} {_ENDS[outcome]} after step {steps} of {goal}, "
        f"{_duration(summary['wall_s'])} and {counted(summary['attempts'], 'attempt')}"
        + ("" if is_whole else f": {summary['reason'].strip().rstrip('.')}")
        + ("." if outcome == "completed" else "; the same command resumes from there.")
    )
    yield f"{_numbers(summary)}."
    if saves := run.saves():
        best = summary.get("best")
        also = f"; the best one is of step {best['step']}" if best else ""
        yield f"Its last checkpoint is {where}/{CHECKPOINTS}/{saves[-1]}{also}."
    report = summary.get("report")
    yield (
        f"The report is {short_path(report)}."
        if report
        else f"To draw the curve and all incidents: everstep report {quote(where)}"
    )
    if saves:
        yield f"To use the weights: everstep export {quote(where)} --to DST --format huggingface"


def short_path(path: str) -> str:
    """Return a path relative to the working directory if it is below it; others unchanged."""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path


def _numbers(summary: Mapping[str, Any]) -> str:
    parts = []
    for name, key in (("loss", "final_loss"), ("validation loss", "validation_loss")):
        if (loss := summary.get(key)) is not None:
            parts.append(f"{name} {loss:.4f}")
    parts.append(f"{counted(summary['lost_steps'], 'step')} lost")
    parts.append(f"goodput {summary['goodput']:.0%}{_others(summary)}")
    if summary["cost_usd"]:
        parts.append(f"cost ${summary['cost_usd']:.2f}")
    text = ", ".join(parts)
    return text[0].upper() + text[1:]


def _others(summary: Mapping[str, Any]) -> str:
    """Return where the rest of the time went; parts below ``_SHOWN_MIN`` are left out."""
    wall_s, found = summary["wall_s"], summary.get("parts_s", {})
    told = ((name, took_s / wall_s) for name, took_s in found.items() if wall_s and name != "steps")
    shown = ", ".join(f"{name} {share:.0%}" for name, share in told if share >= _SHOWN_MIN)
    return f" ({shown})" if shown else ""


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return counted(rest, "second")
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
