"""The run as a value: all that the controller knows.

A run has *reservations* (each for one worker, up to ``max_workers`` requested at all times) and
*workers* (processes on nodes). Each formation decides which worker uses which reservation. The
state is nested by lifetime: the run, its current attempt, the reads since it ended, the fleet.
``machine.step`` thaws a ``RunState`` into a ``MutableRunState``, changes that and freezes it again.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from math import inf
from operator import not_
from typing import Any

from orchestrator.core.state.attempt import Attempt, FrozenAttempt
from orchestrator.core.state.fleet import (
    Fleet,
    FrozenFleet,
    Node,
    Offer,
    Worker,
    WorkerStatus,
    is_dying,
    is_pending,
    worker_number,
)
from orchestrator.core.state.frozen import Frozen, StatePart
from orchestrator.core.state.network import Network
from orchestrator.fault_kinds import FaultKind
from orchestrator.policies import Fault, FaultsSeen, Refused, Sharing, UserError
from ucp_core.layout import ParallelLayout
from workers.protocol import Pace, Source


class Phase(StrEnum):
    """The phase of the run. ``EDGES`` has its next phases, ``phase_table`` its handlers."""

    WAITING = "waiting"
    FORMING = "forming"
    TRAINING = "training"
    YIELDING = "yielding"
    FENCING = "fencing"
    READING = "reading"
    FINISHED = "finished"
    FAILED = "failed"


#: The phases that may follow each phase.
EDGES: dict[Phase, frozenset[Phase]] = {
    Phase.WAITING: frozenset(
        {Phase.WAITING, Phase.FORMING, Phase.READING, Phase.FINISHED, Phase.FAILED}
    ),
    Phase.FORMING: frozenset({Phase.TRAINING, Phase.YIELDING, Phase.FENCING}),
    Phase.TRAINING: frozenset({Phase.YIELDING, Phase.FENCING}),
    Phase.YIELDING: frozenset({Phase.WAITING, Phase.FENCING, Phase.FINISHED}),
    Phase.FENCING: frozenset({Phase.READING}),
    Phase.READING: frozenset({Phase.WAITING, Phase.FINISHED, Phase.FAILED}),
    Phase.FINISHED: frozenset(),
    Phase.FAILED: frozenset(),
}
#: Phases in which an attempt trains or may train.
ACTIVE = frozenset({Phase.FORMING, Phase.TRAINING, Phase.YIELDING})
#: Phases that are never left.
TERMINAL = frozenset({Phase.FINISHED, Phase.FAILED})


class RunOutcome(StrEnum):
    """How a run ended."""

    COMPLETED = "completed"
    STOPPED = "stopped"
    FAILED = "failed"
    #: The run had too few workers for too long.
    NO_CAPACITY = "no_capacity"


@dataclass(eq=False)
class Reads(StatePart):
    """Reads of keepers and storage (``ReadCommitted``), and which of their answers to trust."""

    num: int = 0  #: Number of the newest read; reads count up over the run.
    pending: int = 0  #: How many of the newest reads have no answer yet.
    final_from: int = 0  #: Number of the first read after the last member had left.
    memory_from: int = 0  #: Number of the first read after the last loss of a node.
    #: Number of the first read that excludes all bad sources and all unreached nodes.
    bad_from: int = 0
    #: Number of the first read after the newest commit in storage was reported.
    stored_from: int = 0
    seen: bool = False  #: Whether the newest answer is reliable.


class FrozenReads(Frozen, Reads):
    """Reads as a value."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Why the last attempt ended or is ending."""

    kind: FaultKind
    guilty: tuple[str, ...] = ()  #: Workers proven to have caused it.
    evidence: str = ""  #: One line for people.
    at_s: float = 0.0  #: When it was found.
    #: The rule of detection that found it, and the kind of its verdict; "" if none did.
    rule: str = ""
    verdict: str = ""
    #: (rank, worker, node) of each rank that it comes from; empty if that is not known.
    places: tuple[tuple[int, str, str], ...] = ()


@dataclass(eq=False)
class MutableRunState(StatePart):
    """The run state while one event is folded into it. Only ``machine.step`` holds one."""

    phase: Phase = Phase.WAITING
    incarnation: int = 0  #: Which incarnation of the controller this is.
    #: ``(attempt, resume_step)`` of every attempt, oldest first.
    lineage: tuple[tuple[int, int], ...] = ()
    #: The last attempt known to have completed a step or written files.
    trained: int = 0
    attempt: Attempt = field(default_factory=Attempt)  #: The current or last attempt.
    #: Reads of keepers and storage since the attempt started.
    reads: Reads = field(default_factory=Reads)
    fleet: Fleet = field(default_factory=Fleet)
    #: The workers that the run leaves to other runs on the cluster.
    sharing: Sharing = field(default_factory=Sharing)
    #: Which of the nodes do not reach each other.
    network: Network = field(default_factory=Network)
    #: ``(step, attempt)`` of the newest commit known to count. It may be gone when the run needs
    #: it; the next read then returns an older one.
    committed: tuple[int, int] = (0, 0)
    #: Whether it was last seen in keepers' memory, which is lost with the nodes.
    committed_in_memory: bool = False
    #: The newest step that was committed to storage and is not known to be damaged there. No
    #: attempt resumes from an older one. 1 if all of them are damaged.
    stored: int = 0
    #: Steps that are committed in storage but that no source can serve, newest first.
    lost: tuple[int, ...] = ()
    #: Bad sources: they must no longer be loaded, although their versions count.
    bad: tuple[Source, ...] = ()
    #: Sources that members of earlier attempts could not read. A source that fails again is bad.
    unread_before: tuple[Source, ...] = ()
    raised_before: tuple[UserError, ...] = ()  #: Errors of earlier attempts, the newest last.
    fits: tuple[ParallelLayout, ...] = ()  #: Layouts that have trained.
    refused: tuple[Refused, ...] = ()  #: Layouts that cannot train.
    #: ``(attempt, layout)`` of the first attempt in each that ran out of device memory.
    short: tuple[tuple[int, ParallelLayout], ...] = ()
    #: Layouts that trained, each with the seconds of a step, accurate to a few percent.
    steps: tuple[tuple[ParallelLayout, float], ...] = ()
    #: ``(when, node, ranks, layout)`` of each decision to leave the node of a slow worker; without
    #: ranks if the worker recovered first.
    convicted: tuple[tuple[float, str, tuple[int, ...], str], ...] = ()
    faults: tuple[Fault, ...] = ()  #: Charged to the budgets, within the window.
    num_stuck: int = 0  #: Failed attempts in a row without a new committed step.
    num_unexplained: int = 0  #: Those among them that lost a peer for an unknown reason.
    num_undecided: int = 0  #: Undecided hangs in a row after the same step.
    undecided_step: int = -1  #: The last step before them; -1 if there was none.
    cause: Cause | None = None  #: Why the last attempt ended or is ending; None before.
    #: Faults found while it ended that the cause does not explain.
    also: tuple[Cause, ...] = ()
    stop_reason: str = ""  #: Why the user wants the run to stop; "" if the user does not.
    stop_at: tuple[int, str] = (0, "")  #: The step after which it is to stop, and why; 0 if none.
    most_workers: int = 0  #: Most workers that the user wants; 0 for as many as configured.
    #: When the controller's machine is taken; infinity if it stays. The state is stored before
    #: that.
    store_by_s: float = inf
    deadline_s: float = inf  #: Bound of the phase; infinity if it has none.
    #: When ``min_workers`` were first available, for the first attempt; infinity before.
    enough_since_s: float = inf
    waiting_since_s: float = 0.0  #: When the phase WAITING was entered.
    #: No attempt starts before this time, because the last ones failed without progress.
    hold_until_s: float = 0.0
    #: Bound of the survey after a restart; infinity if none is running.
    surveying_until_s: float = inf
    down_since_s: float = inf  #: When training last stopped; infinity while it trains.
    pause_s: float = 0.0  #: Measured duration of the last re-formation; 0.0 if there was none.
    #: Longest time that a recent attempt took to form; 0.0 before the first.
    form_s: float = 0.0
    #: Smoothed duration of a step in the attempt's layout; 0.0 before the first.
    step_s: float = 0.0
    faults_seen: FaultsSeen = field(default_factory=FaultsSeen)  #: Since the run began.
    #: The chosen intervals of saves; 0 if not chosen yet.
    pace: Pace = field(default_factory=Pace)
    pace_reason: str = ""  #: Why these intervals were chosen.
    state_bytes: int = 0  #: Size of a snapshot over all ranks; 0 before the first.
    #: ``(axis, bytes)`` that a rank sends in a step, as last measured.
    sent: tuple[tuple[str, float], ...] = ()
    outcome: RunOutcome | None = None  #: How the run ended; None before.
    reason: str = ""  #: Why it ended; "" before.


class RunState(Frozen, MutableRunState):
    """The run as a value. ``RunState()`` is the state before the first event."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(freeze(MutableRunState(**values)).__dict__)


def thaw(state: RunState) -> MutableRunState:
    """Return a mutable copy; ``state`` stays as it is."""
    # The constructors are not used: passing 60 arguments takes longer than most events.
    run = object.__new__(MutableRunState)
    parts = run.__dict__
    parts.update(state.__dict__)
    attempt = parts["attempt"] = object.__new__(Attempt)
    attempt.__dict__.update(state.attempt.__dict__)
    reads = parts["reads"] = object.__new__(Reads)
    reads.__dict__.update(state.reads.__dict__)
    fleet = parts["fleet"] = object.__new__(Fleet)
    fleet.__dict__.update(state.fleet.__dict__)
    return run


def freeze(run: MutableRunState) -> RunState:
    """Turn ``run`` into a state that can no longer be changed, in place."""
    run.attempt.__class__ = FrozenAttempt
    run.reads.__class__ = FrozenReads
    run.fleet.__class__ = FrozenFleet
    run.__class__ = RunState
    assert isinstance(run, RunState)
    return run


def next_deadline_s(state: RunState) -> float:
    """Return the earliest ``at_s`` at which a ``Ticked`` may do something; infinity if none."""
    if state.phase in TERMINAL:
        return inf
    if state.surveying_until_s != inf:
        return state.surveying_until_s
    return min(state.deadline_s, state.fleet.wake_s)


def describe(
    state: RunState, num_told: int | None = None, *, num_nodes: int | None = None
) -> dict[str, Any]:
    """Return what ``everstep status`` shows, as JSON values.

    Keys: ``phase, attempt, step, committed_step, layout, other_layouts[{layout, why}], num_members,
    num_standbys, members[{rank, worker, node, pid, state}], standbys[{worker, node, pid, state}],
    processes{state: number}, nodes[{node, state, reservations}], pending_reservations,
    capacity[{alternative, asked, granted, refused, since_s, refused_s, grant_s, why}],
    shared{limit, runs} | null, cause{kind, guilty, evidence, at_s, rule, verdict, places} | null,
    suspects[{kind, guilty{ranks, nodes, links}, confidence, since_s, evidence, alternatives[{kind,
    guilty}], worker, times}], sent{axis: bytes}, waits_for, reason``. A ``pid`` or a time
    (``at_s``) that is not known is null.

    Args:
        num_told: How many members, from rank 0 on, standbys and nodes to list; None for all.
        num_nodes: How many nodes to list, those in trouble first, with the processes on them; None
            for all.
    """
    fleet = state.fleet
    shown = None if num_nodes is None else dict.fromkeys(troubled_first(state)[:num_nodes])
    # A worker has a reservation only while it is a member.
    num_spare = len(fleet.workers) - len(fleet.bound)
    spare = (each for each in fleet.workers.items() if each[0] not in fleet.bound)
    placed = ((node, number) for node, members in state.attempt.placed for number in members)
    members = (
        {"rank": rank, **_describe_worker(state, number, worker)}
        for rank, (node, number) in enumerate(placed)
        if (shown is None or node in shown)
        and (worker := fleet.workers.get(number)) is not None
        and number in fleet.bound
    )
    standbys = (
        _describe_worker(state, number, worker)
        for number, worker in islice(spare, num_spare)
        if shown is None or worker.node in shown
    )
    nodes: Iterable[int] = fleet.nodes if shown is None else shown
    if num_told is not None and shown is None:
        nodes = troubled_first(state)
    return {
        "phase": str(state.phase),
        "attempt": state.attempt.number,
        "step": _last_step(state),
        "committed_step": state.committed[0],
        "layout": str(state.attempt.layout) if state.attempt.layout else "",
        "other_layouts": [
            {"layout": layout, "why": why} for layout, why in state.attempt.other_layouts
        ],
        "num_members": len(fleet.bound),
        "num_standbys": num_spare,
        "members": list(islice(members, num_told)),
        "standbys": list(islice(standbys, num_told)),
        "processes": _processes(state),
        "nodes": [_describe_node(fleet.nodes[number]) for number in islice(nodes, num_told)],
        "pending_reservations": _missing_reservations(state),
        "capacity": [_describe_offer(n, offer) for n, offer in enumerate(state.fleet.offers)],
        "shared": None
        if state.sharing.limit < 0
        else {"limit": state.sharing.limit, "runs": list(state.sharing.runs)},
        "cause": None if state.cause is None else _describe_cause(state.cause),
        "suspects": [one.to_json() for one in state.attempt.suspects],
        "sent": dict(state.sent),
        "waits_for": _waits_for(state),
        "reason": state.reason,
    }


def troubled_first(state: RunState) -> list[int]:
    """Return all nodes: those in trouble first, then in the order of ranks, lost ones last."""
    fleet, workers = state.fleet, state.fleet.workers
    suspects = (worker_number(one.worker) for one in state.attempt.suspects if one.worker)
    dying = (number for number, _ in workers.where(is_dying))
    unformed = (number for number, _ in state.attempt.inside.where(not_))
    odd = (worker.node for worker in map(workers.get, (*suspects, *dying, *unformed)) if worker)
    leaving = (number for number, _ in fleet.nodes.where(_is_leaving))
    lost = dict(fleet.nodes.where(_is_lost))
    found = dict.fromkeys((*odd, *leaving, *dict(state.attempt.placed), *fleet.nodes))
    return [*(number for number in found if number not in lost), *lost]


def _processes(state: RunState) -> dict[str, int]:
    """Return the number of processes by state."""
    inside = state.attempt.inside.counted(bool)
    for number, _ in state.fleet.workers.where(is_dying):
        if number in state.attempt.inside:
            inside[state.attempt.inside[number]] -= 1
    counts = state.fleet.workers.counted(_status)
    counts[WorkerStatus.READY] -= sum(inside.values())
    told: dict[str, int] = {"training": inside[True], "forming": inside[False]}
    told |= {str(status): num for status, num in counts.items()}
    return {name: num for name, num in told.items() if num}


def _status(worker: Worker) -> WorkerStatus:
    return worker.status


def _is_leaving(node: Node) -> bool:
    return node.alive and node.draining


def _is_lost(node: Node) -> bool:
    return not node.alive


def _describe_worker(state: RunState, number: int, worker: Worker) -> dict[str, Any]:
    formed = state.attempt.inside.get(number) if worker.status is WorkerStatus.READY else None
    status = str(worker.status) if formed is None else "training" if formed else "forming"
    return {
        "worker": worker.name,
        "node": state.fleet.nodes[worker.node].name,
        "pid": worker.pid or None,
        "state": status,
    }


def _waits_for(state: RunState) -> str:
    """Return what the run needs to continue; "" if nothing takes longer than usual."""
    if state.phase is Phase.WAITING and state.fleet.num_failed_starts:
        died = f"{state.fleet.num_failed_starts} in a row did not start"
        return f"a worker process that starts: {died}, the last: {state.fleet.failed_start}"
    refused = state.attempt.refused
    if state.phase is Phase.WAITING and refused is not None:
        return f"workers for another layout: {refused.layout} was refused: {refused.why}"
    is_held = state.phase is Phase.WAITING and state.deadline_s == state.hold_until_s
    if is_held and state.num_unexplained:
        what = f"{state.num_unexplained} attempts in a row lost a peer, and no worker is to blame"
        return f"a network that keeps its connections: {what}"
    is_behind = state.committed[0] < state.stored
    if state.phase is not Phase.READING or not (is_behind or state.reads.pending > 1):
        return ""
    what = f"step {state.stored} in checkpoints/" if is_behind else "checkpoints/"
    return f"{what}: storage does not answer"


def _missing_reservations(state: RunState) -> list[int]:
    """Return the requests for workers that the run lacks, without those for better capacity."""
    offers = enumerate(state.fleet.offers)
    last = max((n for n, offer in offers if offer.num_pending + offer.num_granted), default=0)
    return [
        number
        for number, reservation in state.fleet.reservations.where(is_pending)
        if reservation.alternative == last
    ]


def _describe_cause(cause: Cause) -> dict[str, Any]:
    return {
        "kind": cause.kind.value,
        "guilty": list(cause.guilty),
        "evidence": cause.evidence,
        "at_s": cause.at_s,
        "rule": cause.rule,
        "verdict": cause.verdict,
        "places": [list(place) for place in cause.places],
    }


def _describe_offer(number: int, offer: Offer) -> dict[str, Any]:
    is_refused = offer.refused_s != inf
    return {
        "alternative": number,
        "asked": offer.num_pending + offer.num_granted,
        "granted": offer.num_granted,
        "refused": offer.num_pending if is_refused else 0,
        "since_s": None if offer.since_s == inf else offer.since_s,
        "refused_s": offer.refused_s if is_refused else None,
        "grant_s": offer.took_s or None,
        "why": offer.why,
    }


def _last_step(state: RunState) -> int:
    """Return the last completed step; a member may leave before its last steps are reported."""
    step, attempt = state.committed
    return max(state.attempt.step, step) if attempt == state.attempt.number else state.attempt.step


def _describe_node(node: Node) -> dict[str, Any]:
    status = "slow" if node.is_slow else "draining" if node.draining else "alive"
    return {
        "node": node.name,
        "state": status if node.alive else "lost",
        "reservations": list(node.reservations),
    }
