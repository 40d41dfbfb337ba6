"""Makes the table of raw lines. Pure: the same lines give the same table."""

import io
import itertools
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tests.benchmarks.common import percentile
from tests.benchmarks.peers.events import Event
from tests.benchmarks.peers.progress import Done, first_after, whole_steps

#: As in ``trainer``, which needs torch.
GLOBAL_BATCH, PROBE_EVERY = 16, 50
#: The first steps of a job warm up.
WARM_UP: Final = 10
_QUIET: Final = frozenset(
    {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    | {tokenize.ENCODING, tokenize.ENDMARKER}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The costs of one fault."""

    #: From the fault to the end of the first whole step behind it; None if there was none until
    #: somebody helped, or the job ended.
    seconds: float | None
    lost_steps: int  #: Steps that were done before it and again behind it.
    workers: int  #: That did the first step behind it.


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The results in the lines of one job."""

    arm: str
    version: str
    fault: str
    costs: tuple[Cost, ...]  #: Costs of each fault.
    samples: dict[int, Counter[int]]  #: That are in the weights, by step.
    #: How long steps took, from the end of one to the end of the next, after the warm-up.
    steps_s: tuple[float, ...]
    begin_s: float | None  #: From the launch to the first step.
    weights: dict[int, dict[str, Any]]  #: On record by step, of the group that did it last.
    ended: bool  #: Whether it came to its last step and exited with 0 without help.


def seen(lines: Iterable[Event]) -> Seen:
    """Return what the lines of one job say, in whatever order they come."""
    lines = sorted(lines, key=lambda line: float(line["time"]))
    told = next(line for line in lines if line["event"] == "run")
    done = whole_steps(lines)
    faults = [line for line in lines if line["event"] == "fault"]
    over = [line for line in lines if line["event"] == "over"]
    ends = [line for line in lines if line["event"] == "end"]
    helped = [line["time"] for line in lines if line["event"] == "helped"]
    launch = [line["time"] for line in lines if line["event"] == "launch"]
    harmed = [line["time"] for line in lines if line["event"] == "harmed"]
    until = [line["at_s"] for line in faults[1:]] + [float("inf")]
    return Seen(
        arm=told["arm"],
        version=told["version"],
        fault=told["fault"],
        costs=tuple(
            _cost(
                lines,
                done,
                fault["at_s"],
                harmed_s=next((x for x in harmed if x >= fault["at_s"]), fault["at_s"]),
                until_s=min([end, *(x for x in helped if x > fault["at_s"])]),
            )
            for fault, end in zip(faults, until, strict=False)
        ),
        samples=_samples(lines),
        steps_s=_steps_s(done),
        begin_s=done[0].last_s - launch[0] if done and launch else None,
        weights={x["step"]: x["weights"] for x in lines if x["event"] == "weights"},
        ended=bool(over and over[-1]["exit_code"] == 0 and ends and not helped),
    )


def _cost(
    lines: Sequence[Event], done: Sequence[Done], fault_s: float, *, harmed_s: float, until_s: float
) -> Cost:
    before = max(
        (x["step"] for x in lines if x["event"] == "committed" and x["time"] <= harmed_s), default=0
    )
    after = first_after((one for one in done if one.last_s <= until_s), harmed_s)
    if after is None:
        return Cost(seconds=None, lost_steps=0, workers=0)
    return Cost(
        seconds=after.last_s - fault_s,
        lost_steps=max(0, before - after.step + 1),
        workers=after.world,
    )


def _samples(lines: Sequence[Event]) -> dict[int, Counter[int]]:
    """Count the samples of the group that did each step last: what others did is not in it."""
    last = {x["step"]: x["group"] for x in lines if x["event"] == "committed"}
    counted: dict[int, Counter[int]] = {step: Counter() for step in last}
    for line in lines:
        if line["event"] == "samples" and last.get(line["step"]) == line["group"]:
            counted[line["step"]].update(line["samples"])
    return counted


def _steps_s(done: Sequence[Done]) -> tuple[float, ...]:
    pairs = itertools.pairwise(done[WARM_UP:])
    return tuple(
        b.last_s - a.last_s
        for a, b in pairs
        if (a.group, a.step + 1) == (b.group, b.step) and a.step % PROBE_EVERY
    )


def count_lines(script: str) -> int:
    """Return how many lines of a script have code: no comments, docstrings and blank lines."""
    tokens = tokenize.generate_tokens(io.StringIO(script).readline)
    lines: set[int] = set()
    before = tokenize.NEWLINE
    for token in tokens:
        is_docstring = token.type == tokenize.STRING and before in _QUIET
        if token.type not in _QUIET and not is_docstring:
            lines.update(range(token.start[0], token.end[0] + 1))
        if token.type not in {tokenize.NL, tokenize.COMMENT}:
            before = token.type
    return len(lines)


def fault_rows(jobs: Sequence[Seen]) -> list[dict[str, Any]]:
    """Return a row for each arm and fault; "?" where an undisturbed job to compare with lacks."""
    cells: dict[tuple[str, str], list[Seen]] = defaultdict(list)
    for job in jobs:
        if job.fault != "none":
            cells[job.arm, job.fault].append(job)
    plain = {job.arm: job for job in jobs if job.fault == "none" and job.ended}
    rows = []
    for (arm, fault), cell in sorted(cells.items()):
        costs = [cost for job in cell for cost in job.costs]
        took_s = [cost.seconds for cost in costs if cost.seconds is not None]
        beside = [_beside(job, plain.get(job.arm)) for job in cell]
        rows.append(
            {
                "arm": arm,
                "version": "/".join(sorted({job.version for job in cell})),
                "fault": fault,
                "n": len(costs),
                "p50_s": round(percentile(took_s, 0.5), 2) if took_s else None,
                "p90_s": round(percentile(took_s, 0.9), 2) if took_s else None,
                "max_s": round(max(took_s), 2) if took_s else None,
                "not_survived": len(costs) - len(took_s),
                "steps_lost": sum(cost.lost_steps for cost in costs),
                "steps_lost_max": max((cost.lost_steps for cost in costs), default=0),
                "samples_lost": _sum(one["lost"] for one in beside),
                "samples_doubled": _sum(one["doubled"] for one in beside),
                "weights_off": _worst(one["weights_off"] for one in beside),
                "jobs": len(cell),
                "ended": sum(job.ended for job in cell),
            }
        )
    return rows


def _beside(job: Seen, undisturbed: Seen | None) -> dict[str, Any]:
    """Compare a job with an undisturbed one of the same arm, up to the last step of both.

    Behind that, a step has lost what it lacks of the global batch, and doubled what came before.
    """
    if undisturbed is None:
        return {"lost": "?", "doubled": "?", "weights_off": "?"}
    lost, doubled, earlier = 0, 0, Counter[int]()
    for step in range(1, max(job.samples, default=0) + 1):
        got = job.samples.get(step, Counter())
        if step in undisturbed.samples:
            expected = undisturbed.samples[step]
            lost, doubled = lost + (expected - got).total(), doubled + (got - expected).total()
        else:
            lost += max(0, GLOBAL_BATCH - got.total())
            doubled += sum(1 for sample in got.elements() if earlier[sample])
        earlier += got
    common = job.weights.keys() & undisturbed.weights.keys()
    if not common:
        return {"lost": lost, "doubled": doubled, "weights_off": "?"}
    ours, theirs = job.weights[max(common)], undisturbed.weights[max(common)]
    if ours["digest"] == theirs["digest"]:
        return {"lost": lost, "doubled": doubled, "weights_off": 0.0}
    off = max(abs(a - b) for a, b in zip(ours["probed"], theirs["probed"], strict=True))
    most = max(abs(one) for one in theirs["probed"])
    return {"lost": lost, "doubled": doubled, "weights_off": off / most}


def _sum(values: Iterable[Any]) -> Any:
    values = list(values)
    return "?" if "?" in values else sum(values)


def _worst(values: Iterable[Any]) -> Any:
    values = list(values)
    return "?" if "?" in values else float(f"{max(values):.1e}")


def step_rows(jobs: Sequence[Seen], lines: dict[str, int]) -> list[dict[str, Any]]:
    """Return a row for each arm that ran without a fault."""
    cells: dict[str, list[Seen]] = defaultdict(list)
    for job in jobs:
        if job.fault == "none" and job.steps_s:
            cells[job.arm].append(job)
    steps_s = {arm: [x for job in cell for x in job.steps_s] for arm, cell in cells.items()}
    bare = steps_s.get("bare")
    rows = []
    for arm, cell in sorted(cells.items()):
        begin_s = [job.begin_s for job in cell if job.begin_s is not None]
        row: dict[str, Any] = {
            "arm": arm,
            "version": "/".join(sorted({job.version for job in cell})),
            "n": len(steps_s[arm]),
            "jobs": len(cell),
        }
        for share in (0.5, 0.99):
            name, took_s = f"p{round(100 * share)}", percentile(steps_s[arm], share)
            row[f"step_{name}_ms"] = round(1e3 * took_s, 1)
            row[f"over_bare_{name}"] = round(took_s / percentile(bare, share), 2) if bare else "?"
        row["begin_s"] = round(percentile(begin_s, 0.5), 1) if begin_s else None
        row["lines"] = lines.get(arm)
        row["ended"] = sum(job.ended for job in cell)
        rows.append(row)
    return rows


def as_text(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows as a table of Markdown."""
    if not rows:
        return ""
    names = list(rows[0])
    cells = [[("-" if row[name] is None else str(row[name])) for name in names] for row in rows]
    heads = [name.replace("_", " ") for name in names]
    return "\n".join("| " + " | ".join(row) + " |" for row in [heads, ["---"] * len(names), *cells])
