"""Parts of the virtual cluster: nodes, worker processes, attempts as they really go."""

from dataclasses import dataclass, field
from itertools import zip_longest
from math import inf
from typing import Any, Literal

from orchestrator.core import actions as act
from orchestrator.policies import RedundancyPlan
from ucp_core.layout import ParallelLayout
from workers.protocol import DEVICE_MEMORY, Member, PartRef, SaveCosts, Source, stored_source

#: Long beside a message and short beside a recovery: half a dozen steps meet as many faults as
#: many short ones would, in four fifths of the time.
STEP_S = 0.25
_SLOW = 1.5
#: A write by a trainer and a copy to another node take up to this long.
WRITE_S = 0.5 * STEP_S
COPY_S = 0.4 * STEP_S


class SimNode:
    """A machine with room for ``room`` workers; ``kind`` is the alternative that it serves."""

    __slots__ = (
        "alive",
        "cut_off",
        "draining_until_s",
        "has_keeper",
        "keeper_back_s",
        "kind",
        "name",
        "num_hangs",
        "num_lent",
        "rack",
        "reservations",
        "room",
        "workers",
    )

    def __init__(self, name: str, room: int, rack: str = "", kind: int = 0) -> None:
        self.name = name
        self.kind = kind
        self.rack = rack
        self.room = room
        self.alive = True
        # Cut off: declared lost while its processes train on, as in a network partition.
        self.cut_off = False
        self.draining_until_s: float | None = None
        self.has_keeper = False
        # Its keeper died and is not back before then.
        self.keeper_back_s = 0.0
        # How often its keeper hung.
        self.num_hangs = 0
        self.reservations: set[int] = set()
        # The part of its room that another run has.
        self.num_lent = 0
        self.workers: dict[str, SimWorker] = {}

    @property
    def num_free(self) -> int:
        """Return how many more workers have room here."""
        return self.room - len(self.reservations) - self.num_lent


class SimWorker:
    """A worker process: the attempt it is in (0: none) and the one up to which it refuses."""

    __slots__ = (
        "alive",
        "attempt",
        "busy_as",
        "busy_at_s",
        "busy_until_s",
        "compiled",
        "completed",
        "errs",
        "formed",
        "hung",
        "hung_as",
        "hung_at_s",
        "left",
        "name",
        "node",
        "ready",
        "refuses",
        "slow",
    )

    def __init__(self, name: str, node: SimNode) -> None:
        self.name = name
        self.node = node
        self.alive = True
        self.ready = False
        self.hung = False
        # As "stopped" by a signal, "frozen" with its container, or "waits" like all others.
        self.hung_as, self.hung_at_s = "", 0.0
        # It works for itself until then, and uses a processor for that or not.
        self.busy_at_s = self.busy_until_s = 0.0
        self.busy_as = ""
        # Its slow work, how many times as long that takes, and until when.
        self.slow: tuple[str, float, float] = ("", 1.0, 0.0)
        # Whether it computes something wrong.
        self.errs = False
        # The step that it compiled in last.
        self.compiled = -100
        self.attempt = 0
        self.refuses = 0
        # How it left its last attempt: the kind of the event, and its values.
        self.left: tuple[type, dict[str, Any]] | None = None
        self.completed = 0
        self.formed = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """How often each tier saves.

    Attributes:
        snapshot_every: Steps between two snapshots; 0 takes none.
        store_every: Steps between two commits in storage.
        tolerance: How many lost nodes are to be survived.
        budget_bytes: Each keeper's budget for snapshots; 0 if it reports none.
        costs: The costs of saves that rank 0 reports; None if their intervals are fixed.
        copy_s: How long a copy or a parity takes at most; from the length of a step on, steps are
            skipped.
    """

    snapshot_every: int
    store_every: int
    tolerance: int
    mechanism: Literal["auto", "copy", "parity"] = "copy"
    budget_bytes: int = 0
    costs: SaveCosts | None = None
    copy_s: float = COPY_S

    @property
    def commit_every(self) -> int:
        """Return the number that the steps of all commits but yields are multiples of."""
        return 1 if self.snapshot_every else self.store_every

    @property
    def loses_one_step(self) -> bool:
        """Return whether a single fault may cost no more than one step."""
        is_fast = self.copy_s + WRITE_S < STEP_S
        is_roomy = not self.budget_bytes
        return self.snapshot_every == 1 and self.tolerance > 0 and is_fast and is_roomy


@dataclass(slots=True)
class Loading:
    """The sources of one attempt's load.

    Attributes:
        version: (step, attempt) to load; (0, 0) if there is nothing to load.
        places: The holders of its parts in memory; None if it is to come from storage. There may
            be none at all where all parts can be computed from parities.
        bad: The sources that the controller leaves out.
        is_done: Whether it is known how it went.
        is_loaded: How it went.
        damaged: By member: what it found damaged.
        unread: By member: what it could not read.
    """

    version: tuple[int, int]
    places: tuple[PartRef, ...] | None
    bad: tuple[Source, ...]
    is_done: bool = False
    is_loaded: bool = True
    damaged: dict[str, tuple[Source, ...]] = field(default_factory=dict)
    unread: dict[str, tuple[Source, ...]] = field(default_factory=dict)

    def sources(self) -> list[Source]:
        """Return what may be read from."""
        if self.places is not None:
            return [place.source for place in self.places]
        return [stored_source(*self.version)] if self.version[0] else []


@dataclass(frozen=True, slots=True)
class SimModel:
    """A model that refuses layouts, and has a step time for each.

    Attributes:
        cannot: ``(axis, degree)`` that it cannot have.
        shards_min: It cannot train either if a worker has a larger share of the state than this.
        slow: ``(axis, degree)`` with which a step takes longer.
        is_silent: Whether its first step raises an error that does not name the axis.
    """

    cannot: frozenset[tuple[str, int]] = frozenset()
    shards_min: int = 1
    slow: frozenset[tuple[str, int]] = frozenset()
    is_silent: bool = False

    def step_s(self, layout: ParallelLayout) -> float:
        """Return how long a step takes."""
        is_slow = any(getattr(layout, axis) == degree for axis, degree in self.slow)
        return STEP_S * (_SLOW if is_slow else 1.0)

    def refuses(self, layout: ParallelLayout) -> str:
        """Return what ``layout`` cannot have, as a worker says it; "" if it can train."""
        for axis, degree in sorted(self.cannot):
            if getattr(layout, axis) == degree:
                return axis
        shards = layout.dp_shard * layout.cp * layout.tp * layout.pp
        return DEVICE_MEMORY if shards < self.shards_min else ""


class SimAttempt:
    """One attempt as it really goes: members step together or not at all."""

    __slots__ = (
        "_lanes",
        "arrived",
        "begun_step",
        "copiers",
        "durable",
        "fenced_s",
        "first_kept_step",
        "formed",
        "layout",
        "lineage",
        "loading",
        "members",
        "needless",
        "num_uncopied",
        "number",
        "placed",
        "plan",
        "records",
        "sound_step",
        "stalls",
        "step",
        "store_every",
        "storing_until_s",
        "wrong",
        "yielding",
    )

    def __init__(self, action: act.StartAttempt, loading: Loading, store_every: int) -> None:
        self.number = action.attempt
        self.members = [worker for worker, _, _ in action.members]
        self.lineage = action.lineage
        self.layout = action.layout
        self.loading = loading
        self.step = self.begun_step = action.resume_step
        self.arrived: set[str] = set()
        self.formed: set[str] = set()
        # By step: the ranks whose part is in storage.
        self.records: dict[int, set[int]] = {}
        self.yielding = False
        self.durable = False
        # When the machine ordered its members to leave.
        self.fenced_s = inf
        # (worker, node, reservation) by rank.
        self.placed = action.members
        self.protect(action.plan)
        # Copies and parities that are under way.
        self.num_uncopied = 0
        # Other nodes with keepers when its own last held all that is needed.
        self.needless: frozenset[str] = frozenset()
        # The first of which all ranks took a snapshot.
        self.first_kept_step: int | None = None
        self._lanes: dict[tuple[str, ...], list[tuple[Member | None, ...]]] = {}
        self.store_every = store_every
        self.storing_until_s = 0.0
        # Whether it waits for a link between two of its nodes.
        self.stalls = False
        # The newest step that a check found right, and the workers whose errors are in its state.
        self.sound_step = self.step
        self.wrong: frozenset[str] = frozenset()

    @property
    def nodes(self) -> set[str]:
        """Return the nodes of its members."""
        return {node for _, node, _ in self.placed}

    def protect(self, plan: RedundancyPlan) -> None:
        """Protect snapshots from now on by ``plan``; ``copiers`` keep copies of a node's."""
        self.plan = plan
        nodes = dict.fromkeys(node for _, node, _ in self.placed)
        self.copiers = {
            node: tuple(name for name in nodes if name in plan.keepers.get(node, ()))
            for node in nodes
        }

    def lanes(self, group: tuple[str, ...]) -> list[tuple[Member | None, ...]]:
        """Return what goes into a group's parities: of each node its first rank, and so on."""
        if group not in self._lanes:
            ranks = [
                [rank for rank, (_, node, _) in enumerate(self.placed) if node == name]
                for name in group
            ]
            self._lanes[group] = [
                tuple(
                    None if rank is None else Member(rank=rank, data_bytes=1, record_bytes=1)
                    for rank in lane
                )
                for lane in zip_longest(*ranks)
            ]
        return self._lanes[group]
