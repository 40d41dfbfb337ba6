"""The messages between workers, keepers and the orchestrator.

Pure values. Every message names its attempt, so that a reader can drop messages of older attempts.
``workers.process`` and ``workers.keeper`` are on one side, ``orchestrator.shell`` on the other.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NamedTuple, TypeAlias

from ucp_core.layout import ParallelLayout
from workers.packed import packed

#: What has lost the controller computes no more after this: trainers leave at a step boundary, with
#: that step in storage, and wait. A controller that died is back after 1 s. Ray ends the processes
#: of a node that has lost the head so much later, unless it is told otherwise (``lease_s``).
LEASE_S: Final = 60.0
#: They begin to leave after this share of it: a long step and a commit take their time.
LEAVE_SHARE: Final = 0.75

# What workers write in the run directory and others read.
#: The committed versions in storage.
CHECKPOINTS: Final = "checkpoints"
#: A line of JSON for each committed step.
METRICS: Final = "metrics/rank0.jsonl"
#: A line of JSON for each evaluation, and for each call of a script's ``session.log``.
VALIDATION: Final = "metrics/validation.jsonl"
VALUES: Final = "metrics/values.jsonl"
#: What scripts print, a folder for each attempt and a log for each rank.
LOGS: Final = "logs"
#: Written by rank 0 when it completes the last step.
RESULT: Final = "result.json"
#: Written by rank 0 when the script ends the run before its last step: the version it ends with.
STOPPED: Final = "stopped.json"
#: What scripts save for themselves by ``session.save``, a folder each.
SAVED: Final = "saved"

#: An export to Hugging Face has these beside the weights: configurations, tokenizer. Written once.
BESIDE: Final = "huggingface"

#: Written by rank 0 when the script's code behind ``everstep.run`` has ended.
BEHIND: Final = "behind.json"

#: A source of a state: ``(step, attempt, node, arena, buffer, sequence)`` of a buffer in the memory
#: of a node; node and arena are "" for the version in storage.
Source: TypeAlias = tuple[int, int, str, str, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A complete version of one rank in a buffer of an arena.

    Attributes:
        sequence: Number of writes to the buffer; a reader compares it before and after.
        attempt: The attempt that wrote it.
        step: The step after which the state was taken.
        rank: The rank in that attempt.
        world_size: The number of ranks in that attempt.
        data_bytes: Length of the data, at the start of the buffer's body.
        record_bytes: Length of the record, which follows the data.
    """

    buffer: int
    sequence: int
    attempt: int
    step: int
    rank: int
    world_size: int
    data_bytes: int
    record_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPart:
    """A version of one rank in a keeper's memory, on the rank's node or copied to another.

    Attributes:
        arena: Name of the arena on its node.
        held: The version in one of its buffers.
    """

    arena: str
    held: Held


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A rank's version that a parity was computed from.

    Attributes:
        data_bytes: Length of its data.
        record_bytes: Length of its record, which follows the data.
    """

    rank: int
    data_bytes: int
    record_bytes: int

    @property
    def size_bytes(self) -> int:
        """Return the length of data and record."""
        return self.data_bytes + self.record_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldParity:
    """A node's parities of a version of one group; see ``workers.parity.rebuild``.

    Attributes:
        arena: Name of the arena on its node.
        held: The parities in one of its buffers; the rank is below 0.
        num_parities: 1 or 2: the number of nodes that may be lost.
        place: The node's place in the group.
        members: The versions it was computed from, by place; None for a node without one.
    """

    arena: str
    held: Held
    num_parities: int
    place: int
    members: tuple[Member | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """What a keeper holds in memory, and the address where peers read it.

    Attributes:
        node: Ray node id, hex.
        host: Host of the keeper's server for peers.
        parts: All complete versions in its arenas.
        parities: All complete parities in its arenas.
        budget_bytes: Limit of all its arenas together; 0 if it keeps no snapshots.
    """

    node: str
    host: str
    port: int
    parts: tuple[HeldPart, ...]
    parities: tuple[HeldParity, ...] = ()
    budget_bytes: int = 0

    @property
    def held_bytes(self) -> int:
        """Return the length of all that it lists, each with its record."""
        held = [part.held for part in self.parts] + [one.held for one in self.parities]
        return sum(each.data_bytes + each.record_bytes for each in held)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPart:
    """The place of one rank's part of the version to load, or of parities.

    Attributes:
        held: The entry of the keeper's ``Inventory``; the rank is below 0 for parities.
        secret: The secret that the keeper asks for.
    """

    node: str
    host: str
    port: int
    arena: str
    held: Held
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """The address of a keeper for other keepers.

    Attributes:
        secret: The secret that it asks for; the keeper makes it, and its ``hello`` returns it.
    """

    node: str
    host: str
    port: int
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlace:
    """A node of a parity group.

    Attributes:
        peer: Its keeper; None for the node that receives this message.
        ranks: Its ranks in the attempt, in order.
    """

    peer: Peer | None
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityGroup:
    """The nodes that protect each other by parity.

    Attributes:
        attempt: The attempt whose versions they protect.
        num_parities: 1 or 2: the number of nodes that may be lost.
        places: All nodes of the group, this one included, in the same order on each.
        over_replicas: Whether ranks compute the parities from their replicas; the keepers then
            only add the members' records.
    """

    attempt: int
    num_parities: int
    places: tuple[GroupPlace, ...]
    over_replicas: bool = False

    @property
    def place(self) -> int:
        """Return the place of this node."""
        return [place.peer for place in self.places].index(None)

    @property
    def num_rows(self) -> int:
        """Return how many ranks the node with the most has."""
        return max(len(place.ranks) for place in self.places)


def parity_places(stripe: int, *, num_nodes: int, num_parities: int) -> tuple[int, ...]:
    """Return the places in a group of the nodes that keep the parities of a stripe."""
    return tuple((stripe + which) % num_nodes for which in range(num_parities))


def held_source(node: str, arena: str, held: Held) -> Source:
    """Return a buffer of an arena on a node as a source."""
    return (held.step, held.attempt, node, arena, held.buffer, held.sequence)


def stored_source(step: int, attempt: int) -> Source:
    """Return a version in storage as a source."""
    return (step, attempt, "", "", 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperOrder:
    """What a keeper does in an attempt; sent to it at the start of every attempt.

    Attributes:
        attempt: The attempt. The keeper's memory accepts nothing of older ones from now on.
        lineage: ``(attempt, resume_step)`` of every attempt up to this one, oldest first: tells
            which versions no longer count.
        copies_of: Keepers whose ranks' newest versions it copies into its memory.
        parity: The group whose parities it keeps; None for no parities.
        bad: ``(arena, buffer, sequence)`` of versions that could not be loaded: it drops them.
        claim: The claim under which the order is given (``ucp_core.storage.Owner``).
        others: Addresses of raylets on a few other nodes of the attempt: a keeper that reaches none
            of them, and not the head, ends its trainers.
    """

    attempt: int
    lineage: tuple[tuple[int, int], ...]
    copies_of: tuple[Peer, ...]
    parity: ParityGroup | None = None
    bad: tuple[tuple[str, int, int], ...] = ()
    claim: int = 0
    others: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Enter ``attempt`` as ``rank``. The worker holds the call until it has left the attempt.

    Attributes:
        attempt: Fencing token; larger than any the worker has seen.
        rank: This worker's rank in the attempt.
        layout: Degrees of the mesh.
        store_host: Host of the attempt's rendezvous store, outside all workers.
        resume_step: The committed step to load; 0 to initialise from the seed.
        resume_attempt: The attempt that committed ``resume_step``; 0 with ``resume_step`` 0.
        lineage: ``(attempt, resume_step)`` of every attempt up to this one, oldest first.
        memory: All parts and parities of that version in keepers' memory; empty to load from
            storage.
        guards: Replicas on other nodes whose shares of the state this rank saves beside its own;
            None if keepers protect each other's snapshots.
        parity: Replicas on different nodes, this rank included, by place in their group; this
            rank keeps a parity of the others' shares. () for no parity.
        claim: The claim under which the attempt began (``ucp_core.storage.Owner``).
    """

    attempt: int
    rank: int
    layout: ParallelLayout
    store_host: str
    store_port: int
    resume_step: int
    resume_attempt: int
    lineage: tuple[tuple[int, int], ...]
    memory: tuple[MemoryPart, ...] = ()
    guards: tuple[int, ...] | None = None
    parity: tuple[int, ...] = ()
    claim: int = 0

    @property
    def saved_too(self) -> tuple[int, ...]:
        """Return the ranks whose shares this rank saves beside its own, as copies or parity."""
        return self.guards or tuple(rank for rank in self.parity if rank != self.rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """The run reached its last step, and that step is committed to storage.

    ``ended`` says why the script made this step the last one; "" if it is that of the settings.
    """

    attempt: int
    step: int
    ended: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Yielded:
    """The worker left at a step boundary because it was asked to; ``step`` is committed.

    ``why`` says what asked it, if not the controller: its process ends next.
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
    """A collective of the worker failed: a hint that a peer died, no proof which one.

    Attributes:
        step: The last completed step.
        detail: One line for people.
        unreached: Address of the peer that the transport could not connect to; "" if it names none.
    """

    attempt: int
    step: int
    detail: str
    unreached: str = ""


#: A rank ran out of it; see ``Raised``.
DEVICE_MEMORY: Final = "device memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """The training code raised.

    Attributes:
        step: The step in which it raised: the last completed one plus 1.
        error: Type and message in one line.
        traceback: The traceback to print, from the user's first frame on.
        refuses: The axis whose degree the script or the model cannot have, ``DEVICE_MEMORY`` if the
            device has too little of it, else "".
        ranks: The ranks that numbers come from which are not finite, or whose copies of the weights
            differ from the others'; empty if that is not known.
    """

    attempt: int
    step: int
    error: str
    traceback: str
    refuses: str = ""
    ranks: tuple[int, ...] = ()


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
    """Bad sources that a worker found while loading.

    Attributes:
        damaged: Sources whose bytes are not those that were written.
        unread: Sources that could not be read or contradict others; they may be sound.
        misfits: How the model or optimizer differs from those that made the version.
        reasons: One line or more for each of these, for people.
    """

    damaged: tuple[Source, ...] = ()
    unread: tuple[Source, ...] = ()
    misfits: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Unloadable:
    """A rank could not load the version to resume from, so all ranks left the attempt.

    Attributes:
        found: What this rank found bad; empty if another rank failed.
    """

    attempt: int
    step: int
    found: FoundBad


@dataclass(frozen=True, slots=True, kw_only=True)
class Formed:
    """The worker formed its groups, built the model and loaded its state.

    Attributes:
        load_s: The part of forming that was loading.
        sources: ``(kind of source, bytes)`` that were loaded.
        found: Bad sources that other sources replaced.
    """

    attempt: int
    load_s: float
    sources: tuple[tuple[str, int], ...]
    found: FoundBad = field(default_factory=FoundBad)


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """Something happened in an attempt that goes on, and is to be put on record.

    Attributes:
        text: One line for people.
        ranks: The ranks that it comes from; empty if that is not known.
    """

    attempt: int
    step: int
    text: str
    ranks: tuple[int, ...] = ()


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
    """How a process ended, in one line for people; "" if nobody knows."""

    text: str
    is_out_of_memory: bool = False


#: Period of a worker's beat.
BEAT_S: Final = 0.1


@packed
@dataclass(frozen=True, slots=True, kw_only=True)
class GroupState:
    """The state of one process group of a rank, from the record ring.

    Attributes:
        group: Name of the group, equal on all members (mesh axis and coordinates, or "world").
        ranks: Global ranks of the members, in group order; a range if they are one, which is told
            in fewer bytes.
        entered_seq: Number of collectives that this rank has called in the group; of those on a
            device, that the device has reached.
        finished_seq: Number of those that have finished for it.
        op: Name of the last one entered, "" if none.
        size_bytes: Its payload.
        waiting_s: Time since the call of collective ``finished_seq + 1``, if this rank waits for
            it; 0.0 if it waits for none, even if one started ahead is in flight.
        dtype: Code of the type of the last one's first tensor.
        history: Hash of (op, bytes, dtype) of all calls up to ``entered_seq``; 0 if unknown.
        sent_bytes: Bytes that all its calls have sent to one other rank, as rings do it; 0 if
            unknown.
        num_ahead: Calls that the process has made and its device has not reached; at most 65535.
    """

    group: str
    ranks: Sequence[int]
    entered_seq: int
    finished_seq: int
    op: str
    size_bytes: int
    waiting_s: float
    dtype: int = 0
    history: int = 0
    sent_bytes: int = 0
    num_ahead: int = 0


class StepCost(NamedTuple):
    """The cost of a step for a rank, without its waits for others.

    Attributes:
        compute_s: Forward and backward of its fastest micro-batch; on a device the fastest of each
            of those that hold no collective.
        data_s: Wait for the data of a micro-batch, the mean of the step.
        tokens: Those of the micro-batch that ``compute_s`` is of, the larger number if it is of
            two; 0 if unknown.
    """

    step: int
    compute_s: float
    data_s: float
    tokens: int = 0


class StepFacts(NamedTuple):
    """A rank's last completed step, beside its loss. nan: not known, or there is none.

    Attributes:
        grad_norm: Norm of the mean gradient, before clipping.
        lr: Learning rate.
        tokens: Tokens of its micro-batches, padding included; 0.0 if another rank counts them.
        data_s: Time for which it waited for data.
        validation_loss: Mean loss of the last evaluation.
        device_bytes: Memory in use on its device, by all processes.
        device_bytes_max: Memory of the device.
    """

    grad_norm: float = math.nan
    lr: float = math.nan
    tokens: float = math.nan
    data_s: float = math.nan
    validation_loss: float = math.nan
    device_bytes: float = math.nan
    device_bytes_max: float = math.nan


NO_FACTS: Final = StepFacts()

#: A digest tells of so many steps at most: it is sent each second, by every rank.
NUM_COSTS_MAX: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """A rank's own work by its ring, since the digest before.

    Attributes:
        costs: The steps that were completed since, oldest first; of more than ``NUM_COSTS_MAX`` the
            newest.
        span: What it works at now: data, forward, backward or optimizer; "" if nothing is known.
        span_s: For how long.
    """

    costs: tuple[StepCost, ...] = ()
    span: str = ""
    span_s: float = 0.0

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
    """The state of one worker process, seen by its node's keeper from outside the process.

    Attributes:
        worker: Worker id, as ``w0007``.
        pid: Process id on the node.
        os_state: The kernel's letter for the process: R, S, D run; T stopped; Z zombie; X gone.
            R and D also if only its heartbeat thread is in that state, and late.
        attempt: Attempt that the worker is in, 0 if none.
        rank: Its rank in the attempt, -1 if none.
        step: Last step that it completed.
        micro_batch: Micro-batches done in the current step.
        moved_bytes: Bytes read and written in this attempt while it loads, saves or leaves.
        phase_s: Time in ``phase``.
        beat_age_s: Age of the last heartbeat of the process.
        processor_s: Processor time that the process has used since its start.
        step_s: Duration of the last completed step; 0.0 before the first.
        loss: Loss of the last completed step, ``nan`` before the first.
        groups: State of its process groups, from the record ring.
        place: Line of the script at which it has waited for others for long; "" if it does not.
        trainer_s: Processor time of the thread that trains, since its start.
        children_s: Processor time of the process's living children and of theirs, when it was last
            measured: while the node's workers stand still.
        digest: What it says of its own work; None if it keeps no record of it.
        num_dropped: Groups that did not fit its ring: it may wait in one of them, and nobody knows.
        beater_runs: How often its beating thread got a processor; 0 if that is not known. It grows
            while the process waits for its interpreter lock, and not while it is frozen.
        facts: Other figures of the last completed step, beside its loss.
    """

    worker: str
    pid: int
    os_state: str
    attempt: int
    rank: int
    phase: WorkerPhase
    step: int
    micro_batch: int
    moved_bytes: int
    phase_s: float
    beat_age_s: float
    processor_s: float
    step_s: float
    loss: float
    groups: tuple[GroupState, ...]
    place: str = ""
    trainer_s: float = 0.0
    children_s: float = 0.0
    digest: Digest | None = None
    num_dropped: int = 0
    beater_runs: int = 0
    facts: StepFacts = NO_FACTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """What is known on a node of its end.

    Attributes:
        what: Who said it and what happens, for people.
        deadline_s: When, in seconds since the epoch; infinity if nobody said when.
        left_s: Seconds until then, by the clock of the node, when this was sent.
    """

    what: str
    deadline_s: float
    left_s: float = field(default=math.inf, compare=False)


class Flow(NamedTuple):
    """A TCP connection of a trainer, as the kernel at this end of it sees it.

    Attributes:
        worker: The trainer at this end.
        here: Address and port of this end.
        there: Those of the other end.
        acked_bytes: Sent from here and acknowledged, since the connection was made.
        received_bytes: Received here.
        queued_bytes: Written here and not acknowledged yet, whether sent or not.
        unread_bytes: Received here and not read by the trainer yet.
        in_flight: Packets that were sent from here and not acknowledged.
        backoff: How often the timer for repeating a packet, or for asking whether there is room at
            the other end, was doubled since an answer came.
        repeated: Packets that were sent again, since the connection was made.
        sent_ms: Time since the last packet with data was sent.
        heard_ms: Time since the last acknowledgement came.
        rtt_us: Smoothed round-trip time.
        rate: Bytes a second that arrived there, as last measured by the kernel.
        busy_us: Time during which something was queued, since the connection was made.
        by_receiver_us: The part of it in which the other end had no room.
        by_buffer_us: The part of it in which the buffer for sending was too small.
    """

    worker: str
    here: tuple[str, int]
    there: tuple[str, int]
    acked_bytes: int
    received_bytes: int
    queued_bytes: int
    unread_bytes: int = 0
    in_flight: int = 0
    backoff: int = 0
    repeated: int = 0
    sent_ms: int = 0
    heard_ms: int = 0
    rtt_us: int = 0
    rate: int = 0
    busy_us: int = 0
    by_receiver_us: int = 0
    by_buffer_us: int = 0


@packed
@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """One keeper's view of its node; sent periodically, and at once after a change.

    Attributes:
        node: Ray node id, hex.
        seq: Counts the reports of this keeper process; a gap means lost reports.
        workers: One entry per worker process on the node.
        inventory: What the keeper holds in memory; None if it keeps no snapshots.
        stored_step: The newest step that this keeper saw committed to storage; 0 if none.
        stored_attempt: The attempt that committed it.
        problems: One line per problem that reduces protection: no memory, a full or silent
            store, a peer that cannot be reached.
        notice: What is known there of the node's end; None if it stays.
        flows: The connections of its trainers that changed since they were last looked at, or that
            wait for an answer; now and then all of them. None: they were not looked at.
    """

    node: str
    seq: int
    workers: tuple[WorkerReport, ...]
    inventory: Inventory | None = None
    stored_step: int = 0
    stored_attempt: int = 0
    problems: tuple[str, ...] = ()
    notice: Notice | None = None
    flows: tuple[Flow, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How often an attempt saves from now on.

    Attributes:
        snapshot_steps: Steps between two snapshots; 0 for no change.
        checkpoint_steps: Steps between two versions in storage; 0 for no change.
    """

    snapshot_steps: int = 0
    checkpoint_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCosts:
    """Recent costs of steps and saves on one rank; medians, 0.0 if not measured.

    Attributes:
        step_s: Time of a step, without the save before it.
        snapshot_stall_s: Time that training waits for a snapshot.
        snapshot_busy_s: Time until a snapshot is complete and copied, seen between steps.
        checkpoint_stall_s: Time that training waits for a checkpoint.
        checkpoint_busy_s: Time until a checkpoint is in storage, seen between steps.
        pace: The current intervals.
        trouble: Why nothing can be stored now; "" if nothing is wrong.
    """

    step_s: float
    snapshot_stall_s: float
    snapshot_busy_s: float
    checkpoint_stall_s: float
    checkpoint_busy_s: float
    pace: Pace
    trouble: str = ""
