"""Judge an attempt: name the faulty worker with the evidence, or none.

``diagnosis`` finds which ranks delay the others, and why. This module knows the processes and how
long to wait. The rules follow, strongest evidence first. Each applies only if no member has
progressed for its bound, in watched time, and every member's node reports. The kernel's state of a
process is evidence before a step is overdue, so shorter bounds suffice.

1. *gone*, *stopped*, *silent*: the process's signs (``signs``) are proof while another member runs
   or beats. The beating thread only sleeps and stores. It runs as long as the process is scheduled
   and the interpreter lock is free, as it is while a rank waits in a collective. *held*: that lock
   is not free. This proves nothing, but waiting costs more than a new process.
2. *missing*: the others wait for this rank (``diagnosis.hang``, rule 1). This is C4's
   non-communication hang. From outside it looks like work, so the rank gets the longest pause of a
   script, and more while it computes.
3. *stuck*: it waits nowhere, and others wait. Like 2, but no chain leads to it.
4. *undecided*: all wait and none is missing, or all compute alike. No rank is named, because every
   rank that the records could name waits itself.

If all members are stopped, none delays another and there is no verdict. A process under a debugger
is never named. A rank with groups that did not fit its ring may wait in one of them, so it is not
named because others wait for it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import TypeAlias

from orchestrator.detection.detector import WATCH_GAP_S, Detector, Watched
from orchestrator.detection.limits import Limits
from orchestrator.detection.signs import Sign, describe, sign_of
from orchestrator.diagnosis import (
    Doing,
    Records,
    WaitGraph,
    doing,
    graph_of,
    hangs,
    records_of,
    stopped,
    waits,
)
from orchestrator.fault_kinds import FaultKind
from workers.protocol import NOT_FORMED, WorkerPhase, WorkerReport

_IN_STEP = frozenset(
    {WorkerPhase.FORWARD, WorkerPhase.BACKWARD, WorkerPhase.REDUCING, WorkerPhase.UPDATING}
)
_SLOW_TO_SAVE = frozenset({WorkerPhase.SAVING, WorkerPhase.LEAVING})
_KINDS = {
    "gone": FaultKind.DEAD,
    "stopped": FaultKind.FROZEN,
    "silent": FaultKind.FROZEN,
    "held": FaultKind.INTERPRETER_HELD,
    "undecided": FaultKind.UNDECIDED,
}
#: Kinds of mistakes of the program.
_MISTAKES = frozenset({FaultKind.MISMATCH, FaultKind.DESYNC})
_RAISE_TIMEOUT = " (if it may work this long, raise parallel.collective_timeout_s)"
_RAISE_PATIENCE = " (if it may pause this long, raise recovery.patience)"
_STOPPED = frozenset({None, Sign.STOPPED, Sign.TRACED})
#: Share of the time until collectives fail: the culprit is named before that.
_BEFORE_FAILING = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """An attempt makes no progress."""

    #: Workers proven to hold up the others, sorted; empty if none could be named.
    guilty: tuple[str, ...]
    rule: str  #: Name of the rule that fired, as in the module's docstring.
    evidence: str  #: One line for people.
    kind: FaultKind = FaultKind.UNDECIDED  #: The kind of fault.
    at_odds: tuple[int, ...] = ()  #: The ranks whose calls differ from the majority's.
    #: Guilty workers that may only work for long: there is no proof against their machines.
    maybe_well: tuple[str, ...] = ()

    @property
    def is_program(self) -> bool:
        """Return whether ranks are proven to have called different collectives."""
        return self.kind in _MISTAKES


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSilent:
    """A node does not report while others do."""

    node: str
    workers: tuple[str, ...]  #: The members of the attempt on it, sorted.
    evidence: str  #: One line for people.


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalled:
    """Every member waits for others longer than usual. It proves nothing, but a probe may."""

    waited_s: float  #: How long no member was seen to progress.


Judgement: TypeAlias = Hang | NodeSilent | Stalled | None


@dataclass(frozen=True, kw_only=True)
class _JudgedAttempt:
    """The facts about the attempt to judge.

    Ranks are indices in ``members``. ``rows`` has the reports on known members, ``present`` those
    from the attempt. ``unseen_s`` is the age of the oldest of them. ``idle_s`` has for how long
    each known member has not computed, ``signs`` the sign that its process shows.
    """

    members: tuple[str, ...]
    rows: Mapping[int, WorkerReport]
    present: Mapping[int, WorkerReport]
    idle_s: Mapping[int, float]
    signs: Mapping[int, Sign]
    still_s: float
    unseen_s: float
    limits: Limits
    collectives_fail_s: float

    @cached_property
    def graph(self) -> WaitGraph:
        """Return which rank waits for which. It is expensive, and rule 1 does not need it."""
        return graph_of(self.present, range(len(self.members)))

    @cached_property
    def unrecorded(self) -> dict[int, str]:
        """Return the ranks that may wait in a group without a record, with the reason."""
        return {
            rank: f"{row.num_dropped} groups did not fit its ring"
            for rank, row in self.present.items()
            if row.num_dropped and not any(waits(row))
        }

    def records(self, late: Collection[int] = ()) -> Records:
        """Return the last calls; ``late`` ranks have had their time to come, others have not."""
        early = self.graph.sinks.difference(late)
        return records_of(
            self.present,
            self.graph,
            unknown={rank: self.unrecorded.get(rank, "it may be at work") for rank in early},
            doing={rank: _doing(self, rank) for rank in late},
        )

    def verdict(
        self, rule: str, guilty: Sequence[int], evidence: str, kind: FaultKind | None = None
    ) -> Hang:
        return Hang(
            guilty=tuple(sorted(self.members[rank] for rank in guilty)),
            rule=rule,
            evidence=f"{rule}: {evidence.rstrip('.')}; no progress for {self.still_s:.2f} s",
            kind=_KINDS[rule] if kind is None else kind,
            maybe_well=tuple(
                sorted(self.members[rank] for rank in guilty if self._may_be_well(rank))
            ),
        )

    def _may_be_well(self, rank: int) -> bool:
        row, sign = self.rows.get(rank), self.signs.get(rank)
        if row is None or sign not in {Sign.COMPUTING, Sign.IDLE}:
            return sign is Sign.HELD
        # A process may use the processor while it waits for a device that is stuck.
        if doing(row).kind is FaultKind.DEVICE_STUCK:
            return False
        is_at_work = _is_in_own_code(self, rank) and self.idle_s[rank] < self.limits.pause_s
        return sign is Sign.COMPUTING or is_at_work


def judge(
    state: Detector,
    at_s: float,
    *,
    attempt: int,
    members: tuple[str, ...],
    limits: Limits,
    collectives_fail_s: float = inf,
) -> Judgement:
    """Return what is proven about ``attempt`` at ``at_s``; None while nothing is.

    Args:
        at_s: Now, on the clock of ``observe``.
        members: Its workers in rank order.
        limits: Bounds, as ``limits_from(state.step_s_p99)``.
        collectives_fail_s: Time after which waiting collectives fail and so end the attempt. After
            that it is too late to name a rank.
    """
    if not members or at_s - state.heard_at_s > WATCH_GAP_S:
        # There is a gap in watching: reports or the controller are late.
        return None
    if _progresses(state, members, limits):
        return None
    found = ((rank, state.worker(worker)) for rank, worker in enumerate(members))
    known = {rank: one for rank, one in found if one is not None}
    silent = _silent_node(state, known.values(), limits)
    if silent is not None:
        return silent
    unseen_s = max((state.silent_s(one.node) for one in known.values()), default=inf)
    if unseen_s > limits.suspect_s:
        return None
    still_s = min(state.still_s(one) for one in known.values())
    if still_s < limits.stopped_s:
        return None
    rows = {rank: one.report for rank, one in known.items()}
    quiet = {rank: state.quiet(one) for rank, one in known.items()}
    case = _JudgedAttempt(
        members=members,
        rows=rows,
        present={rank: row for rank, row in rows.items() if row.attempt == attempt},
        idle_s={rank: each.idle_s for rank, each in quiet.items()},
        signs={rank: sign_of(row, quiet[rank], limits) for rank, row in rows.items()},
        still_s=still_s,
        unseen_s=unseen_s,
        limits=limits,
        collectives_fail_s=collectives_fail_s,
    )
    verdict = None
    if not _all_stopped(case):
        verdict = _by_signs(case)
        if verdict is None and still_s >= limits.hang_s:
            verdict = _by_waits(case) or _undecided(case)
    if verdict is None and still_s >= limits.suspect_s:
        all_wait = len(case.graph.waits_for) == len(members) and not case.unrecorded
        return Stalled(waited_s=still_s) if all_wait else None
    return verdict


def _progresses(state: Detector, members: Collection[str], limits: Limits) -> bool:
    """Return whether a member on a reporting node made progress; then no fault is proven.

    While a run trains, looking at the first member is usually enough.
    """
    own = frozenset(members)
    return any(
        name in own and node.heard_s - watched.still_since_s < limits.stopped_s
        for node in state.nodes.values()
        if state.watched_s - node.heard_s <= limits.suspect_s
        for name, watched in node.workers.items()
    )


def _silent_node(state: Detector, known: Collection[Watched], limits: Limits) -> NodeSilent | None:
    """Return the lost node, if there is one."""
    for node in sorted({one.node for one in known}):
        silent_s = state.silent_s(node)
        if silent_s < limits.node_silent_s:
            continue
        elsewhere = [one for one in known if one.node != node]
        # If other members completed a step, the node's workers took part in it: only its keeper is
        # slow. Without members elsewhere this proof is missing; the machine and the keeper have
        # their own bounds.
        if elsewhere and all(state.still_s(one) >= limits.hang_s for one in elsewhere):
            return NodeSilent(
                node=node,
                workers=tuple(sorted(one.report.worker for one in known if one.node == node)),
                evidence=f"no report from node {node} for {silent_s:.2f} s while others report",
            )
    return None


def _by_signs(case: _JudgedAttempt) -> Hang | None:
    """Apply rule 1 to the signs of the processes, the strongest one first."""
    limits = case.limits
    # A worker without a recent report may be stopped, too: perhaps the whole job is being stopped.
    stopped_s = max(limits.stopped_s, case.unseen_s)
    beats = any(row.beat_age_s < limits.suspect_s for row in case.rows.values())
    # A single member can only be compared with its keeper, which reports.
    is_alone = len(case.members) == 1 and case.still_s >= limits.undecided_s
    for rule, sign, still_s, silent_s in (
        ("gone", Sign.GONE, limits.suspect_s, 0.0),
        ("stopped", Sign.STOPPED, 0.0, stopped_s),
        ("silent", Sign.FROZEN, limits.hang_s, 0.0),
        ("held", Sign.HELD, limits.held_s, limits.held_s),
    ):
        is_proof = sign in {Sign.GONE, Sign.STOPPED} or beats or is_alone
        shown = [
            rank
            for rank, each in case.signs.items()
            if each is sign and case.rows[rank].beat_age_s >= silent_s
        ]
        if shown and is_proof and case.still_s >= still_s:
            return case.verdict(rule, shown, _told(case, shown))
    return None


def _by_waits(case: _JudgedAttempt) -> Hang | None:
    """Apply rules 2 and 3 to the ranks that wait for none and have had their time."""
    graph = case.graph
    free = {rank for rank, row in case.present.items() if row.phase in _IN_STEP}
    late = [
        rank
        for rank in sorted(graph.sinks | free - graph.waits_for.keys())
        if rank not in case.unrecorded and case.still_s >= _bound_s(case, rank)
    ]
    missing = [rank for rank in late if rank in graph.wanted]
    if missing:
        found = hangs(case.records(missing))
        evidence = " ".join(one.evidence for one in found)
        return case.verdict("missing", missing, evidence, found[0].kind)
    if late and (graph.waits_for or len(case.members) == 1):
        evidence = f"{_told(case, late)}; {len(graph.waits_for)} others wait"
        return case.verdict("stuck", late, evidence, min(_doing(case, rank).kind for rank in late))
    return None


def _undecided(case: _JudgedAttempt) -> Hang | None:
    bound_s = case.limits.undecided_s if case.graph.waits_for else case.limits.forming_s
    # All may do the same for long, for example read data; none delays another.
    if case.still_s < bound_s or any(
        case.still_s < _bound_s(case, rank) for rank in range(len(case.members))
    ):
        return None
    found = stopped(case.records())
    evidence = " ".join(one.evidence for one in found) or "no member waits for another"
    verdict = case.verdict("undecided", (), evidence)
    if not found or found[0].kind not in _MISTAKES:
        return verdict
    return replace(verdict, kind=found[0].kind, at_odds=found[0].guilty.ranks)


def _bound_s(case: _JudgedAttempt, rank: int) -> float:
    """Return how long a worker may make no progress in its current state, in seconds."""
    row, limits = case.present.get(rank), case.limits
    if row is None:
        return limits.forming_s
    if case.signs[rank] is Sign.TRACED:
        return inf
    is_computing = case.signs[rank] is Sign.COMPUTING
    if row.phase in NOT_FORMED | _SLOW_TO_SAVE:
        bound_s = limits.forming_s if row.phase in NOT_FORMED else limits.saving_s
        return max(bound_s, _until_failing_s(case)) if is_computing else bound_s
    if rank in case.graph.waits_for and row.beat_age_s < limits.hang_s:
        # Connections are made in the first step; only a network delays them.
        return limits.undecided_s if row.step_s else limits.saving_s
    # It never needs more time than the others' collectives wait.
    return min(limits.pause_s if _pauses(case, rank) else inf, _until_failing_s(case))


def _until_failing_s(case: _JudgedAttempt) -> float:
    return _BEFORE_FAILING * case.collectives_fail_s


def _pauses(case: _JudgedAttempt, rank: int) -> bool:
    """Return whether a worker has been idle for as long as a script may pause."""
    computes = case.signs.get(rank) is Sign.COMPUTING
    return not computes and case.idle_s.get(rank, 0.0) >= case.limits.pause_s


def _is_in_own_code(case: _JudgedAttempt, rank: int) -> bool:
    row = case.present.get(rank)
    return row is not None and row.phase not in NOT_FORMED | _SLOW_TO_SAVE


def _all_stopped(case: _JudgedAttempt) -> bool:
    # If a single worker is stopped but its keeper is not, the worker is named.
    stopped = all(case.signs.get(rank) in _STOPPED for rank in range(len(case.members)))
    return stopped and len(case.members) > 1


def _doing(case: _JudgedAttempt, rank: int) -> Doing:
    """Return what a rank does that delays the others, and what to do if it is healthy."""
    row, worker = case.rows.get(rank), case.members[rank]
    if row is None:
        return Doing(FaultKind.ABSENT, f"({worker}) has not reported")
    shown = [f"({worker}) {describe(case.signs[rank], row, case.idle_s[rank])}"]
    found = doing(row)
    is_behind = found.kind is FaultKind.DEVICE_STUCK
    if is_behind:
        shown.append(f", and {found.text}")
    if _is_in_own_code(case, rank) and case.signs[rank] in {Sign.COMPUTING, Sign.IDLE}:
        is_pause = _pauses(case, rank) and case.limits.pause_s < _until_failing_s(case)
        shown.append(_RAISE_PATIENCE if is_pause else _RAISE_TIMEOUT)
    return Doing(FaultKind.DEVICE_STUCK if is_behind else FaultKind.ABSENT, "".join(shown))


def _told(case: _JudgedAttempt, ranks: Sequence[int]) -> str:
    return "; ".join(f"rank {rank} {_doing(case, rank).text}" for rank in ranks[:8])
