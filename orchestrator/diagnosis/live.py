"""Suspicions while a run trains: ranks that work slowly, and ranks that others wait for now.

Slow work is judged by the rules of ``slow``, from the digests in reports, over a window of the last
steps. If a rank waits unusually long for an operation, the sinks of the wait graph are suspects.
The usual wait is learned from earlier steps, not derived from the step time, so an absent rank is
suspected just as soon if steps take a minute. Ranks of a group that have made the same number of
calls must have made the same calls; if they have not, the hashes of all calls differ, even while
nothing hangs. A suspicion proves nothing and has no effect by itself. While one is open, the past
that costs are compared with is frozen; otherwise slow work would soon count as usual. ``Live`` is
mutable because it takes 10,000 reports a second. It reads no clock.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log
from statistics import median, median_low
from typing import Final

from orchestrator.diagnosis.hang import hangs
from orchestrator.diagnosis.programs import outnumbered
from orchestrator.diagnosis.reports import doing, graph_of, records_of
from orchestrator.diagnosis.slow import (
    ALONE,
    LEAST_LOG,
    NUM_PAST,
    NUM_PEERS_FEW,
    NUM_RECENT,
    Lag,
    Moments,
    is_whole_stage,
    lagging,
    logs,
    moments,
    power,
    stage_of,
)
from orchestrator.diagnosis.verdicts import Alternative, Guilty, Suspicion, listed
from orchestrator.fault_kinds import FaultKind
from ucp_core.layout import ParallelLayout
from workers.protocol import NOT_FORMED, GroupState, StepCost, WorkerReport

#: Shortest time between two judgements of costs, plus a time per rank.
_JUDGE_S: Final = 1.0
_JUDGE_S_EACH: Final = 1e-4
#: How many steps to remember of each rank: the longest window, and the past before it.
_NUM_STEPS: Final = 24
#: The first steps of an attempt are warm-up and do not count.
_NUM_WARM: Final = 2
#: After this time, two reports, a step is judged without the ranks whose digests are late.
_LATE_S: Final = 2.5
#: Smaller relative changes of a factor are not reported.
_TIMES_NEWS: Final = 0.25
#: A rank is steadily slow if each of its last ``_NUM_STEADY`` steps was within this factor of the
#: median.
_NUM_STEADY: Final = 4
_STEADY_LOG: Final = log(1.5)
#: A rank that is slow by varying factors may compile. After this many slow steps it does not.
_NUM_ERRATIC: Final = 8
#: A rank is held up if it waits longer than this, and longer than this many times the usual wait.
_HELD_S: Final = 3.0
_HELD_TIMES: Final = 3.0
#: The usual wait is the third longest of this many steps, their p99: one pause does not change it.
_NUM_WAITS: Final = 256
_USUAL_PLACE: Final = -3


@dataclass(slots=True)
class _Step:
    """Costs of a step that not all ranks have reported yet."""

    first_s: float
    costs: dict[int, StepCost]


class _Costs:
    """One kind of cost of every rank in the last steps, and its ratio to what it should be.

    ``roles`` has the role of each rank: ranks of one role do equal work.
    """

    def __init__(self, roles: Sequence[Hashable]) -> None:
        self._roles = dict(enumerate(roles))
        self._stages = {rank: stage_of(role) for rank, role in self._roles.items()}
        self._num_peers = Counter(roles)
        self._by_past = frozenset(
            rank for rank, role in enumerate(roles) if self._num_peers[role] <= NUM_PEERS_FEW
        )
        self._kept: dict[int, dict[int, float]] = {}
        self._past: dict[int, float] = {}
        self._logs: dict[int, dict[int, float]] = {}
        self.lags: dict[int, Lag] = {}
        self._step = 0
        # Ranks that cost more in one of the last steps, and the last such step.
        self._raised: dict[int, int] = {}

    def take(self, step: int, costs: Mapping[int, float]) -> None:
        """Add the costs of a step; all of them must be above zero."""
        for rank, kept in self._kept.items() if not self.lags else ():
            if len(kept) >= NUM_PAST:
                self._past[rank] = median(list(kept.values())[:NUM_PAST])
        for rank, ratio in logs(
            costs, self._roles, self._num_peers, self._past, self._stages
        ).items():
            _keep(self._logs.setdefault(rank, {}), step, ratio)
            if ratio > LEAST_LOG:
                self._raised[rank] = step
        self._step = max(self._step, step)
        if self._by_past and not self.lags:
            for rank, cost in costs.items():
                _keep(self._kept.setdefault(rank, {}), step, cost)

    def judge(self, nodes: Mapping[int, str]) -> None:
        """Find the ranks that are slow now; ``nodes`` has the node of each rank."""
        oldest = self._step - NUM_RECENT
        self._raised = {rank: step for rank, step in self._raised.items() if step > oldest}
        found = lagging(self._logs, self._by_past, now=self._raised, nodes=nodes)
        for rank in found.keys() & self.lags.keys():
            since_step = min(self.lags[rank].since_step, found[rank].since_step)
            found[rank] = found[rank]._replace(since_step=since_step)
        self.lags = found

    def is_steady(self, rank: int) -> bool:
        """Return whether a slow rank was about equally slow in each of the last steps."""
        lag, usual = self.lags[rank], log(self.lags[rank].times)
        newest = sorted(self._logs[rank].items())[-_NUM_STEADY:]
        return len(newest) == _NUM_STEADY and all(
            step >= lag.since_step and ratio > LEAST_LOG and abs(ratio - usual) < _STEADY_LOG
            for step, ratio in newest
        )

    def may_be_work(self, rank: int) -> bool:
        """Return whether a rank is alone on its stage, or may compile."""
        since_step, by_step = self.lags[rank].since_step, self._logs[rank]
        num_slow = sum(step >= since_step and ratio > LEAST_LOG for step, ratio in by_step.items())
        is_short = num_slow < _NUM_ERRATIC and not self.is_steady(rank)
        return is_short or is_whole_stage(rank, self._roles)

    def peers(self, rank: int) -> list[int]:
        """Return the ranks that a rank is compared with; none if with its own past."""
        if rank in self._by_past:
            return []
        role = self._roles[rank]
        return [other for other, one in self._roles.items() if one == role and other != rank]


class _Sizes:
    """How the compute of each role grows with the tokens of a micro-batch, in the last steps."""

    def __init__(self, roles: Sequence[Hashable]) -> None:
        self._roles = roles
        self._first: dict[Hashable, int] = {}
        self._known: dict[Hashable, deque[Moments]] = {}

    def evened(self, costs: Mapping[int, StepCost]) -> dict[int, float]:
        """Return the compute costs as if all ranks of a role had equally many tokens."""
        by_role: dict[Hashable, dict[int, StepCost]] = defaultdict(dict)
        for rank, one in costs.items():
            if one.compute_s > 0.0:
                by_role[self._roles[rank]][rank] = one
        found: dict[int, float] = {}
        for role, each in by_role.items():
            first = self._first.get(role) or next(iter(each.values())).tokens
            self._first[role] = first
            known = self._known.setdefault(role, deque(maxlen=_NUM_STEPS))
            known.append(moments((one.tokens, one.compute_s) for one in each.values()))
            grows = power(known)
            for rank, one in each.items():
                found[rank] = one.compute_s / ((one.tokens / first) ** grows if grows else 1.0)
        return found


def _keep(by_step: dict[int, float], step: int, value: float) -> None:
    by_step[step] = value
    if len(by_step) > _NUM_STEPS:
        del by_step[next(iter(by_step))]


class _Waits:
    """How long ranks usually wait for each operation: the longest reported wait of each step."""

    def __init__(self) -> None:
        self._step = 0
        self._longest: dict[tuple[str, str], float] = {}
        self._known: dict[tuple[str, str], deque[float]] = {}
        self._usual_s: dict[tuple[str, str], float] = {}

    def take(self, row: WorkerReport) -> float:
        """Add the waits of a rank; return the longest one."""
        if row.step > self._step:
            self._step = row.step
            for key, longest_s in self._longest.items():
                known = self._known.setdefault(key, deque(maxlen=_NUM_WAITS))
                known.append(longest_s)
                if len(known) >= -_USUAL_PLACE:
                    self._usual_s[key] = sorted(known)[_USUAL_PLACE]
                self._longest[key] = 0.0
        longest_s = 0.0
        for group in row.groups:
            if group.waiting_s > 0.0:
                key = _operation(group)
                self._longest[key] = max(self._longest.get(key, 0.0), group.waiting_s)
                longest_s = max(longest_s, group.waiting_s)
        return longest_s

    def is_overdue(self, group: GroupState) -> bool:
        """Return whether a wait is longer than usual."""
        if group.waiting_s < _HELD_S:
            return False
        return group.waiting_s >= _HELD_TIMES * self._usual_s.get(_operation(group), 0.0)


def _operation(group: GroupState) -> tuple[str, str]:
    # Groups of one axis wait for the same things.
    return (group.op, group.group.partition("[")[0])


class Live:
    """The suspicions of one attempt, which begins with ``first_step``.

    ``roles`` has the role of each rank: ranks of one role do equal work.
    """

    def __init__(self, roles: Sequence[Hashable], first_step: int) -> None:
        self._num_ranks = len(roles)
        self._compute = _Costs(roles)
        self._data = _Costs(roles)
        self._roles = roles
        self._role_of = dict(enumerate(roles))
        self._usual: dict[Hashable, deque[float]] = defaultdict(lambda: deque(maxlen=_NUM_STEPS))
        self._sizes = _Sizes(roles)
        self._waits = _Waits()
        self._pending: dict[int, _Step] = {}
        self._ended_s: dict[int, float] = {}
        self._closed = first_step + _NUM_WARM - 1
        self._rows: dict[int, tuple[WorkerReport, str]] = {}
        #: Ranks that have waited for long; only these are examined.
        self._held: dict[int, None] = {}
        self._judged_at_s = float("-inf")
        self._since_s: dict[tuple[str, str], float] = {}
        self._at_odds: list[Suspicion] = []
        #: The kinds of fault of the ranks that hold up others, and the suspicions of them.
        self._absent: tuple[dict[int, FaultKind], list[Suspicion]] = {}, []
        self.suspicions: tuple[Suspicion, ...] = ()

    @property
    def is_slow(self) -> bool:
        """Return whether a rank is suspected to work slowly."""
        return bool(self._compute.lags or self._data.lags)

    def take(self, rank: int, row: WorkerReport, node: str, at_s: float) -> None:
        """Take a member's report, received at ``at_s``."""
        self._rows[rank] = (row, node)
        if row.step_s and self._waits.take(row) >= _HELD_S:
            self._held[rank] = None
        else:
            self._held.pop(rank, None)
        for cost in row.digest.costs if row.digest is not None else ():
            if cost.step > self._closed or cost.step in self._pending:
                pending = self._pending.get(cost.step)
                if pending is None:
                    pending = self._pending[cost.step] = _Step(at_s, {})
                pending.costs[rank] = cost

    def look(self, at_s: float) -> bool:
        """Judge at ``at_s``; return whether ``suspicions`` have changed."""
        self._close(at_s)
        if at_s - self._judged_at_s >= _JUDGE_S + _JUDGE_S_EACH * self._num_ranks:
            self._judged_at_s = at_s
            nodes = {rank: node for rank, (_, node) in self._rows.items()}
            self._compute.judge(nodes)
            self._data.judge(nodes)
            # Once hashes differ, they differ from then on.
            self._at_odds = self._at_odds or self._other_calls(at_s)
        found = [*self._slow(at_s), *self._held_up(at_s), *self._at_odds]
        keys = [_key(one) for one in found]
        self._since_s = {
            key: min(one.since_s, self._since_s.get(key, one.since_s))
            for key, one in zip(keys, found, strict=True)
        }
        before = {_key(one): one for one in self.suspicions}
        is_new = [(_key(one), one.kind) for one in found] != [
            (key, one.kind) for key, one in before.items()
        ]
        # The factor decides how much the slow rank costs, and steadiness how long the run accepts
        # it.
        is_news = is_new or any(
            abs(one.times - before[_key(one)].times) > _TIMES_NEWS * one.times
            or one.is_steady != before[_key(one)].is_steady
            or one.may_be_work != before[_key(one)].may_be_work
            for one in found
        )
        if is_news:
            self.suspicions = tuple(replace(one, since_s=self._since_s[_key(one)]) for one in found)
        return is_news

    def _close(self, at_s: float) -> None:
        """Judge the steps that all ranks have reported, or that are overdue."""
        ready = [
            step
            for step, pending in self._pending.items()
            if len(pending.costs) == self._num_ranks or at_s - pending.first_s >= _LATE_S
        ]
        for step in sorted(ready):
            pending = self._pending.pop(step)
            self._closed = max(self._closed, step)
            self._ended_s[step] = pending.first_s
            compute = {r: one.compute_s for r, one in pending.costs.items() if one.compute_s > 0.0}
            usual_s = self._usual_compute_s(compute)
            self._compute.take(step, self._sizes.evened(pending.costs))
            self._data.take(
                step,
                {
                    # A wait that is short compared with computing does not matter.
                    rank: 1.0 + one.data_s / usual_s[self._roles[rank]]
                    for rank, one in pending.costs.items()
                    if one.data_s > 0.0 and self._roles[rank] in usual_s
                },
            )
        while len(self._ended_s) > 2 * _NUM_STEPS:
            del self._ended_s[next(iter(self._ended_s))]

    def _usual_compute_s(self, compute: Mapping[int, float]) -> dict[Hashable, float]:
        """Return how long a micro-batch of each role usually computes, this step included."""
        by_role: dict[Hashable, list[float]] = defaultdict(list)
        for rank, cost in compute.items():
            by_role[self._roles[rank]].append(cost)
        for role, costs in by_role.items():
            self._usual[role].append(median_low(costs))
        return {role: median_low(usual) for role, usual in self._usual.items()}

    def _slow(self, at_s: float) -> list[Suspicion]:
        found: list[Suspicion] = []
        for kind, costs, does in (
            (FaultKind.SLOW_COMPUTE, self._compute, "computes"),
            (FaultKind.SLOW_DATA, self._data, "takes, with its waits for data,"),
        ):
            for rank, lag in sorted(costs.lags.items()):
                row, node = self._rows[rank]
                peers = costs.peers(rank)
                beside = listed(peers) if peers else "it did before"
                since_s = self._ended_s.get(lag.since_step, at_s)
                found.append(
                    Suspicion(
                        kind=kind,
                        guilty=Guilty.of([rank], (), [node]),
                        confidence=0.9 if peers else 0.7,
                        worker=row.worker,
                        since_s=since_s,
                        times=lag.times,
                        is_steady=costs.is_steady(rank),
                        may_be_work=costs.may_be_work(rank),
                        evidence=f"{_who(rank, row, node)} {does} {lag.times:.2f} times as long as "
                        f"{beside}, from step {lag.since_step} on."
                        + (ALONE if is_whole_stage(rank, self._role_of) else ""),
                    )
                )
        return found

    def _other_calls(self, at_s: float) -> list[Suspicion]:
        camps: dict[tuple[str, int], dict[int, list[int]]] = {}
        for rank, (row, _) in self._rows.items():
            for group in row.groups:
                if group.history:
                    at = camps.setdefault((group.group, group.entered_seq), {})
                    at.setdefault(group.history, []).append(rank)
        for (name, number), by_past in camps.items():
            if len(by_past) > 1:
                odd = outnumbered(by_past.values())
                guilty = Guilty.of(odd, (), [self._rows[rank][1] for rank in odd])
                told = " and ".join(map(listed, by_past.values()))
                return [
                    Suspicion(
                        kind=FaultKind.DESYNC,
                        guilty=guilty,
                        confidence=0.9 if odd else 0.6,
                        worker=self._rows[odd[0]][0].worker if odd else "",
                        since_s=at_s,
                        evidence=f"Among the first {number} calls in {name}, {told} made different "
                        "ones. Nothing hangs, but their common results are wrong.",
                        alternatives=(Alternative(FaultKind.MISMATCH, guilty),),
                    )
                ]
        return []

    def _held_up(self, at_s: float) -> list[Suspicion]:
        held = (self._rows[rank][0] for rank in self._held)
        if not any(self._waits.is_overdue(group) for row in held for group in row.groups):
            self._absent = {}, []
            return []
        rows = {rank: row for rank, (row, _) in self._rows.items()}
        graph = graph_of(rows, range(self._num_ranks))
        # The other sinks are still forming, or may wait in a group without a record.
        known = {
            rank: doing(row)
            for rank in sorted(graph.sinks & rows.keys())
            if (row := rows[rank]).phase not in NOT_FORMED and not row.num_dropped
        }
        kinds = {rank: one.kind for rank, one in known.items()}
        if kinds != self._absent[0]:
            unknown = dict.fromkeys(graph.sinks - known.keys(), "")
            found = hangs(records_of(rows, graph, unknown=unknown, doing=known))
            self._absent = (
                kinds,
                [
                    Suspicion(
                        kind=one.kind,
                        guilty=Guilty.of([rank], (), [node]),
                        confidence=0.8,
                        worker=row.worker,
                        since_s=at_s + (one.since_s or 0.0),
                        evidence=f"{_who(rank, row, node)} holds up others. {one.evidence}",
                    )
                    for one in found
                    for rank in one.guilty.ranks
                    for row, node in (self._rows[rank],)
                ],
            )
        return self._absent[1]


def roles_of(layout: ParallelLayout) -> list[tuple[int, ...]]:
    """Return the role of each rank: what its work depends on, besides its samples."""
    places = map(layout.coordinates, range(layout.world_size))
    return [(place["pp"], place["cp"], place["tp"]) for place in places]


def _key(one: Suspicion) -> tuple[str, str]:
    """Return the key of a suspicion: the worker, and the kind of slow work; "" if absent."""
    return (one.worker, one.kind if one.times else "")


def _who(rank: int, row: WorkerReport, node: str) -> str:
    return f"Rank {rank} ({row.worker} on node {node[:8]})"
