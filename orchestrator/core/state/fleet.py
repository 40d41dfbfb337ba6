"""The machines of the run: nodes, reservations on them, worker processes."""

from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from math import inf
from typing import NamedTuple

from orchestrator.core.state.frozen import Frozen, StatePart
from orchestrator.core.state.table import Table
from orchestrator.policies import Rooms, num_workers


class WorkerStatus(StrEnum):
    """The state of a worker process. A DYING one was killed and may still exist."""

    STARTING = "starting"
    READY = "ready"
    DYING = "dying"


class Worker(NamedTuple):
    """One worker process."""

    name: str  #: As the shell knows it, ``w0007``.
    node: int
    status: WorkerStatus
    deadline_s: float = inf  #: STARTING: be ready by then. DYING: be gone by then.
    pid: int = 0  #: Process id, 0 before it was ready.
    begun_s: float = 0.0  #: When it was ordered to start, or when the controller last restarted.


def is_dying(worker: Worker) -> bool:
    """Return whether a worker was killed and is not known to be gone."""
    return worker.status is WorkerStatus.DYING


class Reservation(NamedTuple):
    """One reservation."""

    node: int  #: Number of its node, -1 while it is pending.
    avoid: tuple[str, ...]  #: Nodes that it must not be placed on, while it is pending.
    alternative: int = 0  #: Which capacity was requested; 0 is the user's first choice.


def is_pending(reservation: Reservation) -> bool:
    """Return whether a reservation is not granted yet."""
    return reservation.node < 0


class Offer(NamedTuple):
    """The requests for one alternative of capacity."""

    num_pending: int = 0  #: Requests that are not granted.
    num_granted: int = 0  #: Reservations of it that the run has.
    #: Since when requests are pending without a grant; infinity if none is pending.
    since_s: float = inf
    refused_s: float = inf  #: When they were counted as refused; infinity if they are not.
    #: The longest recent time until a machine was granted; 0.0 before the first.
    took_s: float = 0.0
    why: str = ""  #: Why they were last refused, for people.


class Slow(NamedTuple):
    """The worker on a node that was convicted as slow; its name is "" if none was."""

    worker: str = ""
    verdict: str = ""  #: Kind of the suspicion.
    evidence: str = ""  #: One line for people.


class Node(NamedTuple):
    """One node."""

    name: str  #: As the shell knows it.
    alive: bool = True  #: Whether it is in the cluster.
    reservations: tuple[int, ...] = ()  #: Reservations granted here, ascending.
    workers: tuple[int, ...] = ()  #: Processes here, ascending.
    usable: int = 0  #: Workers that could train here: ready ones, at most one per reservation.
    leave_by_s: float = inf  #: Deadline of a drain notice; infinity if there is none.
    strikes: tuple[float, ...] = ()  #: When workers provably failed here, within the window.
    avoid_until_s: float = 0.0  #: No new reservations here before this time.
    avoided_s: float = 0.0  #: For how long it was avoided the last time.
    retry_s: float = 0.0  #: No new process here before this time.
    num_failed_starts: int = 0  #: In a row.
    rack: str = ""  #: Rack or zone, whose nodes fail together; "" if unknown.
    #: Its keeper died and must be back by this time; infinity if it is up.
    keeper_by_s: float = inf
    #: Bytes of its memory that snapshots may use; 0 until its keeper reports them.
    budget_bytes: int = 0
    is_kept: bool = False  #: Whether it has a keeper that was not ended.
    joined_s: float = 0.0  #: When it last joined the cluster.
    #: The worker that was convicted as slow here. The run leaves the node as if the provider took
    #: it, and uses it again after ``leave_by_s``.
    slow: Slow = Slow()
    notice: str = ""  #: The drain notice, for people.

    @property
    def is_slow(self) -> bool:
        """Return whether the run leaves the node because of a slow worker."""
        return self.slow.worker != ""

    @property
    def draining(self) -> bool:
        """Return whether the run must leave the node, mostly because the provider takes it."""
        return self.leave_by_s != inf

    @property
    def is_taken(self) -> bool:
        """Return whether the provider takes the node back."""
        return self.draining and not self.is_slow

    def is_due(self, now_s: float, lead_s: float) -> bool:
        """Return whether the provider takes the node within ``lead_s`` of now, earlier or later.

        A provider that has not taken it after that may never do so.
        """
        return self.leave_by_s - lead_s <= now_s < self.leave_by_s + lead_s and self.is_taken


@dataclass(eq=False)
class Fleet(StatePart):
    """All nodes, reservations and workers, and counts of them."""

    workers: Table[Worker] = field(default_factory=Table)  #: By number: the 7 of ``w0007``.
    reservations: Table[Reservation] = field(default_factory=Table)  #: By number.
    #: By number of a worker, the reservation that it uses. Only members have one.
    bound: Table[int] = field(default_factory=Table)
    nodes: Table[Node] = field(default_factory=Table)  #: By order of first appearance.
    node_ids: dict[str, int] = field(default_factory=dict)  #: Number of a node by its name.
    short: tuple[int, ...] = ()  #: Nodes to check for missing or surplus worker processes.
    #: Nodes with a keeper that lost their last reservation or worker.
    emptied: tuple[int, ...] = ()
    #: By alternative of capacity, up to the last one that was requested.
    offers: tuple[Offer, ...] = ()
    num_reservations: int = 0  #: Pending ones, and granted ones on nodes that stay.
    staying: Rooms = ()  #: Workers that could train, on nodes that stay.
    leaving: Rooms = ()  #: Workers that could train, on draining nodes.
    num_starting: int = 0  #: Processes that are starting.
    num_failed_starts: int = 0  #: Processes in a row that died at start before any got ready.
    failed_start: str = ""  #: Why the last of them died, for people.
    next_worker: int = 1
    next_reservation: int = 1
    #: Earliest time at which a bound of a worker, node or reservation may be reached.
    wake_s: float = inf

    @property
    def num_usable(self) -> int:
        """Return how many workers could train, on nodes that stay."""
        return num_workers(self.staying)


class FrozenFleet(Frozen, Fleet):
    """A fleet as a value."""


# Every event names a worker, and the largest runs have 80,000.
@lru_cache(maxsize=1 << 17)
def worker_name(number: int) -> str:
    """Return ``w0007`` for 7."""
    return f"w{number:04d}"


@lru_cache(maxsize=1 << 17)
def worker_number(name: str) -> int:
    """Return 7 for ``w0007``; -1 if it is not the name of a worker."""
    return int(name[1:]) if name[:1] == "w" and name[1:].isdecimal() else -1
