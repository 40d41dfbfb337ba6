"""Orders to the shell, in the imperative. The shell reports back by events."""

from orchestrator.core.state import Pair, RunOutcome, worker_name
from orchestrator.core.values import value
from orchestrator.policies import RedundancyPlan
from ucp_core.layout import ParallelLayout
from workers.protocol import Pace, Source


@value
class Action:
    """An order of ``machine.step``."""


@value
class RequestReservation(Action):
    """Reserve room for one worker (a placement group). The autoscaler sees pending ones as demand.

    ``ReservationGranted`` answers, perhaps much later. ``avoid`` lists nodes where it must not be
    placed. ``alternative`` is the index of the capacity in the user's order, and ``usd_per_hour``
    its price.
    """

    reservation: int
    avoid: tuple[str, ...]
    alternative: int = 0
    usd_per_hour: float = 0.0


@value
class ReleaseReservation(Action):
    """Release the reservation, granted or pending."""

    reservation: int


@value
class NoteRefused(Action):
    """Record that ``num_reservations`` requests for an alternative were not granted.

    The action only adds a line to the journal. The requests stay open while the run requests the
    next alternative as well. ``why`` is one line for people.
    """

    alternative: int
    num_reservations: int
    why: str


@value
class StartWorker(Action):
    """Start a worker process on ``node``; answered by ``WorkerReady`` or ``WorkerExited``."""

    worker: str
    node: str


@value
class KillWorker(Action):
    """SIGKILL the process of ``worker``; answered by ``WorkerExited``."""

    worker: str
    reason: str


@value
class StartKeeper(Action):
    """Start a keeper on ``node``, or find the running one; answered by ``KeeperReady``."""

    node: str


@value
class EndKeeper(Action):
    """End the keeper on ``node`` and free its memory: the run has nothing else there."""

    node: str


@value
class RestartKeeper(Action):
    """Kill the process of a keeper, so that Ray restarts it; its memory outlives the process."""

    node: str
    reason: str


@value
class GiveUpNode(Action):
    """Treat ``node`` as lost. If it still answers, the shell reports it as a new node later."""

    node: str
    reason: str


@value
class FenceAttempt(Action):
    """Abort ``attempt`` in ``workers``; each answers with ``WorkerLeft`` or ``WorkerExited``.

    Idempotent: after a restart the controller sends it again to workers that are still inside.
    """

    attempt: int
    workers: tuple[str, ...]
    reason: str


@value
class CollectEvidence(Action):
    """Collect stacks and records of the workers of ``attempt`` on ``nodes``, also of dead ones.

    The shell stores them with the attempt's incident. If ``is_awaited``, kills that were ordered in
    the same transition wait for the evidence, for a bounded time: a kill destroys what shows why
    the attempt hung. A fence need not wait: workers write their stacks before they obey it.
    """

    attempt: int
    nodes: tuple[str, ...]
    is_awaited: bool


@value
class YieldAttempt(Action):
    """Ask ``workers`` to leave ``attempt`` at the next step boundary, with that step committed.

    ``durable`` asks for a commit in storage; otherwise one in memory is enough.
    """

    attempt: int
    workers: tuple[str, ...]
    reason: str
    durable: bool = True


@value
class ReadCommitted(Action):
    """Find the version to resume from, in memory and storage, after ``attempt``.

    ``lineage`` (attempt, resume_step) says which commits of old attempts still count. Sources in
    ``bad`` must not be loaded. Versions on nodes in ``unreached`` cannot be loaded, because a
    member has no connection to them. ``CommittedRead`` with the same ``number`` answers; numbers
    count up over the run.
    """

    attempt: int
    lineage: tuple[tuple[int, int], ...]
    number: int = 0
    bad: tuple[Source, ...] = ()
    unreached: tuple[str, ...] = ()


@value
class ProbeLinks(Action):
    """Have keepers find out which nodes reach each other; ``LinksProbed`` answers."""

    number: int  #: Numbers count up over the run.
    nodes: tuple[str, ...] = ()  #: Probe all pairs of these, both ways.
    pairs: tuple[Pair, ...] = ()  #: Probe these pairs as well, both ways.


@value
class StartAttempt(Action):
    """Start ``attempt`` with ``members`` from ``resume_step``.

    ``placed`` is ``(node, numbers of workers, their reservations)`` in rank order: the largest runs
    have 80,000 members on 10,000 nodes. ``bad`` and ``unreached`` are as in ``ReadCommitted``.
    Members and keepers protect snapshots by ``plan``. ``other_layouts`` lists the layouts that were
    not chosen, each with the reason.
    """

    attempt: int
    placed: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    layout: ParallelLayout
    resume_step: int
    resume_attempt: int
    lineage: tuple[tuple[int, int], ...]
    bad: tuple[Source, ...] = ()
    plan: RedundancyPlan = RedundancyPlan()
    unreached: tuple[str, ...] = ()
    other_layouts: tuple[tuple[str, str], ...] = ()

    @property
    def members(self) -> tuple[tuple[str, str, int], ...]:
        """Return ``(worker, node, reservation)`` of each member, in rank order."""
        return tuple(
            (worker_name(worker), node, reservation)
            for node, workers, reservations in self.placed
            for worker, reservation in zip(workers, reservations, strict=True)
        )


@value
class OrderKeepers(Action):
    """Tell the keepers how to protect the snapshots of ``attempt`` from now on.

    ``nodes`` are the nodes of its members, by rank. Keepers must drop the sources in ``bad``.
    """

    attempt: int
    lineage: tuple[tuple[int, int], ...]
    nodes: tuple[str, ...]
    plan: RedundancyPlan
    bad: tuple[Source, ...] = ()


@value
class SetCadence(Action):
    """Set the save intervals of ``attempt``. ``worker``, its rank 0, passes them to all members.

    ``reason`` is one line for people.
    """

    attempt: int
    worker: str
    pace: Pace
    reason: str


@value
class ReportIncident(Action):
    """Record why ``attempt`` ended.

    The action only adds a line to the journal. After an incident of kind not_finite the attempt may
    continue.
    """

    attempt: int
    incident: str  #: A value of ``FaultKind``.
    guilty: tuple[str, ...]  #: Workers proven to have caused it.
    evidence: str  #: One line for people.
    found_s: float  #: When it was found, or when the members were asked to leave.
    fenced_s: float  #: When the last member had left.
    rule: str = ""  #: The rule of detection that found it; "" if none did.
    #: The verdict's kind as ``orchestrator.diagnosis`` names it; "" if there is none.
    verdict: str = ""
    #: (rank, worker, node) of each rank that it comes from; empty if that is not known.
    places: tuple[tuple[int, str, str], ...] = ()
    #: The same for each member that did not leave in time when fenced and was killed.
    killed: tuple[tuple[int, str, str], ...] = ()


@value
class SurveyWorkers(Action):
    """Find the living workers and reservations after a restart; ``WorkersSurveyed`` answers."""

    attempt: int


@value
class FinishRun(Action):
    """The run is over: release everything and write the summary."""

    outcome: RunOutcome
    #: One line. A user error's traceback comes before it if that made the run fail.
    reason: str
