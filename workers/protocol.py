"""The messages between workers, keepers and the orchestrator.

Pure values. Every message names its attempt, so that a reader can drop messages of older attempts.
``workers.process`` and ``workers.keeper`` are on one side, ``orchestrator.shell`` on the other.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final, NamedTuple, TypeAlias

from ucp_core.layout import ParallelLayout
from workers.packed import packed

#: Time after which workers without a controller stop computing: trainers leave at a step boundary,
#: with that step in storage, and wait. A controller that died is back after 1 s. By default Ray
#: also ends the processes of a node after it has lost the head for this long (``lease_s``).
LEASE_S: Final = 60.0
#: Share of ``LEASE_S`` after which they begin to leave, because a long step and a commit take time.
LEAVE_SHARE: Final = 0.75

# Files that workers write in the run directory and others read.
#: The folder of committed versions.
CHECKPOINTS: Final = "checkpoints"
#: A line of JSON for each committed step.
METRICS: Final = "metrics/rank0.jsonl"
#: A line of JSON for each evaluation, and for each call of a script's ``session.log``.
VALIDATION: Final = "metrics/validation.jsonl"
VALUES: Final = "metrics/values.jsonl"
#: Output of scripts, a folder for each attempt and a log for each rank.
LOGS: Final = "logs"
#: Written by rank 0 when it completes the last step.
RESULT: Final = "result.json"
#: Written by rank 0 when the script ends the run before its last step: the version it ends with.
STOPPED: Final = "stopped.json"
#: Weights that scripts save by ``session.save``, a folder each.
SAVED: Final = "saved"

#: An export to Hugging Face has these beside the weights: configurations, tokenizer. Written once.
BESIDE: Final = "huggingface"

#: Written by rank 0 when the script's code after ``everstep.run`` has ended.
BEHIND: Final = "behind.json"

#: A source of a state: ``(step, attempt, node, arena, buffer, sequence)`` of a buffer in the memory
#: of a node; node and arena are "" for the version in storage.
Source: TypeAlias = tuple[int, int, str, str, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A complete version of one rank in a buffer of an arena."""

    buffer: int
    sequence: int  #: Number of writes to the buffer; a reader compares it before and after.
    attempt: int  #: The attempt that wrote it.
    step: int  #: The step after which the state was taken.
    rank: int  #: The rank in that attempt.
    world_size: int  #: The number of ranks in that attempt.
    data_bytes: int  #: Length of the data, at the start of the buffer's body.
    record_bytes: int  #: Length of the record, which follows the data.


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A rank's version that a parity was computed from."""

    rank: int
    data_bytes: int  #: Length of its data.
    record_bytes: int  #: Length of its record, which follows the data.

    @property
    def size_bytes(self) -> int:
        """Return the length of data and record."""
        return self.data_bytes + self.record_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Covered:
    """The parts that a node's parities of a version cover; see ``workers.parity.rebuild``."""

    tolerance: int  #: 1 or 2: how many nodes may be lost, and how many parities each keeps.
    place: int  #: The node's place in the group.
    members: tuple[Member | None, ...]  #: By place in the group; None for a node without a part.


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRef:
    """The content of a keeper's buffer: a rank's part of a version, or a node's parities of one."""

    node: str  #: Ray node id, hex.
    arena: str  #: Name of the arena on the node.
    held: Held  #: The content of one of its buffers; the rank is below 0 for parities.
    covered: Covered | None = None  #: For parities only.
    peer: Peer | None = None  #: Its keeper; the controller adds it for those who read.

    @property
    def is_copy(self) -> bool:
        """Return whether it is another node's snapshot, copied (``workers.keeper.arena_table``)."""
        return "/" in self.arena

    @property
    def source(self) -> Source:
        """Return the buffer as a source."""
        held = self.held
        return (held.step, held.attempt, self.node, self.arena, held.buffer, held.sequence)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """The versions that a keeper holds in memory."""

    node: str  #: Ray node id, hex.
    parts: tuple[PartRef, ...]  #: All complete versions in its arenas.
    parities: tuple[PartRef, ...] = ()  #: All complete parities in its arenas.
    budget_bytes: int = 0  #: Limit of all its arenas together; 0 if it keeps no snapshots.

    @property
    def held_bytes(self) -> int:
        """Return the length of all parts and parities, with their records."""
        held = (part.held for part in (*self.parts, *self.parities))
        return sum(each.data_bytes + each.record_bytes for each in held)

    def only(self, keep: Callable[[PartRef], bool]) -> Inventory:
        """Return it with only the parts and parities to keep."""
        parts, parities = filter(keep, self.parts), filter(keep, self.parities)
        return replace(self, parts=tuple(parts), parities=tuple(parities))


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """The address of a keeper for other keepers."""

    node: str
    host: str
    port: int
    #: The secret that clients must know; the keeper makes it, and its ``hello`` returns it.
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlace:
    """A node of a parity group."""

    peer: Peer | None  #: Its keeper; None for the node that receives this message.
    ranks: tuple[int, ...]  #: Its ranks in the attempt, in order.


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityGroup:
    """The nodes that protect each other by parity."""

    attempt: int  #: The attempt whose versions they protect.
    tolerance: int  #: 1 or 2: how many nodes may be lost, and how many parities each keeps.
    #: All nodes of the group, this one included, in the same order on each.
    places: tuple[GroupPlace, ...]
    #: Whether ranks compute the parities from their replicas; the keepers then only add the
    #: members' records.
    over_replicas: bool = False

    @property
    def place(self) -> int:
        """Return the place of this node."""
        return [place.peer for place in self.places].index(None)

    @property
    def num_rows(self) -> int:
        """Return the largest number of ranks on a node."""
        return max(len(place.ranks) for place in self.places)


def parity_places(stripe: int, *, num_nodes: int, tolerance: int) -> tuple[int, ...]:
    """Return the places in a group of the nodes that keep the parities of a stripe."""
    return tuple((stripe + which) % num_nodes for which in range(tolerance))


def stored_source(step: int, attempt: int) -> Source:
    """Return a version in storage as a source."""
    return (step, attempt, "", "", 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperOrder:
    """A keeper's orders for an attempt; sent to it at the start of every attempt."""

    attempt: int  #: From now on the keeper's memory accepts nothing from older attempts.
    #: ``(attempt, resume_step)`` of every attempt up to this one, oldest first: shows which
    #: versions no longer count.
    lineage: tuple[tuple[int, int], ...]
    copies_of: tuple[Peer, ...]  #: Keepers whose ranks' newest versions it copies into its memory.
    parity: ParityGroup | None = None  #: The group whose parities it keeps; None for no parities.
    #: ``(arena, buffer, sequence)`` of versions that could not be loaded: it drops them.
    bad: tuple[tuple[str, int, int], ...] = ()
    claim: int = 0  #: The claim under which the order is given (``ucp_core.storage.Owner``).
    #: Addresses of raylets on a few other nodes of the attempt: a keeper that reaches none of
    #: them, and not the head, ends its trainers.
    others: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Enter ``attempt`` as ``rank``. The worker holds the call until it has left the attempt."""

    attempt: int  #: Fencing token; larger than any the worker has seen.
    rank: int  #: This worker's rank in the attempt.
    layout: ParallelLayout  #: Degrees of the mesh.
    store_host: str  #: Host of the attempt's rendezvous store, outside all workers.
    store_port: int
    resume_step: int  #: The committed step to load; 0 to initialise from the seed.
    resume_attempt: int  #: The attempt that committed ``resume_step``; 0 with ``resume_step`` 0.
    #: ``(attempt, resume_step)`` of every attempt up to this one, oldest first.
    lineage: tuple[tuple[int, int], ...]
    #: All parts and parities of that version in keepers' memory; empty to load from storage.
    memory: tuple[PartRef, ...] = ()
    #: Replicas on other nodes whose shares of the state this rank saves beside its own; None if
    #: keepers protect each other's snapshots.
    guards: tuple[int, ...] | None = None
    #: Replicas on different nodes, this rank included, by place in their group; this rank keeps
    #: a parity of the others' shares. () for no parity.
    parity: tuple[int, ...] = ()
    claim: int = 0  #: The claim under which the attempt began (``ucp_core.storage.Owner``).

    @property
    def saved_too(self) -> tuple[int, ...]:
        """Return the ranks whose shares this rank saves beside its own, as copies or parity."""
        return self.guards or tuple(rank for rank in self.parity if rank != self.rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """The run reached its last step, and that step is committed to storage.

    ``ended`` says why the script ended the run at this step; "" if the settings name it as the last
    one.
    """

    attempt: int
    step: int
    ended: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Yielded:
    """The worker left at a step boundary, on request; ``step`` is committed.

    ``why`` names what requested it, if not the controller; then the worker's process ends next.
    """

    attempt: int
    step: int
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fenced:
    """The worker left because the orchestrator fenced the attempt; it writes nothing more."""

    attempt: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLost:
    """A collective of the worker failed: a hint that a peer died, but no proof of which one."""

    attempt: int
    step: int  #: The last completed step.
    detail: str  #: One line for people.
    #: Address of the peer that the transport could not connect to; "" if it names none.
    unreached: str = ""


#: Stands for an axis in ``Raised.refuses`` if a rank ran out of this memory.
DEVICE_MEMORY: Final = "device memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """The training code raised."""

    attempt: int
    step: int  #: The step in which it raised: the last completed one plus 1.
    error: str  #: Type and message in one line.
    traceback: str  #: The traceback to print, from the user's first frame on.
    #: The axis whose degree the script or the model cannot have, ``DEVICE_MEMORY`` if the device
    #: has too little of it, else "".
    refuses: str = ""
    #: The ranks whose numbers are not finite, or whose results or copies of the weights differ from
    #: the others'; empty if unknown.
    ranks: tuple[int, ...] = ()
    #: If a machine computed something wrong, the last step whose state is known to be right; else
    #: -1.
    sound_step: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Superseded:
    """A later claim on the run's directory counts: the worker's process ends.

    ``why`` names it, in a line for people.
    """

    attempt: int
    step: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundBad:
    """Bad sources that a worker found while loading."""

    damaged: tuple[Source, ...] = ()  #: Sources whose bytes are not those that were written.
    #: Sources that could not be read or contradict others; they may be sound.
    unread: tuple[Source, ...] = ()
    #: How the model or optimizer differs from those that made the version.
    misfits: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()  #: One line or more for each of these, for people.


@dataclass(frozen=True, slots=True, kw_only=True)
class Unloadable:
    """A rank could not load the version to resume from, so all ranks left the attempt."""

    attempt: int
    step: int
    found: FoundBad  #: The sources that this rank found bad; empty if another rank failed.


@dataclass(frozen=True, slots=True, kw_only=True)
class Formed:
    """The worker formed its groups, built the model and loaded its state."""

    attempt: int
    load_s: float  #: The part of forming that was loading.
    sources: tuple[tuple[str, int], ...]  #: ``(kind of source, bytes)`` that were loaded.
    found: FoundBad = field(default_factory=FoundBad)  #: Bad sources that other sources replaced.


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """An event to record; the attempt continues."""

    attempt: int
    step: int
    text: str  #: One line for people.
    ranks: tuple[int, ...] = ()  #: The ranks that caused it; empty if unknown.


#: Kinds of source beside storage, as ``Formed`` names them.
LOCAL_MEMORY: Final = "local memory"
PEER_MEMORY: Final = "peer memory"
PARITY: Final = "parity"

#: How a worker leaves an attempt.
Outcome: TypeAlias = Completed | Yielded | Fenced | PeerLost | Raised | Superseded | Unloadable


class WorkerPhase(StrEnum):
    """The phase of a worker, in order.

    SCRIPT is between two steps, and during an evaluation: the training script may take any time.
    """

    IDLE = "idle"
    FORMING = "forming"
    LOADING = "loading"
    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCING = "reducing"
    UPDATING = "updating"
    SAVING = "saving"
    SCRIPT = "script"
    LEAVING = "leaving"


#: A worker in another phase has formed its groups.
NOT_FORMED: Final = frozenset({WorkerPhase.IDLE, WorkerPhase.FORMING, WorkerPhase.LOADING})
#: The kernel's letters for a process that will not run again.
GONE: Final = frozenset("XZ")


@dataclass(frozen=True, slots=True)
class Ending:
    """How a process ended, in one line for people; "" if that is unknown."""

    text: str
    is_out_of_memory: bool = False


#: Period of a worker's beat.
BEAT_S: Final = 0.1


@packed
@dataclass(frozen=True, slots=True, kw_only=True)
class GroupState:
    """The state of one process group of a rank, from the record ring."""

    group: str  #: Name of the group, equal on all members (mesh axis and coordinates, or "world").
    #: Global ranks of the members, in group order; as a range if possible, which takes fewer bytes.
    ranks: Sequence[int]
    #: Number of collectives that this rank has called in the group; on a device, that the device
    #: has reached.
    entered_seq: int
    finished_seq: int  #: Number of collectives that have finished on this rank.
    op: str  #: Name of the last one entered, "" if none.
    size_bytes: int  #: Its payload.
    #: Time since the call of collective ``finished_seq + 1``, if this rank waits for it; 0.0 if
    #: it waits for none, even if one started ahead is in flight.
    waiting_s: float
    dtype: int = 0  #: Code of the dtype of the last collective's first tensor.
    #: Hash of (op, bytes, dtype) of all calls up to ``entered_seq``; 0 if unknown.
    history: int = 0
    #: Bytes that all its calls have sent to one other rank in a ring algorithm; 0 if unknown.
    sent_bytes: int = 0
    #: Calls that the process has made and its device has not reached; at most 65535.
    num_ahead: int = 0


class StepCost(NamedTuple):
    """The cost of a step for a rank, without its waits for others."""

    step: int
    #: Forward and backward of its fastest micro-batch; on a device, the fastest forward and the
    #: fastest backward without a collective.
    compute_s: float
    data_s: float  #: Mean wait for the data of a micro-batch.
    #: Tokens of the micro-batch behind ``compute_s``, or the larger number if there are two; 0 if
    #: unknown.
    tokens: int = 0


class StepFacts(NamedTuple):
    """Figures of a rank's last completed step, besides its loss; nan for missing ones."""

    grad_norm: float = math.nan  #: Norm of the mean gradient, before clipping.
    lr: float = math.nan  #: Learning rate.
    #: Tokens of its micro-batches, padding included; 0.0 if another rank counts them.
    tokens: float = math.nan
    data_s: float = math.nan  #: Time for which it waited for data.
    validation_loss: float = math.nan  #: Mean loss of the last evaluation.
    device_bytes: float = math.nan  #: Memory in use on its device, by all processes.
    device_bytes_max: float = math.nan  #: Memory of the device.


NO_FACTS: Final = StepFacts()

#: Maximum number of steps in a digest, because every rank sends one each second.
NUM_COSTS_MAX: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """A rank's own work since the last digest, from its ring."""

    #: The steps completed since then, oldest first; at most the newest ``NUM_COSTS_MAX``.
    costs: tuple[StepCost, ...] = ()
    #: Its present work: data, forward, backward or optimizer; "" if unknown.
    span: str = ""
    span_s: float = 0.0  #: Time since it began.

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle into half the bytes: costs keep seven digits."""
        costs = b"".join(_COST.pack(*cost) for cost in self.costs)
        return _unpacked, (costs, self.span, self.span_s)


_COST: Final = struct.Struct("<IffI")


def _unpacked(costs: bytes, span: str, span_s: float) -> Digest:
    rows = tuple(StepCost(*row) for row in _COST.iter_unpack(costs))
    return Digest(costs=rows, span=span, span_s=span_s)


@packed
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """The state of one worker process, seen by its node's keeper from outside the process."""

    worker: str  #: Worker id, as ``w0007``.
    pid: int  #: Process id on the node.
    #: The kernel's letter for the process: R, S, D run; T stopped; Z zombie; X gone. It is also R
    #: or D if only the thread that beats is in that state, and late.
    os_state: str
    attempt: int  #: Attempt that the worker is in, 0 if none.
    rank: int  #: Its rank in the attempt, -1 if none.
    phase: WorkerPhase
    step: int  #: Last step that it completed.
    micro_batch: int  #: Micro-batches done in the current step.
    moved_bytes: int  #: Bytes read and written in this attempt while it loads, saves or leaves.
    phase_s: float  #: Time in ``phase``.
    beat_age_s: float  #: Age of the last heartbeat of the process.
    processor_s: float  #: Processor time that the process has used since its start.
    step_s: float  #: Duration of the last completed step; 0.0 before the first.
    loss: float  #: Loss of the last completed step, ``nan`` before the first.
    groups: tuple[GroupState, ...]  #: State of its process groups, from the record ring.
    #: Line of the script at which it has waited for others for long; "" if it does not wait.
    place: str = ""
    trainer_s: float = 0.0  #: Processor time of the thread that trains, since its start.
    #: Processor time of the process's living descendants at the last measurement, which is made
    #: only while the node's workers stand still.
    children_s: float = 0.0
    digest: Digest | None = None  #: Its own work; None if it keeps no record of that.
    #: Number of groups that did not fit into its ring; it may wait in one of them unnoticed.
    num_dropped: int = 0
    #: How often its beating thread got a processor; 0 if unknown. It grows while the process waits
    #: for its interpreter lock, but not while the process is frozen.
    beater_runs: int = 0
    facts: StepFacts = NO_FACTS  #: Other figures of the last completed step.


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A notice that a node will end, as the node received it."""

    what: str  #: The source and the event, for people.
    #: Time of the end in seconds since the epoch; infinity if the source gave none.
    deadline_s: float
    #: Seconds until then, by the clock of the node, when this was sent.
    left_s: float = field(default=math.inf, compare=False)


class Flow(NamedTuple):
    """A TCP connection of a trainer, as seen by the kernel at this end."""

    worker: str  #: The trainer at this end.
    here: tuple[str, int]  #: Address and port of this end.
    there: tuple[str, int]  #: Those of the other end.
    acked_bytes: int  #: Bytes sent from here and acknowledged since the connection was made.
    received_bytes: int  #: Bytes received here.
    queued_bytes: int  #: Bytes written here and not acknowledged yet, whether sent or not.
    unread_bytes: int = 0  #: Bytes received here that the trainer has not read yet.
    in_flight: int = 0  #: Packets sent from here and not acknowledged.
    #: How often the kernel has doubled the timer of a retransmission or window probe since the last
    #: answer.
    backoff: int = 0
    repeated: int = 0  #: Packets retransmitted since the connection was made.
    sent_ms: int = 0  #: Time since the last packet with data was sent.
    heard_ms: int = 0  #: Time since the last acknowledgement came.
    rtt_us: int = 0  #: Smoothed round-trip time.
    rate: int = 0  #: Delivery rate in bytes per second, as last measured by the kernel.
    busy_us: int = 0  #: Time during which something was queued, since the connection was made.
    by_receiver_us: int = 0  #: Part of ``busy_us`` in which the other end had no room.
    by_buffer_us: int = 0  #: Part of ``busy_us`` in which the send buffer was too small.


@packed
@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """One keeper's view of its node; sent periodically, and at once after a change."""

    node: str  #: Ray node id, hex.
    seq: int  #: Counts the reports of this keeper process; a gap means lost reports.
    workers: tuple[WorkerReport, ...]  #: One entry per worker process on the node.
    #: The versions in the keeper's memory; None if it keeps no snapshots.
    inventory: Inventory | None = None
    stored_step: int = 0  #: The newest step that this keeper saw committed to storage; 0 if none.
    stored_attempt: int = 0  #: The attempt that committed it.
    #: One line per problem that reduces protection: no memory, a full or silent store, a peer
    #: that cannot be reached.
    problems: tuple[str, ...] = ()
    notice: Notice | None = None  #: Notice of the node's end; None if it stays.
    #: The connections of its trainers that changed since the last look, or that wait for an answer;
    #: now and then all of them. None if they were not read.
    flows: tuple[Flow, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How often an attempt saves."""

    snapshot_steps: int = 0  #: Steps between two snapshots; 0 for no change.
    checkpoint_steps: int = 0  #: Steps between two versions in storage; 0 for no change.


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCosts:
    """Recent costs of steps and saves on one rank; medians, 0.0 if not measured."""

    step_s: float  #: Time of a step, without the save before it.
    snapshot_stall_s: float  #: Time that training waits for a snapshot.
    snapshot_busy_s: float  #: Time until a snapshot is complete and copied, seen between steps.
    checkpoint_stall_s: float  #: Time that training waits for a checkpoint.
    checkpoint_busy_s: float  #: Time until a checkpoint is in storage, seen between steps.
    pace: Pace  #: The current intervals.
    trouble: str = ""  #: Why nothing can be stored now; "" if nothing is wrong.
