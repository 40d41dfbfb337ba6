"""The things in the virtual cluster, its clock, and its wires to the machine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from heapq import heappop, heappush
from itertools import count
from math import inf
from random import Random
from typing import Any, Protocol

from orchestrator.core import RunRules
from orchestrator.core import actions as act
from orchestrator.core import events as ev
from orchestrator.policies import Share, state_bytes
from tests.simulation.world.memory import Memory, Part
from tests.simulation.world.parts import SimAttempt, SimModel, SimNode, SimWorker, Tiers
from tests.simulation.world.storage import Storage
from ucp_core.layout import ParallelLayout
from workers.protocol import Source


class Observer(Protocol):
    """Receives events of the world as they happen. ``Monitor`` checks them.

    Attributes:
        is_state_gone: Whether a member could not leave its state in memory.
        is_unkept: Whether nothing kept what was on a node.
        troubled: Nodes on which something failed.
        faulty: Workers that failed.
        slowed: Workers that are slow: since when, until when, and how many times as long they take.
        unlinked: Nodes that lost a link.
        lost_nodes: Nodes that were lost, or cut off from all others.
        outcome: How the run ended; None while it goes on.
        yielded: The newest attempt of which all members yielded, and at which step.
    """

    is_state_gone: bool
    is_unkept: bool
    troubled: set[str]
    slowed: dict[str, tuple[float, float, float]]
    faulty: set[str]
    unlinked: set[str]
    lost_nodes: set[str]
    outcome: act.FinishRun | None
    yielded: tuple[int, int] | None

    @property
    def attempt(self) -> int:
        """Return the newest attempt that was started."""

    def started(self, name: str) -> None:
        """Check the start of a worker process."""

    def attempt_started(self, world: World, action: act.StartAttempt) -> None:
        """Check the start of an attempt."""

    def given(self, attempt: int, sources: list[Source]) -> None:
        """Check what an attempt is to load from."""

    def stepped(self, attempt: int, step: int) -> None:
        """Note a step that all members completed."""

    def left(self, world: World, attempt: int, worker: str = "") -> None:
        """Note that a member left."""

    def counts(self, step: int, attempt: int) -> bool:
        """Return whether the newest attempt goes on from a version."""

    def corrupted(self, attempt: int, erring: Sequence[SimWorker], *, is_known: bool) -> None:
        """Note that a check has found that some workers err, and whether it knows which."""

    def all_yielded(self, attempt: int, step: int) -> None:
        """Note that all members leave together."""

    def deleted(self, version: tuple[int, int], *, claim: int, owner: int) -> None:
        """Check what the retention under a claim deletes."""

    def reading(self, action: act.ReadCommitted, now_s: float) -> None:
        """Note when a read is answered, and check what it leaves out."""

    def restarting(self, node: SimNode, now_s: float) -> None:
        """Check the restart of a keeper."""

    def ending_keeper(self, world: World, node: SimNode) -> None:
        """Check the end of a keeper."""

    def giving_up(self, node: SimNode, now_s: float) -> None:
        """Check that a node is given up."""

    def cadence(self, world: World, action: act.SetCadence) -> None:
        """Check the chosen intervals."""

    def neighbour_says(self, world: World, share: Share) -> None:
        """Note what another run says of itself."""

    def incident(self, world: World, action: act.ReportIncident) -> None:
        """Check an incident."""

    def finished(self, action: act.FinishRun) -> None:
        """Check the end of the run."""


class World:
    """The world as it is. ``at`` schedules, ``post`` reports."""

    def __init__(self, rng: Random, rules: RunRules, tiers: Tiers, monitor: Observer) -> None:
        self.rng = rng
        self.rules = rules
        self.tiers = tiers
        self.monitor = monitor
        self.now_s = 0.0
        self.queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.serials = count()
        self.incarnation = 0
        self.num_incarnations = 1
        self.controller_up = True
        # Whether the head is lost, and what resumes the run elsewhere.
        self.is_headless = False
        self.begin_claim: Callable[[], None] = lambda: None
        self.is_watched = False
        # Whether digests are made up for those that are slow.
        self.sees_costs = False
        self.inbox: list[ev.Event] = []
        self.nodes: dict[str, SimNode] = {}
        self.workers: dict[str, SimWorker] = {}
        self.pending: dict[int, act.RequestReservation] = {}
        self.granted: dict[int, str] = {}
        # Asked for or found by the controller's present incarnation.
        self.known_reservations: set[int] = set()
        self.storage = Storage()
        self.memory = Memory(tiers.budget_bytes)
        # Sources whose bytes are damaged, which only a load finds out.
        self.damaged: set[Source] = set()
        # (from, to) that lose every packet, in the order in which they were lost.
        self.lost_ways: dict[tuple[str, str], None] = {}
        self.attempts: dict[int, SimAttempt] = {}
        self.delay_s = rng.choice((0.001, 0.01, 0.1))
        self.loss = rng.choice((0.0, 0.0, 0.02, 0.1))
        self.doubling = rng.choice((0.0, 0.0, 0.05))
        # Decides which alternative of capacity machines are, and when the provider says no.
        self.market = Random(0)
        self.start_failure = 0.0
        self.raises_at: dict[int, tuple[int, ...]] = {}
        self.raises_once: set[int] = set()
        self.model = SimModel()
        # The step that the script makes the last one, and those whose numbers are not finite.
        self.ends_at: float = inf
        self.not_finite_at: set[int] = set()
        # Every so many steps workers compare what they compute; 0 for never.
        self.recheck_every = 0
        # By step and attempt: the newest step that was right, and the workers whose errors are in.
        self.checked: dict[tuple[int, int], tuple[int, frozenset[str]]] = {}
        #: Whether the next first step in a layout lacks memory, once.
        self.is_short = False
        self.trained: list[ParallelLayout] = []

    def at(self, delay_s: float, do: Callable[..., None], *args: Any) -> None:
        """Do something after ``delay_s``."""
        heappush(self.queue, (self.now_s + delay_s, next(self.serials), do, args))

    def run_until(self, at_s: float) -> None:
        """Let what is scheduled until then happen, but stop as soon as the machine hears of it."""
        queue, inbox = self.queue, self.inbox
        while queue and queue[0][0] <= at_s and not inbox:
            self.now_s, _, do, args = heappop(queue)
            do(*args)

    def gather(self, seconds: float, is_alike: Callable[[ev.Event], bool]) -> None:
        """Let time pass while the controller is busy, until it is to hear of something else."""
        queue, until_s, incarnation = self.queue, self.now_s + seconds, self.incarnation
        while queue and queue[0][0] < until_s and self.incarnation == incarnation:
            if not (self.inbox and is_alike(self.inbox[-1])):
                return
            self.now_s, _, do, args = heappop(queue)
            do(*args)

    def chance(self, probability: float) -> bool:
        """Return True with ``probability``."""
        return self.rng.random() < probability

    def wire_s(self) -> float:
        """Return how long one message takes: a lost one is sent again and comes late."""
        delay_s = self.rng.random() * self.delay_s
        if self.loss and self.chance(self.loss):
            delay_s += 0.2 + self.rng.random()
        return delay_s

    def post(self, kind: type, delay_s: float = 0.0, **values: Any) -> None:
        """Report something to the controller's present incarnation, perhaps twice."""
        self.at(delay_s + self.wire_s(), self._arrive, self.incarnation, kind, values)
        if self.doubling and self.chance(self.doubling):
            self.at(delay_s + self.rng.random(), self._arrive, self.incarnation, kind, values)

    def post_or_lose(self, kind: type, **values: Any) -> None:
        """Report an event that is not repeated if it is lost."""
        if not (self.loss and self.chance(self.loss)):
            self.post(kind, **values)

    def find(self, kind: type, **values: Any) -> None:
        """Let the controller come to something by itself, if it is up: at once and once."""
        self._arrive(self.incarnation, kind, values)

    def _arrive(self, incarnation: int, kind: type, values: dict[str, Any]) -> None:
        # A controller that is down hears nothing, and a new incarnation has new wires.
        if incarnation == self.incarnation and self.controller_up:
            self.inbox.append(kind(at_s=self.now_s, **values))

    def is_reached(self, source: str, target: str) -> bool:
        """Return whether a node can open a connection to another one."""
        ends = (self.nodes[source], self.nodes[target])
        return all(node.alive for node in ends) and (source, target) not in self.lost_ways

    def lost_way(self, nodes: Collection[str]) -> tuple[str, str] | None:
        """Return a way between two of ``nodes`` that is lost; None if all reach each other."""
        return next((way for way in self.lost_ways if way[0] in nodes and way[1] in nodes), None)

    def measure(self) -> None:
        """Let the controller ask keepers what memory they have, and how large versions are."""
        inventories = self.memory.inventories(self.nodes.values(), self.now_s)
        budgets = tuple((one.node, one.budget_bytes) for one in inventories if one.budget_bytes)
        self.find(ev.MemoryMeasured, budgets=budgets, state_bytes=state_bytes(inventories))

    def is_damaged(self, node: str, arena: str, part: Part) -> bool:
        """Return whether what is held there is not what was written."""
        return bool(self.damaged) and part.source(node, arena) in self.damaged
