"""The run as a value: what the controller knows, and nothing else.

A run has *slots* (reservations for one worker each, asked for up to ``max_workers`` at all
times) and *workers* (processes on nodes). Which worker uses which slot is decided here, at each
formation. ``RunState`` is never changed: ``machine.step`` thaws it into a ``Draft``, changes
that and freezes it again.
"""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass, field
from enum import StrEnum
from functools import lru_cache
from math import inf
from typing import Any, NamedTuple, NoReturn

from orchestrator.core.state.table import Table
from orchestrator.policies import Fault, UserError
from ucp_core.layout import ParallelLayout
from workers.protocol import Source


class Phase(StrEnum):
    """Where the run is.

    WAITING for capacity -> FORMING -> RUNNING -> FENCING -> READING -> FORMING ...; a planned
    change goes RUNNING -> YIELDING -> FORMING. FINISHED and FAILED are terminal.
    """

    WAITING = "waiting"
    FORMING = "forming"
    RUNNING = "running"
    YIELDING = "yielding"
    FENCING = "fencing"
    READING = "reading"
    FINISHED = "finished"
    FAILED = "failed"


#: Phases in which an attempt trains or may train.
ACTIVE = frozenset({Phase.FORMING, Phase.RUNNING, Phase.YIELDING})
#: Phases that are never left.
TERMINAL = frozenset({Phase.FINISHED, Phase.FAILED})


class WorkerStatus(StrEnum):
    """A worker process: starting, able to be assigned, or killed and not yet known to be gone."""

    STARTING = "starting"
    READY = "ready"
    DYING = "dying"


class Worker(NamedTuple):
    """One worker process.

    Attributes:
        name: As the shell knows it, ``w0007``.
        node: Number of its node.
        status: Of the process.
        deadline_s: STARTING: be ready by then. DYING: be gone by then.
        slot: The slot it uses, 0 if none.
        inside: Whether it is in the current attempt and has not left it.
        formed: Whether it has formed in the current attempt.
        pid: Process id, 0 before it was ready.
    """

    name: str
    node: int
    status: WorkerStatus
    deadline_s: float = inf
    slot: int = 0
    inside: bool = False
    formed: bool = False
    pid: int = 0


class Slot(NamedTuple):
    """One reservation. ``node`` is -1 while it is pending; ``avoid`` is what was asked for."""

    node: int
    avoid: tuple[str, ...]


class Node(NamedTuple):
    """One node.

    Attributes:
        name: As the shell knows it.
        alive: Whether it is in the cluster.
        slots: Reservations granted here, ascending.
        workers: Processes here, ascending.
        usable: Workers that could train here: ready ones, at most one per slot.
        leave_by_s: Deadline of a drain notice; infinity if there is none.
        strikes: When workers provably failed here, within the window.
        avoid_until_s: No new slots here before then.
        retry_s: No new process here before then.
        num_failed_starts: In a row.
    """

    name: str
    alive: bool = True
    slots: tuple[int, ...] = ()
    workers: tuple[int, ...] = ()
    usable: int = 0
    leave_by_s: float = inf
    strikes: tuple[float, ...] = ()
    avoid_until_s: float = 0.0
    retry_s: float = 0.0
    num_failed_starts: int = 0

    @property
    def draining(self) -> bool:
        """Return whether the provider takes the node back."""
        return self.leave_by_s != inf


@dataclass(frozen=True, slots=True)
class Cause:
    """Why the last attempt ended, or is being ended.

    Attributes:
        kind: crash, node_loss, preemption, hang, undecided, exception, peer_lost, unloadable,
            growth, drain, stop, controller_restart, resume or completed.
        guilty: Workers proven to have caused it.
        evidence: One line for people.
        at_s: When it was found.
    """

    kind: str
    guilty: tuple[str, ...] = ()
    evidence: str = ""
    at_s: float = 0.0


@dataclass(eq=False)
class Draft:
    """The run state while one event is folded into it. Only ``machine.step`` holds one.

    Attributes:
        phase: Where the run is.
        life: Which life of the controller this is.
        attempt: The fencing token; 0 before the first attempt.
        lineage: ``(attempt, resume_step)`` of every attempt, oldest first.
        layout: Of the current or last attempt.
        members: Workers of the current or last attempt in rank order, dead ones too.
        num_inside: Members that have neither left nor died.
        num_unformed: Members that have not formed.
        step: Last step that every rank completed in the current attempt.
        stepped: Whether the current attempt completed a step.
        known: ``(step, attempt)`` of the newest commit known to count. It may be gone when it is
            needed, and the next read then says an older one.
        known_in_memory: Whether it was last seen in keepers' memory, which a node takes with it.
        known_at_start: What ``known`` was when the attempt started.
        left_step: Least step that members reported when they left, -1 if none did.
        yield_asked: Whether the members of the current attempt were asked to leave.
        yielded_step: Step at which all members so far yielded; -1 none yet, -2 they differ.
        completed: Whether a member reported the last step as committed.
        num_reads: ``ReadCommitted`` actions in the whole run: the number of the newest.
        reads_pending: How many of those, the newest ones, have no answer.
        read_final_from: Number of the first read after the last member had left.
        read_memory_from: Number of the first read after the last loss of a node.
        read_bad_from: Number of the first read that leaves out all that is bad.
        read_seen: Whether the newest answer can be relied on.
        lost: Steps that are committed in storage and can be loaded from nowhere, newest first.
        bad: Sources that are not to be loaded from any more, of versions that count.
        num_bad_at_start: How many these were when the attempt started.
        unread: Sources that members of the current attempt could not read, and did not prove bad.
        unread_before: The same of earlier attempts: who is met here again is bad.
        judged: Whether the end of the current attempt was put on record and charged.
        raised: Errors of the attempt that is ending.
        raised_before: Errors of earlier attempts, the newest last.
        faults: Charged to the budgets, within the window.
        fenced_s: When the last member of the last attempt was out.
        num_stuck: Failed attempts in a row without a new committed step.
        num_undecided: Undecided hangs in a row without a step between.
        cause: Why the last attempt ended or is ending; None before.
        also: Faults that were found while it ended and that the cause does not explain.
        stop_reason: Why the user wants the run to stop; "" if not.
        deadline_s: Bound of the phase; infinity if it has none.
        enough_since_s: When ``min_workers`` could first be had; infinity before (first attempt).
        waiting_since_s: When the phase WAITING was entered.
        hold_until_s: No attempt starts before then: the last ones failed without progress.
        surveying_until_s: Bound of the survey after a restart; infinity if none is under way.
        newcomer_since_s: When a worker that the attempt lacks first became usable; infinity: none.
        trained_since_s: When the current attempt completed its first step.
        down_since_s: When training last stopped; infinity while it trains.
        pause_s: Measured duration of the last re-formation; 0.0 if there was none.
        step_s: Smoothed duration of a step; 0.0 before the first.
        workers: By number: the 7 of ``w0007``.
        slots: By number.
        nodes: By order of first appearance.
        node_ids: Number of a node by its name.
        short: Nodes that lack worker processes, or have too many.
        num_slots: Pending ones, and granted ones on nodes that stay.
        num_usable: Workers that could train, on nodes that stay.
        num_leaving: Workers that could train, on draining nodes.
        num_starting: Processes that are starting.
        num_failed_starts: Processes that died at start in a row before any got ready.
        failed_start: What was said of the last of them.
        next_worker: Number of the next worker.
        next_slot: Number of the next slot.
        wake_s: Earliest time at which a bound of a worker, node or slot may be reached.
        reason: Why the run is over; "" before.
    """

    phase: Phase = Phase.WAITING
    life: int = 0
    attempt: int = 0
    lineage: tuple[tuple[int, int], ...] = ()
    layout: ParallelLayout | None = None
    members: tuple[int, ...] = ()
    num_inside: int = 0
    num_unformed: int = 0
    step: int = 0
    stepped: bool = False
    known: tuple[int, int] = (0, 0)
    known_in_memory: bool = False
    known_at_start: tuple[int, int] = (0, 0)
    left_step: int = -1
    yield_asked: bool = False
    yielded_step: int = -1
    completed: bool = False
    num_reads: int = 0
    reads_pending: int = 0
    read_final_from: int = 0
    read_memory_from: int = 0
    read_bad_from: int = 0
    read_seen: bool = False
    lost: tuple[int, ...] = ()
    bad: tuple[Source, ...] = ()
    num_bad_at_start: int = 0
    unread: tuple[Source, ...] = ()
    unread_before: tuple[Source, ...] = ()
    judged: bool = False
    raised: tuple[UserError, ...] = ()
    raised_before: tuple[UserError, ...] = ()
    faults: tuple[Fault, ...] = ()
    fenced_s: float = 0.0
    num_stuck: int = 0
    num_undecided: int = 0
    cause: Cause | None = None
    also: tuple[Cause, ...] = ()
    stop_reason: str = ""
    deadline_s: float = inf
    enough_since_s: float = inf
    waiting_since_s: float = 0.0
    hold_until_s: float = 0.0
    surveying_until_s: float = inf
    newcomer_since_s: float = inf
    trained_since_s: float = 0.0
    down_since_s: float = inf
    pause_s: float = 0.0
    step_s: float = 0.0
    workers: Table[Worker] = field(default_factory=Table)
    slots: Table[Slot] = field(default_factory=Table)
    nodes: Table[Node] = field(default_factory=Table)
    node_ids: dict[str, int] = field(default_factory=dict)
    short: tuple[int, ...] = ()
    num_slots: int = 0
    num_usable: int = 0
    num_leaving: int = 0
    num_starting: int = 0
    num_failed_starts: int = 0
    failed_start: str = ""
    next_worker: int = 1
    next_slot: int = 1
    wake_s: float = inf
    reason: str = ""

    def __eq__(self, other: object) -> bool:
        """Return whether every field is equal, be it frozen or not."""
        return isinstance(other, Draft) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        """A state holds tables, which are not hashable."""
        raise TypeError("a run state is not hashable")


class RunState(Draft):
    """The run as a value. ``RunState()`` is the state before the first event."""

    def __init__(self) -> None:
        self.__dict__.update(Draft().__dict__)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        """Refuse: a state is a value."""
        raise FrozenInstanceError(f"cannot assign to field {name!r} of a run state")


def thaw(state: RunState) -> Draft:
    """Return a draft that starts as ``state``; the state stays as it is."""
    # Not by the constructor: to pass 60 arguments takes longer than most events.
    draft = object.__new__(Draft)
    draft.__dict__.update(state.__dict__)
    return draft


def freeze(draft: Draft) -> RunState:
    """Turn ``draft`` into a state; the draft must not be used any more."""
    draft.__class__ = RunState
    assert isinstance(draft, RunState)
    return draft


def next_deadline_s(state: RunState) -> float:
    """Return the earliest ``at_s`` at which a ``Ticked`` may do something; infinity if none."""
    if state.phase in TERMINAL:
        return inf
    if state.surveying_until_s != inf:
        return state.surveying_until_s
    return min(state.deadline_s, state.wake_s)


# Every event names a worker, and a run has few.
@lru_cache(maxsize=1 << 14)
def worker_name(number: int) -> str:
    """Return ``w0007`` for 7."""
    return f"w{number:04d}"


@lru_cache(maxsize=1 << 14)
def worker_number(name: str) -> int:
    """Return 7 for ``w0007``, and -1 for what no machine has named."""
    return int(name[1:]) if name[:1] == "w" and name[1:].isdecimal() else -1


def describe(state: RunState) -> dict[str, Any]:
    """Return what ``everstep status`` shows, as JSON values.

    Keys: ``phase, attempt, step, committed_step, layout, members[{rank, worker, node, pid,
    state}], standbys[{worker, node, pid, state}], nodes[{node, state, slots}], pending_slots,
    cause{kind, guilty, evidence, at_s} | null, reason``. A ``pid`` is null before it is known.
    """
    ranks = {number: rank for rank, number in enumerate(state.members)}
    members: list[dict[str, Any]] = []
    standbys: list[dict[str, Any]] = []
    for number, worker in state.workers.items():
        entry = {
            "worker": worker.name,
            "node": state.nodes[worker.node].name,
            "pid": worker.pid or None,
            "state": _worker_state(worker),
        }
        if number in ranks and worker.slot:
            members.append({"rank": ranks[number], **entry})
        else:
            standbys.append(entry)
    cause = state.cause
    return {
        "phase": str(state.phase),
        "attempt": state.attempt,
        "step": _last_step(state),
        "committed_step": state.known[0],
        "layout": str(state.layout) if state.layout else "",
        "members": sorted(members, key=lambda member: member["rank"]),
        "standbys": standbys,
        "nodes": [_describe_node(node) for node in state.nodes.values()],
        "pending_slots": [number for number, slot in state.slots.items() if slot.node < 0],
        "cause": None
        if cause is None
        else {
            "kind": cause.kind,
            "guilty": list(cause.guilty),
            "evidence": cause.evidence,
            "at_s": cause.at_s,
        },
        "reason": state.reason,
    }


def _last_step(state: RunState) -> int:
    """Return the last completed step; whoever leaves does so before its last steps are reported."""
    step, attempt = state.known
    return max(state.step, step) if attempt == state.attempt else state.step


def _worker_state(worker: Worker) -> str:
    if worker.inside and worker.status is WorkerStatus.READY:
        return "training" if worker.formed else "forming"
    return str(worker.status)


def _describe_node(node: Node) -> dict[str, Any]:
    status = "draining" if node.draining else "alive"
    return {
        "node": node.name,
        "state": status if node.alive else "lost",
        "slots": list(node.slots),
    }


__all__ = [
    "ACTIVE",
    "TERMINAL",
    "Cause",
    "Draft",
    "Node",
    "Phase",
    "RunState",
    "Slot",
    "Worker",
    "WorkerStatus",
    "describe",
    "freeze",
    "next_deadline_s",
    "thaw",
    "worker_number",
]
