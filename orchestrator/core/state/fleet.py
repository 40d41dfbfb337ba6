"""The machines of the run: nodes, reservations on them, worker processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from math import inf
from typing import NamedTuple

from orchestrator.core.state.frozen import Frozen, Part
from orchestrator.core.state.table import Table
from orchestrator.policies import Rooms, num_workers


class WorkerStatus(StrEnum):
    """A worker process: starting, able to be assigned, or killed and not yet known to be gone."""

    STARTING = "starting"
    READY = "ready"
    DYING = "dying"


class Worker(NamedTuple):
    """One worker process.

    Attributes:
        name: As the shell knows it, ``w0007``.
        deadline_s: STARTING: be ready by then. DYING: be gone by then.
        reservation: The reservation it uses, 0 if none.
        inside: Whether it is in the current attempt and has not left it.
        formed: Whether it has formed in the current attempt.
        pid: Process id, 0 before it was ready.
        begun_s: When it was ordered to start.
    """

    name: str
    node: int
    status: WorkerStatus
    deadline_s: float = inf
    reservation: int = 0
    inside: bool = False
    formed: bool = False
    pid: int = 0
    begun_s: float = 0.0


class Reservation(NamedTuple):
    """One reservation.

    Attributes:
        node: Number of its node, -1 while it is pending.
        avoid: Nodes that it was not to be on.
        alternative: Which capacity was asked for; 0 is what the user likes best.
    """

    node: int
    avoid: tuple[str, ...]
    alternative: int = 0


class Offer(NamedTuple):
    """What became of the requests for one alternative of capacity.

    Attributes:
        num_pending: Requests that are not granted.
        num_granted: Reservations of it that the run has.
        since_s: Since when some are pending and none is granted; infinity if none is pending.
        refused_s: When they were taken for refused; infinity if they are not.
        took_s: How long a machine took to come, the longest of late; 0.0 if none came yet.
        why: Why they were refused, for people; of the last time.
    """

    num_pending: int = 0
    num_granted: int = 0
    since_s: float = inf
    refused_s: float = inf
    took_s: float = 0.0
    why: str = ""


class Slow(NamedTuple):
    """The worker that was convicted of being slow on a node; "" if none was.

    Attributes:
        verdict: Kind of the suspicion.
        evidence: One line for people.
    """

    worker: str = ""
    verdict: str = ""
    evidence: str = ""


class Node(NamedTuple):
    """One node.

    Attributes:
        name: As the shell knows it.
        alive: Whether it is in the cluster.
        reservations: Reservations granted here, ascending.
        workers: Processes here, ascending.
        usable: Workers that could train here: ready ones, at most one per reservation.
        leave_by_s: Deadline of a drain notice; infinity if there is none.
        strikes: When workers provably failed here, within the window.
        avoid_until_s: No new reservations here before then.
        avoided_s: For how long it was avoided the last time.
        retry_s: No new process here before then.
        num_failed_starts: In a row.
        rack: What it fails together with; "" if nothing is known.
        keeper_by_s: Its keeper died and must be back by then; infinity if it did not die.
        budget_bytes: What snapshots may take of its memory; 0 if its keeper has not said it.
        is_kept: Whether there is a keeper, or one was started, that was not ended.
        joined_s: When it was first, or again, in the cluster.
        slow: The worker that was convicted of being slow here: the run leaves the node as if the
            provider took it, and uses it again after ``leave_by_s``.
        notice: The drain notice, for people.
    """

    name: str
    alive: bool = True
    reservations: tuple[int, ...] = ()
    workers: tuple[int, ...] = ()
    usable: int = 0
    leave_by_s: float = inf
    strikes: tuple[float, ...] = ()
    avoid_until_s: float = 0.0
    avoided_s: float = 0.0
    retry_s: float = 0.0
    num_failed_starts: int = 0
    rack: str = ""
    keeper_by_s: float = inf
    budget_bytes: int = 0
    is_kept: bool = False
    joined_s: float = 0.0
    slow: Slow = Slow()
    notice: str = ""

    @property
    def is_slow(self) -> bool:
        """Return whether the run leaves the node for a slow worker."""
        return self.slow.worker != ""

    @property
    def draining(self) -> bool:
        """Return whether the run is to leave the node, mostly as the provider takes it back."""
        return self.leave_by_s != inf

    @property
    def is_taken(self) -> bool:
        """Return whether the provider takes the node back."""
        return self.draining and not self.is_slow

    def is_due(self, now_s: float, lead_s: float) -> bool:
        """Return whether the provider takes the node about now, ``lead_s`` more or less.

        One that has not come by then may never come.
        """
        return self.is_taken and self.leave_by_s - lead_s <= now_s < self.leave_by_s + lead_s


@dataclass(eq=False)
class Fleet(Part):
    """All nodes, reservations and workers, and the counts that are kept of them.

    Attributes:
        workers: By number: the 7 of ``w0007``.
        reservations: By number.
        nodes: By order of first appearance.
        node_ids: Number of a node by its name.
        short: Nodes that lack worker processes, or have too many.
        emptied: Nodes with a keeper that lost their last reservation or worker.
        offers: By alternative of capacity, up to the last one that was asked for.
        num_reservations: Pending ones, and granted ones on nodes that stay.
        staying: Workers that could train, on nodes that stay.
        leaving: Workers that could train, on draining nodes.
        num_starting: Processes that are starting.
        num_failed_starts: Processes that died at start in a row before any got ready.
        failed_start: What was said of the last of them.
        wake_s: Earliest time at which a bound of a worker, node or reservation may be reached.
    """

    workers: Table[Worker] = field(default_factory=Table)
    reservations: Table[Reservation] = field(default_factory=Table)
    nodes: Table[Node] = field(default_factory=Table)
    node_ids: dict[str, int] = field(default_factory=dict)
    short: tuple[int, ...] = ()
    emptied: tuple[int, ...] = ()
    offers: tuple[Offer, ...] = ()
    num_reservations: int = 0
    staying: Rooms = ()
    leaving: Rooms = ()
    num_starting: int = 0
    num_failed_starts: int = 0
    failed_start: str = ""
    next_worker: int = 1
    next_reservation: int = 1
    wake_s: float = inf

    @property
    def num_usable(self) -> int:
        """Return how many workers could train, on nodes that stay."""
        return num_workers(self.staying)


class FrozenFleet(Frozen, Fleet):
    """A fleet as a value."""


# Every event names a worker, and a run has few.
@lru_cache(maxsize=1 << 14)
def worker_name(number: int) -> str:
    """Return ``w0007`` for 7."""
    return f"w{number:04d}"


@lru_cache(maxsize=1 << 14)
def worker_number(name: str) -> int:
    """Return 7 for ``w0007``, and -1 for what no machine has named."""
    return int(name[1:]) if name[:1] == "w" and name[1:].isdecimal() else -1
