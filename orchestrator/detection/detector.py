"""The detector's memory of keepers' reports: which workers stand still, and for how long.

Stillness is counted in *watched* time: the time between reports that follow each other closely.
While a machine was suspended or the controller was busy, the run was not watched, and silence in
that time proves nothing. Pure: time is passed in as ``at_s``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil, inf
from types import MappingProxyType
from typing import Final, NamedTuple

from orchestrator.detection.node_map import NodeMap
from orchestrator.detection.signs import Quiet, has_computed, work_s
from workers.protocol import NodeReport, WorkerPhase, WorkerReport

#: If two reports are further apart than this, two periods of a keeper, there is a gap in watching.
WATCH_GAP_S: Final = 2.0
#: How many durations of steps are remembered; of 256, p99 is the third largest.
NUM_STEPS_KEPT: Final = 256
#: With fewer durations than this, the largest is doubled: 8 steps do not show a p99.
_NUM_STEPS_FEW: Final = 8
#: A step that takes more than this many times the median is a pause.
_USUAL: Final = 10.0
#: Phases in which a worker waits for its own reads and writes.
_MOVES: Final = frozenset({WorkerPhase.LOADING, WorkerPhase.SAVING, WorkerPhase.LEAVING})


class ComputeMark(NamedTuple):
    """The watched time of the last sign of computing, and the processor time used until then."""

    since_s: float
    used_s: float

    def after(self, used_s: float, now_s: float) -> ComputeMark:
        """Return the mark after ``used_s`` of processor time were used until ``now_s``."""
        if used_s < self.used_s:
            # The processor time is that of other threads or children than before.
            return ComputeMark(self.since_s, used_s)
        is_more = has_computed(used_s - self.used_s, now_s - self.since_s)
        return ComputeMark(now_s, used_s) if is_more else self


class Shown(NamedTuple):
    """Signs of a process besides its progress."""

    idle: ComputeMark  #: When it was last seen to progress or to compute.
    asleep: ComputeMark  #: When it was last seen to compute, in any thread.
    frozen_since_s: float  #: Watched time at which its beating thread was last seen to run.


class Watched(NamedTuple):
    """One worker as last reported."""

    node: str
    report: WorkerReport
    still_since_s: float  #: Watched time at which it was last seen to progress.
    shown: Shown | None = None  #: None if the last report was of progress.


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedNode:
    """One node: when it last reported, in watched time, and its workers."""

    heard_s: float
    workers: Mapping[str, Watched]


@dataclass(frozen=True, kw_only=True)
class Detector:
    """The detector's memory as a value: ``observe`` returns a new one."""

    watched_s: float = 0.0  #: Total time during which reports came without a gap.
    heard_at_s: float = float("-inf")  #: When the last report came, on the shell's clock.
    nodes: NodeMap[WatchedNode] = field(default_factory=NodeMap)  #: The nodes that have reported.
    #: The last durations of steps, oldest first; each is that of its slowest worker. The first step
    #: of an attempt is excluded.
    steps_s: tuple[float, ...] = ()
    counted: tuple[int, int] = (0, 0)  #: Attempt and step of the last of these.

    @property
    def step_s_p50(self) -> float:
        """Return the median duration of a step; 0.0 if none was observed."""
        return sorted(self.steps_s)[len(self.steps_s) // 2] if self.steps_s else 0.0

    @property
    def step_s_p99(self) -> float:
        """Return the p99 duration of a step; 0.0 if none was observed.

        Steps in which a rank paused are capped. Otherwise every bound would grow by that pause.
        """
        if not self.steps_s:
            return 0.0
        ordered = sorted(self.steps_s)
        if len(ordered) < _NUM_STEPS_FEW:
            return 2.0 * ordered[-1]
        return min(ordered[ceil(0.99 * len(ordered)) - 1], _USUAL * self.step_s_p50)

    def worker(self, name: str) -> Watched | None:
        """Return the known facts about a worker; if it changed nodes, those from its newest one."""
        return self._by_worker.get(name)

    @cached_property
    def _by_worker(self) -> dict[str, Watched]:
        # ``judge`` looks up every member; without an index each look-up would search all nodes.
        found: dict[str, Watched] = {}
        for node in self.nodes.values():
            for name, watched in node.workers.items():
                if name not in found or watched.still_since_s > found[name].still_since_s:
                    found[name] = watched
        return found

    def still_s(self, watched: Watched) -> float:
        """Return how long the worker was watched without progress, in seconds."""
        return self.nodes[watched.node].heard_s - watched.still_since_s

    def quiet(self, watched: Watched) -> Quiet:
        """Return how long the worker has shown no sign of each kind."""
        heard_s = self.nodes[watched.node].heard_s
        idle, asleep, frozen_since_s = watched.shown or _shown(watched)
        return Quiet(heard_s - idle.since_s, heard_s - asleep.since_s, heard_s - frozen_since_s)

    def silent_s(self, node: str) -> float:
        """Return how long ``node`` has not reported while others did, in seconds."""
        return self.watched_s - self.nodes[node].heard_s


def observe(state: Detector, report: NodeReport, at_s: float, *, learns: bool = True) -> Detector:
    """Return ``state`` after one keeper's report, received at ``at_s``.

    Pass ``learns=False`` while a slow rank is suspected: durations of its long steps would lengthen
    every bound.
    """
    passed_s = at_s - state.heard_at_s
    watched_s = state.watched_s + (passed_s if passed_s <= WATCH_GAP_S else 0.0)
    before = state.nodes.get(report.node)
    if passed_s > WATCH_GAP_S:
        # The detector was away: stillness and silence start again at zero.
        state = _forget_stillness(state)
        before = None if before is None else state.nodes[report.node]
    is_gap = before is None or watched_s - before.heard_s > WATCH_GAP_S
    steps_s, counted = state.steps_s, state.counted
    workers: dict[str, Watched] = {}
    for row in report.workers:
        known = before.workers.get(row.worker) if before is not None else None
        if learns and known is not None and _finished_step(known.report, row):
            steps_s, counted = _count(steps_s, counted, row)
        if before is None or known is None or is_gap:
            workers[row.worker] = Watched(report.node, row, watched_s)
        elif _has_progressed(known.report, row):
            since_s = max(before.heard_s, watched_s - _last_sign_age_s(row))
            workers[row.worker] = Watched(report.node, row, since_s)
        else:
            workers[row.worker] = _still(known, row, watched_s)
    node = WatchedNode(heard_s=watched_s, workers=MappingProxyType(workers))
    return Detector(
        watched_s=watched_s,
        heard_at_s=at_s,
        nodes=state.nodes.set(report.node, node),
        steps_s=steps_s,
        counted=counted,
    )


def silent_nodes(state: Detector, silent_s: float) -> frozenset[str]:
    """Return the nodes that have not reported for longer than ``silent_s`` while others did."""
    oldest_s = state.watched_s - silent_s
    return frozenset(name for name, node in state.nodes.items() if node.heard_s < oldest_s)


def without_silent(state: Detector, members: Collection[str], silent_s: float) -> Detector:
    """Return ``state`` without the nodes that were silent for long and have no member.

    Otherwise nodes that are gone would be kept and searched until the run ends.
    """
    kept = (
        (name, node)
        for name, node in state.nodes.items()
        if state.silent_s(name) < silent_s or not node.workers.keys().isdisjoint(members)
    )
    return replace(state, nodes=NodeMap.of(kept))


def _shown(watched: Watched) -> Shown:
    """Return the signs that a worker showed when it progressed."""
    since_s, row = watched.still_since_s, watched.report
    return Shown(ComputeMark(since_s, work_s(row)), ComputeMark(since_s, row.processor_s), since_s)


def _still(known: Watched, row: WorkerReport, now_s: float) -> Watched:
    """Return the entry of a worker that has not progressed since the previous report."""
    # If nothing is known about its beating thread, a process does not count as frozen.
    has_run = not row.beater_runs or row.beater_runs != known.report.beater_runs
    before = known.shown or _shown(known)
    shown = Shown(
        idle=before.idle.after(work_s(row), now_s),
        asleep=before.asleep.after(row.processor_s, now_s),
        frozen_since_s=now_s if has_run else before.frozen_since_s,
    )
    return known._replace(report=row, shown=shown)


def _forget_stillness(state: Detector) -> Detector:
    now_s = state.watched_s
    nodes = (
        (
            name,
            WatchedNode(
                heard_s=now_s,
                workers=MappingProxyType(
                    {key: Watched(name, old.report, now_s) for key, old in node.workers.items()}
                ),
            ),
        )
        for name, node in state.nodes.items()
    )
    return replace(state, nodes=NodeMap.of(nodes))


def _has_progressed(before: WorkerReport, now: WorkerReport) -> bool:
    # Compare first what changes most often, because most workers train.
    if now.step != before.step or now.micro_batch != before.micro_batch:
        return True
    if (now.phase, now.attempt, now.pid) != (before.phase, before.attempt, before.pid):
        return True
    # While a worker trains, bytes stored in the background show no progress of training.
    if now.moved_bytes != before.moved_bytes and now.phase in _MOVES:
        return True
    return len(now.groups) != len(before.groups) or any(
        new.finished_seq != old.finished_seq
        or new.entered_seq != old.entered_seq
        or new.group != old.group
        for new, old in zip(now.groups, before.groups, strict=True)
    )


def _count(
    steps_s: tuple[float, ...], counted: tuple[int, int], row: WorkerReport
) -> tuple[tuple[float, ...], tuple[int, int]]:
    """Return the durations with that of the step that ``row`` finished, and the newest step.

    A step counts once, not once per worker. Otherwise a large run would remember only a few steps,
    and p99 would be the slowest of these.
    """
    place = (row.attempt, row.step)
    if place > counted:
        return (*steps_s[1 - NUM_STEPS_KEPT :], row.step_s), place
    if place == counted and row.step_s > steps_s[-1]:
        steps_s = (*steps_s[:-1], row.step_s)
    return steps_s, counted


def _finished_step(before: WorkerReport, now: WorkerReport) -> bool:
    # The first step of an attempt warms up caches and would distort the p99.
    return now.step != before.step and now.attempt == before.attempt and before.step_s > 0.0


def _last_sign_age_s(row: WorkerReport) -> float:
    """Return how long before the report the worker last did something, if that is known.

    A waiting rank last did something when it called the collective, a silent one at its last beat.
    Without this, every detection would take a report period longer.
    """
    waited_s = inf
    for group in row.groups:
        if 0.0 < group.waiting_s < waited_s:
            waited_s = group.waiting_s
    return row.beat_age_s if waited_s == inf else min(waited_s, row.phase_s)
