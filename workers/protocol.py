"""What a worker or keeper tells the orchestrator, and what it is told.

Pure values: every message names the attempt that it belongs to, so that whoever reads it
can drop what a later attempt has overtaken. Counterparts: ``workers.process.actor`` and
``workers.keeper`` on one side, ``orchestrator.shell`` on the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from ucp_core.layout import ParallelLayout

#: What a state is loaded from: ``(step, attempt, node, arena, slot, sequence)`` of a slot in the
#: memory of a node; node and arena are "" for the version of that step in storage.
Source: TypeAlias = tuple[int, int, str, str, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A complete version of one rank in a slot of an arena.

    Attributes:
        slot: Which.
        sequence: Counts the writes to the slot; a reader compares it before and after.
        attempt: The attempt that wrote it.
        step: The step after which the state was taken.
        rank: The rank in that attempt.
        world_size: The number of its ranks.
        data_bytes: Length of the data, which begins the slot's body.
        record_bytes: Length of the record, which follows.
    """

    slot: int
    sequence: int
    attempt: int
    step: int
    rank: int
    world_size: int
    data_bytes: int
    record_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPart:
    """A version of one rank in a keeper's memory: the rank's own node's, or a copy on another.

    Attributes:
        arena: Name of the arena on its node.
        held: What is in one of its slots.
    """

    arena: str
    held: Held


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A part that went into a parity.

    Attributes:
        rank: Whose.
        data_bytes: Of its data.
        record_bytes: Of its record, which follows.
    """

    rank: int
    data_bytes: int
    record_bytes: int

    @property
    def size_bytes(self) -> int:
        """Return how much of its slot went in."""
        return self.data_bytes + self.record_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldParity:
    """A node's parities of a version of one group; see ``workers.parity.rebuild``.

    Attributes:
        arena: Name of the arena on its node.
        held: What is in one of its slots; its rank is below 0, no rank's.
        num_parities: 1 or 2: how many places of the group may be lost.
        place: Of the node in the group.
        members: What went in, by place in the group; None where a node had no part.
    """

    arena: str
    held: Held
    num_parities: int
    place: int
    members: tuple[Member | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """What a keeper holds in memory, and where a peer can read it.

    Attributes:
        node: Ray node id, hex.
        host: Where the keeper serves bytes to its peers.
        port: Its port.
        parts: All complete versions in its arenas.
        parities: All complete parities in its arenas.
        budget_bytes: What all its arenas together may take; 0 if it keeps no snapshots.
    """

    node: str
    host: str
    port: int
    parts: tuple[HeldPart, ...]
    parities: tuple[HeldParity, ...] = ()
    budget_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPart:
    """Where one rank's part of the version to load can be read, or parities of some.

    Attributes:
        held: What ``Inventory`` says of it; of parities the rank is below 0.
        secret: What this keeper asks for before it serves anybody.
    """

    node: str
    host: str
    port: int
    arena: str
    held: Held
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A keeper as another keeper reaches it.

    Attributes:
        secret: What it asks for before it serves anybody; made by it, told by its ``hello``.
    """

    node: str
    host: str
    port: int
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlace:
    """A node of a group.

    Attributes:
        peer: Its keeper; None for the node that this is told.
        ranks: Its ranks in the attempt, in order.
    """

    peer: Peer | None
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityGroup:
    """Whom a node protects together with itself.

    Attributes:
        attempt: Whose versions; a later attempt is another order.
        num_parities: 1 or 2: how many of the nodes may be lost.
        places: All nodes, in an order that they agree on; one of them is this one.
        over_replicas: Whether ranks make the parities from their own replicas: the keepers then
            only put the members' records to them.
    """

    attempt: int
    num_parities: int
    places: tuple[GroupPlace, ...]
    over_replicas: bool = False

    @property
    def place(self) -> int:
        """Return this node's."""
        return [place.peer for place in self.places].index(None)

    @property
    def num_rows(self) -> int:
        """Return how many ranks the node with the most has."""
        return max(len(place.ranks) for place in self.places)


def held_source(node: str, arena: str, held: Held) -> Source:
    """Return what is held in a slot of an arena on a node as a source."""
    return (held.step, held.attempt, node, arena, held.slot, held.sequence)


def stored_source(step: int, attempt: int) -> Source:
    """Return a version in storage as a source."""
    return (step, attempt, "", "", 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperOrder:
    """What a keeper is told at the start of every attempt; it goes on with it until the next.

    Attributes:
        attempt: From now on nothing of an older attempt is written into this keeper's memory.
        lineage: ``(attempt, resume_step)`` of every attempt up to this one, oldest first: says
            which held versions are dead.
        copies_of: Keepers whose ranks' newest versions are to be copied into this one's memory.
        parity: The group that this one is to keep parities of; None if it is to keep none.
        bad: ``(arena, slot, sequence)`` of what could not be loaded: it is held no longer.
    """

    attempt: int
    lineage: tuple[tuple[int, int], ...]
    copies_of: tuple[Peer, ...]
    parity: ParityGroup | None = None
    bad: tuple[tuple[str, int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Enter ``attempt`` as ``rank``. The worker holds the call until it has left the attempt.

    Attributes:
        attempt: Fencing token; larger than any the worker has seen.
        rank: This worker's rank in the attempt.
        layout: Degrees of the mesh.
        store_host: Where the attempt's rendezvous store listens (never a member's process).
        store_port: Its port.
        resume_step: The committed step to load; 0 means initialise from the seed.
        resume_attempt: The attempt that committed ``resume_step``; 0 with ``resume_step`` 0.
        lineage: ``(attempt, resume_step)`` of every attempt up to this one, oldest first.
        memory: Every place in keepers' memory where a part of that version is held, or parities
            of it; empty if it is to be loaded from storage.
        guards: Ranks on other nodes that hold the same state as this one, and whose share of it
            this one saves beside its own; None where keepers protect each other's snapshots.
        parity: By place in a group, ranks on different nodes that hold the same state: this one,
            which is among them, keeps a parity of the others' shares; () if it keeps none.
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

    @property
    def saved_too(self) -> tuple[int, ...]:
        """Return the ranks whose shares this one saves in some way, beside its own."""
        return self.guards or tuple(rank for rank in self.parity if rank != self.rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """The run reached its last step, and that step is committed to storage."""

    attempt: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Yielded:
    """The worker left at a step boundary because it was asked to; ``step`` is committed."""

    attempt: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fenced:
    """The worker left because the orchestrator aborted the attempt; it will write nothing more."""

    attempt: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLost:
    """A collective failed under the worker. A hint that somebody died, never a proof of who."""

    attempt: int
    step: int
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """The training code raised.

    Attributes:
        step: The step that was under way (the last completed one plus 1).
        error: Type and message in one line.
        traceback: The user's frames first, as printed to the user.
    """

    attempt: int
    step: int
    error: str
    traceback: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundBad:
    """What a worker found out about sources when it loaded from them.

    Attributes:
        damaged: Those whose bytes are not the bytes that were written.
        unread: Those that could not be read, or contradict others: nothing is proven.
        misfits: How the model or its optimizer differs from those that made the version.
        reasons: A line each, and more, for people.
    """

    damaged: tuple[Source, ...] = ()
    unread: tuple[Source, ...] = ()
    misfits: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Unloadable:
    """A rank could not load the version to resume from, so all ranks left the attempt.

    Attributes:
        attempt: Which.
        step: Of that version.
        found: What this rank found; nothing, if it was another one.
    """

    attempt: int
    step: int
    found: FoundBad


@dataclass(frozen=True, slots=True, kw_only=True)
class Formed:
    """The worker's groups and model stand and its state is in place.

    Attributes:
        attempt: Which.
        load_s: How long loading took, of what it took to form.
        sources: ``(kind of source, bytes)`` that were loaded.
        found: What was found bad meanwhile; other holders had the same.
    """

    attempt: int
    load_s: float
    sources: tuple[tuple[str, int], ...]
    found: FoundBad = field(default_factory=FoundBad)


#: How a worker leaves an attempt.
Outcome: TypeAlias = Completed | Yielded | Fenced | PeerLost | Raised | Unloadable


class WorkerPhase(StrEnum):
    """Where a worker is; ordered as a worker goes through them.

    SCRIPT is between two steps, and in an evaluation: what the training script does there is its
    own, and may take as long as it likes.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupState:
    """What the record ring says of one process group of a rank.

    Attributes:
        group: Name of the group, equal on all its members (mesh axis and coordinates, or "world").
        ranks: Global ranks of the members, in group order.
        entered_seq: Number of collectives that this rank has called in the group.
        finished_seq: Number of those whose result it has seen.
        op: Name of the last one entered, "" if none.
        size_bytes: Its payload.
        waiting_s: How long ago the collective ``finished_seq + 1`` was called, if this rank waits
            for it; 0.0 if it waits for none, also with one in flight that was started ahead.
    """

    group: str
    ranks: tuple[int, ...]
    entered_seq: int
    finished_seq: int
    op: str
    size_bytes: int
    waiting_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """What a keeper saw of one worker process on its node, from outside that process.

    Attributes:
        worker: Worker id, as ``w0007``.
        pid: Process id on the node.
        os_state: The kernel's letter for the process: R, S, D run; T stopped; Z zombie; X gone.
            R also where it is silent because the thread that beats waits for a processor.
        attempt: Attempt that the worker is in, 0 if none.
        rank: Its rank there, -1 if none.
        phase: Where it is.
        step: Last step that it completed.
        micro_batch: Micro-batches done in the step under way.
        moved_bytes: Read and written in this attempt, while it loads, saves or leaves.
        phase_s: How long it has been in ``phase``.
        beat_age_s: Age of the last sign of life of the process's own beat thread.
        step_s: Duration of the last completed step; 0.0 before the first.
        loss: Loss of the last completed step, ``nan`` before the first.
        groups: State of its process groups, from the record ring.
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
    step_s: float
    loss: float
    groups: tuple[GroupState, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """One keeper's view of its node. Sent at a fixed period and at once when something changed.

    Attributes:
        node: Ray node id, hex.
        seq: Counts up by 1 per keeper life; a gap means lost reports.
        workers: One entry per worker process that registered on the node.
        inventory: What the keeper holds in memory; None if it keeps no snapshots.
        stored_step: The newest step that this keeper saw committed to storage; 0 if none.
        problems: One line for each thing that protects less than was asked for: no memory, a
            full or silent store, a peer that cannot be reached.
    """

    node: str
    seq: int
    workers: tuple[WorkerReport, ...]
    inventory: Inventory | None = None
    stored_step: int = 0
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How often an attempt is to save from now on.

    Attributes:
        snapshot_steps: Steps between two snapshots; 0 leaves it as it is.
        checkpoint_steps: Steps between two versions in storage; likewise.
    """

    snapshot_steps: int = 0
    checkpoint_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCosts:
    """What steps and saves took of late on one rank; medians, 0.0 where nothing was seen.

    Attributes:
        step_s: A step, without what was saved before it.
        snapshot_stall_s: What a snapshot takes from training.
        snapshot_busy_s: From its begin until it is complete and copied, as seen between steps.
        checkpoint_stall_s: What a checkpoint takes from training.
        checkpoint_busy_s: From its begin until it is in storage, as seen between steps.
        pace: The intervals kept now.
    """

    step_s: float
    snapshot_stall_s: float
    snapshot_busy_s: float
    checkpoint_stall_s: float
    checkpoint_busy_s: float
    pace: Pace
