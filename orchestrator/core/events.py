"""Facts about the world, in the past tense.

The shell makes events, the journal keeps them, and ``machine.step`` folds them. An event of an
attempt names the attempt.
"""

from enum import StrEnum

from orchestrator.core.state import Pair, SlowLink
from orchestrator.core.values import value
from orchestrator.diagnosis import Suspicion
from orchestrator.policies import FaultsSeen, Share
from workers.protocol import SaveCosts, Source

#: In ``WorkersSurveyed``: the attempt of a living worker that did not answer in time.
UNKNOWN_ATTEMPT = -1


@value
class Event:
    """A fact that ``machine.step`` folds."""

    at_s: float  #: When it happened, on the run's clock.


@value
class ControllerStarted(Event):
    """A controller process started; from incarnation 2 on, it has folded the journal.

    The machine answers with ``SurveyWorkers`` if an earlier incarnation started the run.
    """

    incarnation: int


@value
class RunResumed(Event):
    """The user resumed a run that was over or had lost its cluster, perhaps with other settings.

    It replaces ``ControllerStarted`` as the first event of its incarnation. Folding starts here:
    the event carries what the run still needs from before.
    """

    incarnation: int
    attempt: int  #: The number of the last attempt.
    #: ``(attempt, resume_step)`` of every attempt so far, oldest first.
    lineage: tuple[tuple[int, int], ...]
    bad: tuple[Source, ...]  #: Sources that must not be loaded.
    next_worker: int  #: Number of the next worker; names are never reused.
    next_reservation: int
    why: str  #: One line for people: how the run had ended.
    faults_seen: FaultsSeen = FaultsSeen()
    stored: int = 0  #: As ``MutableRunState.stored``.


@value
class WorkersSurveyed(Event):
    """The living workers and reservations were found after a controller restart."""

    #: ``(worker, node, attempt)`` of each living worker, also of starting ones. The attempt is 0 if
    #: it is in none, ``UNKNOWN_ATTEMPT`` if it did not answer.
    alive: tuple[tuple[str, str, int], ...]
    #: ``(reservation, node)`` of each granted reservation that still exists.
    reservations: tuple[tuple[int, str], ...]
    pending_reservations: tuple[int, ...]  #: Reservations that are still requested.


@value
class NodeJoined(Event):
    """A node with room for workers is in the cluster; ``rack`` is as in ``Node``."""

    node: str
    rack: str = ""


@value
class NodeLost(Event):
    """A node with its workers and reservations is gone, or was silent for too long."""

    node: str
    cause: str


@value
class NodeDraining(Event):
    """The provider takes the node back at ``deadline_s``, on the clock of ``at_s``.

    A later notice for the node replaces this one. A deadline of infinity withdraws it. ``notice``
    says for people where the notice came from.
    """

    node: str
    deadline_s: float
    notice: str = ""


@value
class ControllerDraining(Event):
    """The controller's machine is taken at ``deadline_s``, perhaps with the head of the cluster.

    A later notice replaces this one. A deadline of infinity withdraws it. ``notice`` says for
    people where the notice came from.
    """

    deadline_s: float
    notice: str = ""


@value
class KeeperReady(Event):
    """The keeper of a node answers, for the first time or again."""

    node: str


@value
class KeeperDied(Event):
    """The keeper of a living node ended; Ray restarts it there."""

    node: str
    detail: str


@value
class KeeperSilent(Event):
    """The keeper of a node accepts calls, but has not answered or reported for ``silent_s``.

    With ``is_awaited``, no member makes progress, and a worker of the node answers.
    """

    node: str
    silent_s: float
    is_awaited: bool = False


@value
class OthersSeen(Event):
    """The other runs on the cluster reported what they hold and lack; ``run`` is our id."""

    run: str
    others: tuple[Share, ...]


@value
class ReservationGranted(Event):
    """``reservation`` was placed on ``node``: one worker can run there."""

    reservation: int
    node: str


@value
class CapacityRefused(Event):
    """The provider has no machine for an alternative of capacity; ``why`` quotes it."""

    alternative: int
    why: str


@value
class WorkerReady(Event):
    """A worker process is up and has imported torch; it is a standby until it is assigned."""

    worker: str
    node: str
    pid: int


@value
class WorkerExited(Event):
    """The process of ``worker`` is gone."""

    worker: str
    #: "crash" (its process died), "out_of_memory" (it ran out of memory), "node" (its node died),
    #: "killed" (we killed it), "preempted" (its node had been given notice).
    cause: str
    detail: str  #: One line for people.


@value
class WorkerFormed(Event):
    """``worker`` has built its mesh and model in ``attempt`` and has loaded its state."""

    attempt: int
    worker: str
    form_s: float = 0.0  #: How long mesh and model took; 0.0 if it was not measured.
    load_s: float = 0.0  #: How long loading took.
    #: ``(source, bytes)`` loaded, by kind of source.
    sources: tuple[tuple[str, int], ...] = ()
    #: Sources that were found damaged; the part was loaded from other holders.
    damaged: tuple[Source, ...] = ()
    skipped: tuple[str, ...] = ()  #: One line for people for each source that failed.
    #: Members that formed with it. The other fields hold for each; ``sources`` is the sum of all.
    others: tuple[str, ...] = ()


@value
class StepCompleted(Event):
    """Every rank of ``attempt`` finished ``step``, which counts unless it is redone.

    ``stored`` is the newest step that the attempt is known to have committed to storage, or 0.
    """

    attempt: int
    step: int
    step_s: float
    stored: int = 0


@value
class CheckpointCommitted(Event):
    """The checkpoint of ``step`` written by ``attempt`` has its manifest."""

    attempt: int
    step: int


class Leaving(StrEnum):
    """How a worker left an attempt."""

    COMPLETED = "completed"
    YIELDED = "yielded"
    FENCED = "fenced"
    #: A collective failed while it took part.
    PEER_LOST = "peer_lost"
    #: It, or a peer, could not load the version to resume from.
    UNLOADABLE = "unloadable"


@value
class WorkerLeft(Event):
    """``worker`` has left ``attempt`` and will write nothing more in it; its process lives."""

    attempt: int
    worker: str
    how: Leaving
    step: int  #: The last step it completed.
    #: One line for people; with ``COMPLETED`` why the script stopped before the last step.
    detail: str
    #: Sources of the version to resume from whose bytes differ from those that were written.
    damaged: tuple[Source, ...] = ()
    #: Sources of the version to resume from that could not be read this time.
    unread: tuple[Source, ...] = ()
    skipped: tuple[str, ...] = ()  #: One line for people for each source that failed.
    #: With ``PEER_LOST``: the node that its transport could not reach; "" if it named none.
    unreached: str = ""
    told: str = ""  #: With ``YIELDED``: what ordered its process to end; "" if nothing did.
    others: tuple[str, ...] = ()  #: Members that left with it; the other fields hold for each.


@value
class WorkerRaised(Event):
    """The training code of ``worker`` raised; the process lives and has left the attempt.

    ``refuses`` says why the attempt's layout cannot train, "" if it can. ``ranks`` are the ranks
    whose numbers are not finite, or differ. See ``protocol.Raised``.
    """

    attempt: int
    worker: str
    step: int
    error: str
    traceback: str
    refuses: str = ""
    ranks: tuple[int, ...] = ()
    sound_step: int = -1


@value
class NotFiniteFound(Event):
    """A loss, a gradient or an evaluation is not finite; the attempt continues."""

    attempt: int
    step: int
    number: int  #: Counts these in the attempt, from 1.
    evidence: str  #: One line for people.
    ranks: tuple[int, ...] = ()  #: The ranks that it comes from; empty if unknown.


@value
class HangFound(Event):
    """The detector reached a verdict on an attempt that makes no progress."""

    attempt: int
    #: Workers proven to hold up the others; empty if undecided.
    guilty: tuple[str, ...]
    evidence: str  #: One line for people: the rule that fired and the numbers.
    #: Whether ranks are proven to have called different collectives. No faulty machine causes that,
    #: and it would happen again.
    is_program: bool = False
    rule: str = ""  #: Name of the rule that fired.
    verdict: str = ""  #: Kind of the verdict, as ``orchestrator.diagnosis`` names it.
    #: Ranks whose calls differ from the majority's: the program is to blame, not a machine.
    at_odds: tuple[int, ...] = ()
    #: Workers in ``guilty`` that may only be busy: their nodes get no strike.
    maybe_well: tuple[str, ...] = ()


@value
class Suspected(Event):
    """The suspicions changed. Nothing is proven, and the attempt continues."""

    attempt: int
    suspects: tuple[Suspicion, ...]  #: All current suspicions; empty once there are none.
    usual_step_s: float = 0.0  #: Median duration of a step before them; 0.0 if none was seen.


@value
class AttemptStalled(Event):
    """Every member has waited unusually long for others, or a link looks dead; no proof."""

    attempt: int
    waited_s: float


@value
class StartsAdvanced(Event):
    """Processes that are not ready yet have used CPU since the last check: they load modules."""

    workers: tuple[str, ...]  #: The processes that used CPU.


@value
class MembersAtWork(Event):
    """Members of a fenced attempt compute and so have not left yet."""

    attempt: int
    #: All members that compute now. Other members that are still inside are stuck.
    workers: tuple[str, ...]


@value
class LinksProbed(Event):
    """Keepers tried to reach one another."""

    number: int  #: Number of the ``ProbeLinks`` that this answers.
    #: Nodes whose keepers answered; ways from other nodes are unknown.
    heard: tuple[str, ...]
    lost: tuple[Pair, ...] = ()  #: ``(from, to)`` of each way that has no connection.
    pairs: tuple[Pair, ...] = ()


@value
class LinksTimed(Event):
    """Keepers timed transfers between nodes of an attempt whose links seemed slow."""

    attempt: int
    nodes: tuple[str, ...]  #: The nodes that were timed.
    slow: tuple[SlowLink, ...] = ()  #: The links, senders and receivers that are slow.
    #: Estimated step time without the slow links, divided by the current step time.
    step_ratio: float = 1.0


@value
class TrafficMeasured(Event):
    """The records of the attempt's collectives show how much a step sends."""

    attempt: int
    #: ``(axis, bytes)`` that a rank sends in a step, the mean of all ranks.
    sent: tuple[tuple[str, float], ...]


@value
class CommittedRead(Event):
    """Keepers and storage reported which version to resume from after ``attempt``."""

    attempt: int
    step: int  #: 0 if nothing was ever committed.
    committed_by: int  #: The attempt that committed it, 0 with ``step`` 0.
    skipped: tuple[str, ...]  #: Names of damaged or incomplete versions that were skipped.
    number: int = 0  #: Number of the ``ReadCommitted`` that this answers; 0 is the newest.
    source: str = ""  #: "memory", "storage", or "" with ``step`` 0.
    #: With ``step`` 0: committed steps, newest first, that no source can serve.
    lost: tuple[int, ...] = ()
    #: Living nodes whose keepers are restarting or late, and may hold newer versions.
    returning: tuple[str, ...] = ()
    #: The newest step in storage that counts and is not bad; -1 if storage was not read.
    stored: int = -1
    #: Newer steps that were committed there but are damaged.
    damaged: tuple[int, ...] = ()


@value
class MemoryMeasured(Event):
    """Keepers reported how much memory they have for snapshots, and how large these are."""

    #: ``(node, bytes)`` that snapshots may take, for each keeper that reported it.
    budgets: tuple[tuple[str, int], ...]
    state_bytes: int  #: Size of one version over all ranks; 0 if none is held yet.


@value
class MemoryProtected(Event):
    """The nodes of ``attempt`` hold a version of it that survives the configured losses."""

    attempt: int


@value
class SavesMeasured(Event):
    """Rank 0 of ``attempt`` reported what recent steps and saves cost."""

    attempt: int
    costs: SaveCosts


@value
class StopRequested(Event):
    """The user asked the run to stop after ``step``, or at the next boundary if it is 0."""

    reason: str
    step: int = 0


@value
class WorkersSet(Event):
    """The user asked for at most ``num`` workers from now on."""

    num: int


@value
class SaveRequested(Event):
    """The user asked to store the newest step in memory. Only the journal uses it."""


@value
class FaultInjected(Event):
    """We injected a fault. Only the journal uses it."""

    fault: str
    target: str


@value
class Ticked(Event):
    """Time passed; deadlines in the state are compared with ``at_s``."""
