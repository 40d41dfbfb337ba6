"""Advice that follows from a run's numbers, in sentences. Pure."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from orchestrator.core import Incident, RunStats
from orchestrator.report.run_directory import Point
from ucp_core.numerics import counted

#: Smaller shares of the time are not mentioned.
_SHARE_MIN = 0.1
#: A machine that was named less often may only have been unlucky.
_NAMED_MIN = 3
#: A loss rises if it has been above its minimum for this many evaluations, and by this share at the
#: end.
_RISES_MIN, _RISES_SHARE = 3, 0.02
#: Number of characters of a node's id to show.
NODE_CHARACTERS = 8


class Named(NamedTuple):
    """A node, and how many failures its workers are proven to have caused, by kind."""

    node: str
    times: int
    kinds: dict[str, int]


def named_nodes(incidents: Sequence[Incident]) -> list[Named]:
    """Return the nodes that failures named, the most frequent first."""
    kinds: dict[str, Counter[str]] = {}
    for incident in incidents:
        if not incident.is_planned:
            for node in {node for _, worker, node in incident.places if worker in incident.guilty}:
                kinds.setdefault(node, Counter())[incident.kind] += 1
    named = [Named(node, sum(each.values()), dict(each)) for node, each in kinds.items()]
    return sorted(named, key=lambda one: (-one.times, one.node))


def advice(
    stats: RunStats,
    incidents: Sequence[Incident],
    *,
    goal: int,
    why_refused: str = "",
    validation: Sequence[Point] = (),
) -> list[str]:
    """Return what to do about the run, the most urgent first.

    ``goal`` is the last step, 0 if unknown. ``why_refused`` says why the last request for capacity
    was refused. ``validation`` has the validation loss by step.
    """
    return [
        *_end(stats, goal),
        *_open_places(stats, why_refused),
        *_failures(incidents),
        *_validation(validation),
        # In a run that has just begun, start-up takes nearly all of the time.
        *(_time(stats, incidents) if stats.outcome else ()),
    ]


def _end(stats: RunStats, goal: int) -> Iterator[str]:
    if stats.outcome in ("stopped", "failed", "no_capacity"):
        of_goal = f" of {goal}" if goal else ""
        yield (
            f"The run ended at step {stats.step}{of_goal}: {stats.reason}. "
            "The same command resumes it from there."
        )


def _open_places(stats: RunStats, why_refused: str) -> Iterator[str]:
    most = max((num for _, num in stats.sizes), default=0)
    num_open = min(most - stats.num_workers, stats.num_pending)
    names = " and ".join(sorted(node[:NODE_CHARACTERS] for node in stats.lost_nodes))
    if num_open <= 0:
        # Between the two numbers, workers are on the way to granted places.
        if names and not stats.outcome and stats.num_workers >= most:
            yield f"Node {names} is gone; the run has as many workers as before."
        return
    places = f"{num_open} of {most} places {'is' if num_open == 1 else 'are'} open"
    why = f" The last refusal: {why_refused}." if why_refused else ""
    what = "Add a node, or lower workers.max to what there is."
    gone = "never came back" if stats.outcome else "is gone"
    subject = f"Node {names} {gone}: " if names else ""
    yield f"{subject}{places}.{why} {what}"


def _validation(points: Sequence[Point]) -> Iterator[str]:
    best = min(range(len(points)), key=lambda at: points[at][1], default=0)
    if len(points) - best <= _RISES_MIN:
        return
    (step, least), (last_step, last) = points[best], points[-1]
    if last - least > _RISES_SHARE * abs(least):
        yield (
            f"The validation loss has risen since step {step:.0f}: from {least:.4g} to {last:.4g} "
            f"at step {last_step:.0f}. The best weights are those of step {step:.0f}: "
            "checkpoint.best keeps such a step, `everstep export --best` writes it."
        )


def _failures(incidents: Sequence[Incident]) -> Iterator[str]:
    failures = [one for one in incidents if not one.is_planned]
    for one in named_nodes(incidents):
        if one.times >= _NAMED_MIN:
            yield (
                f"Node {one.node[:NODE_CHARACTERS]} was named in {one.times} of "
                f"{len(failures)} failures: have the machine checked, or remove it."
            )
    undecided = [one for one in failures if one.who == "undecided" and one.folder]
    if undecided:
        folders = ", ".join(one.folder for one in undecided[-3:])
        yield (
            f"{counted(len(undecided), 'failure')} named no worker:  "
            f"`everstep diagnose` reads their evidence in {folders}."
        )


def _time(stats: RunStats, incidents: Sequence[Incident]) -> Iterator[str]:
    if stats.wall_s and stats.startup_s >= _SHARE_MIN * stats.wall_s:
        yield (
            f"Start-up is {_percent(stats.startup_s / stats.wall_s)} of the time: "
            f"{stats.startup_s:.0f} s passed before the first step, and no fault cost them. "
            f"Since then goodput is {_percent(stats.goodput_since_start)}."
        )
    trains_s = stats.wall_s - stats.startup_s
    phases: Counter[str] = Counter()
    for incident in incidents:
        for phase, took_s in incident.phases_s.items():
            phases[phase] += took_s  # type: ignore[assignment]
    back_s = sum(phases.values())
    if trains_s and back_s >= _SHARE_MIN * trains_s:
        phase, most_s = phases.most_common(1)[0]
        yield (
            f"Recoveries and changes took {back_s:.1f} s, {_percent(back_s / trains_s)} of the "
            f"time since start-up; the longest phase is {phase!r} with {most_s:.1f} s."
        )
    if stats.lost_steps >= _SHARE_MIN * max(stats.step, 1):
        yield (
            f"{counted(stats.lost_steps, 'step')} had to be redone:  "
            "save more often (snapshot.every_steps, checkpoint.every_steps)."
        )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
