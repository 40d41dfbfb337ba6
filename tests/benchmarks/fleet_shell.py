"""A shell without machines: it answers each order of the controller as a healthy cluster would.

Its own work costs the size of a node, so that the times are the controller's: of its decision, of
the records and of the numbers that are folded from them.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from itertools import count
from time import thread_time
from typing import Any

from orchestrator import core
from orchestrator.core import actions as act
from orchestrator.core import events as ev
from orchestrator.shell.storage import JournalFile

NUM_RANKS = 8
STEP_S = 10.0
#: Steps that are committed, in memory or in storage.
COMMIT_EVERY = 6
_START_S, _FORM_S, _LEAVE_S, _READ_S, _WIRE_S = 20.0, 5.0, 0.5, 0.2, 0.05
#: Members on different nodes leave, or form, within this.
_SPREAD_S = 0.5
#: Time of the loop for an event and its line in the journal, in which other events come.
_CYCLE_S = 5e-4
#: One node in this many had a connection with the unreachable ones.
_NEIGHBOURS = 100


class Costs:
    """Processor times of one part of a run, by what was done."""

    def __init__(self) -> None:
        self.decide_s: list[tuple[float, str]] = []
        self.record_s: list[tuple[float, str]] = []


class FleetShell:
    """Plays a run of ``num_nodes`` nodes, with ``num_spares`` more.

    Attributes:
        costs: Since they were last replaced.
        stored: Whether storage answers.
    """

    def __init__(
        self, rules: core.RunRules, num_nodes: int, num_spares: int, journal: JournalFile
    ) -> None:
        self.rules = rules
        self.state = core.RunState()
        self.stats = core.RunStats()
        self.journal = journal
        self.costs = Costs()
        self.now_s = 0.0
        self.num_events = 0
        self.stored = True
        self.counts: Counter[str] = Counter()
        self._seq = count()
        self._serials = count()
        self._heard: deque[ev.Event] = deque()
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.alive: dict[str, None] = {}
        self._joined = count(1)
        self._workers: dict[str, str] = {}
        self._on: dict[str, dict[str, None]] = {}
        self._free: deque[str] = deque()
        self._pending: OrderedDict[int, act.RequestReservation] = OrderedDict()
        self._granted: dict[int, str] = {}
        self._leaving: set[str] = set()
        self._behind: set[str] = set()
        self._attempt: act.StartAttempt | None = None
        self._inside: dict[str, None] = {}
        self._unformed = 0
        self._step = self._committed = self._committed_by = 0
        self._perform: dict[type, Callable[[Any], None]] = {
            act.RequestReservation: self._request,
            act.ReleaseReservation: self._release,
            act.StartWorker: self._start_worker,
            act.KillWorker: self._kill_worker,
            act.StartKeeper: lambda a: self._later(_START_S, ev.KeeperReady, node=a.node),
            act.FenceAttempt: lambda a: self._leave(a, ev.Leaving.FENCED),
            act.YieldAttempt: lambda a: self._leave(a, ev.Leaving.YIELDED),
            act.ReadCommitted: self._read,
            act.ProbeLinks: self._probe,
            act.StartAttempt: self._start_attempt,
        }
        self.fold(ev.ControllerStarted(at_s=0.0, incarnation=1))
        for _ in range(num_nodes + num_spares):
            self.join()

    # Time

    def run_for(self, seconds: float) -> None:
        """Let time pass."""
        end_s = self.now_s + seconds
        while True:
            at_s = self._queue[0][0] if self._queue else end_s
            deadline_s = core.next_deadline_s(self.state)
            if min(at_s, deadline_s) >= end_s:
                self.now_s = end_s
                return
            if at_s <= deadline_s:
                self._next()
            else:
                self.now_s = max(self.now_s, deadline_s)
                self._heard.append(ev.Ticked(at_s=self.now_s))
            self._take_in()

    def _next(self) -> None:
        self.now_s, _, do, arguments = heappop(self._queue)
        do(*arguments)

    def _take_in(self) -> None:
        """Fold what was heard, and what comes meanwhile, as the loop of the shell does."""
        busy_s = self.now_s
        while self._heard:
            busy_s += _CYCLE_S
            while self._queue and self._queue[0][0] < busy_s:
                self._next()
            self.fold(core.take_alike(self._heard))

    def run_until(self, is_so: Callable[[], bool], within_s: float) -> None:
        """Let time pass until ``is_so``."""
        end_s = self.now_s + within_s
        while not is_so():
            assert self.now_s < end_s, f"{self.state.phase} after {within_s} s: {self.state.reason}"
            self.run_for(1.0)

    @property
    def trains(self) -> bool:
        """Return whether the newest attempt has done a step."""
        return self.state.phase is core.Phase.TRAINING and self.state.attempt.stepped

    def fold(self, event: ev.Event) -> None:
        """Fold an event as the loop of the shell does, and perform the orders."""
        self.num_events += 1
        kind = type(event).__name__
        self.counts[kind] += 1
        began_s = thread_time()
        before, (self.state, actions) = (
            self.state,
            core.step(self.state, event, rules=self.rules),
        )
        decided_s = thread_time()
        self.costs.decide_s.append((decided_s - began_s, kind))
        if self.state is before and not actions:
            return
        records = core.transition_records(event, actions, attempt=self.state.attempt.number)
        for record in records:
            record["seq"], record["wall_time"] = next(self._seq), self.now_s
        self.journal.append(records)
        for record in records:
            self.stats.add(record)
        self.costs.record_s.append((thread_time() - decided_s, kind))
        for action in actions:
            perform = self._perform.get(type(action))
            if perform is not None:
                perform(action)

    def _at(self, at_s: float, do: Callable[..., None], *arguments: Any) -> None:
        heappush(self._queue, (at_s, next(self._serials), do, arguments))

    def _later(self, delay_s: float, kind: type, **values: Any) -> None:
        self._at(self.now_s + delay_s, self._tell, kind, values)

    def _tell(self, kind: type, values: dict[str, Any]) -> None:
        self._heard.append(kind(at_s=self.now_s, **values))

    # Faults

    def join(self) -> None:
        """A new machine comes."""
        number = next(self._joined)
        node = f"{number:056x}"
        self.alive[node] = None
        self._on[node] = {}
        self._free.extend([node] * NUM_RANKS)
        self.fold(ev.NodeJoined(at_s=self.now_s, node=node, rack=f"r{number // 32}"))
        self._place()

    def lose(self, nodes: Iterable[str], *, cause: str = "died", over_s: float = 1.0) -> None:
        """Machines are gone; each is said to be within ``over_s``."""
        names = list(nodes)
        for n, node in enumerate(names):
            del self.alive[node]
            self._leaving.discard(node)
            self._behind.discard(node)
            for worker in self._on.pop(node):
                del self._workers[worker]
                self._inside.pop(worker, None)
            self._later(over_s * n / len(names), ev.NodeLost, node=node, cause=cause)

    def cut_off(self, nodes: Iterable[str]) -> None:
        """Machines reach no other machine, but their reports come: the others lose connections.

        Those that had a connection with one of them say which; the others were reset by these.
        """
        assert self._attempt is not None
        self._behind = set(nodes)
        unreached = min(self._behind)
        for place, worker in enumerate(list(self._inside)):
            node = place // NUM_RANKS
            self._inside.pop(worker)
            if self._workers[worker] not in self._behind:
                self._later(
                    self._after(_LEAVE_S, node), ev.WorkerLeft, attempt=self._attempt.attempt,
                    worker=worker, how=ev.Leaving.PEER_LOST, step=self._step, detail="reset",
                    unreached="" if node % _NEIGHBOURS else unreached,
                )  # fmt: skip

    def _after(self, seconds: float, node: int) -> float:
        """Return a delay that differs by node, and that the workers there share."""
        return seconds + _SPREAD_S * node / len(self.alive)

    def notice(self, node: str, lead_s: float, *, replaced: bool = True) -> None:
        """The provider says that it takes a machine, may give another one, and takes it."""
        self._leaving.add(node)
        by_s = self.now_s + lead_s
        self.fold(ev.NodeDraining(at_s=self.now_s, node=node, deadline_s=by_s, notice="spot"))
        if replaced:
            self.join()
        self._at(by_s, self._take, node)

    def _take(self, node: str) -> None:
        if node in self.alive:
            self.lose([node])

    def crash(self, worker: str) -> None:
        """A process dies."""
        self._on[self._workers.pop(worker)].pop(worker)
        self._inside.pop(worker, None)
        self.fold(ev.WorkerExited(at_s=self.now_s, worker=worker, cause="crash", detail="signal 9"))

    def members_on(self, node: str) -> list[str]:
        """Return the processes of the run on a machine."""
        return list(self._on.get(node, ()))

    # Orders

    def _request(self, action: act.RequestReservation) -> None:
        self._pending[action.reservation] = action
        if self._free:
            self._place()

    def _place(self) -> None:
        skipped: list[str] = []
        while self._free and self._pending:
            node = self._free.popleft()
            if node not in self.alive or node in self._leaving:
                continue
            reservation = next(iter(self._pending))
            if node in self._pending[reservation].avoid:
                skipped.append(node)
                continue
            del self._pending[reservation]
            self._granted[reservation] = node
            self._later(_WIRE_S, ev.ReservationGranted, reservation=reservation, node=node)
        self._free.extend(skipped)

    def _release(self, action: act.ReleaseReservation) -> None:
        self._pending.pop(action.reservation, None)
        node = self._granted.pop(action.reservation, "")
        if node in self.alive:
            self._free.append(node)
            self._place()

    def _start_worker(self, action: act.StartWorker) -> None:
        if action.node not in self.alive:
            self._later(_WIRE_S, ev.WorkerExited, worker=action.worker, cause="node", detail="gone")
            return
        self._workers[action.worker] = action.node
        self._on[action.node][action.worker] = None
        self._at(self.now_s + _START_S, self._started, action.worker, action.node)

    def _started(self, worker: str, node: str) -> None:
        if worker in self._workers:
            self._tell(ev.WorkerReady, {"worker": worker, "node": node, "pid": 1})

    def _kill_worker(self, action: act.KillWorker) -> None:
        node = self._workers.pop(action.worker, "")
        if node:
            self._on[node].pop(action.worker)
            self._inside.pop(action.worker, None)
            self._later(
                _WIRE_S, ev.WorkerExited, worker=action.worker, cause="killed", detail="killed"
            )

    def _leave(self, action: act.FenceAttempt | act.YieldAttempt, how: ev.Leaving) -> None:
        if self._attempt is None or action.attempt != self._attempt.attempt:
            return
        if how is ev.Leaving.YIELDED:
            self._committed, self._committed_by = self._step, action.attempt
        for place, worker in enumerate(action.workers):
            if self._inside.pop(worker, 0) is None:
                self._later(
                    self._after(_LEAVE_S, place // NUM_RANKS), ev.WorkerLeft,
                    attempt=action.attempt, worker=worker, how=how, step=self._step, detail=how,
                )  # fmt: skip

    def _read(self, action: act.ReadCommitted) -> None:
        self._later(
            _READ_S, ev.CommittedRead, attempt=action.attempt, step=self._committed,
            committed_by=self._committed_by, skipped=(), number=action.number,
            source="memory" if self._committed else "",
            stored=self._committed if self.stored else -1,
        )  # fmt: skip

    def _probe(self, action: act.ProbeLinks) -> None:
        ends = dict.fromkeys((*action.nodes, *(end for pair in action.pairs for end in pair)))
        heard = tuple(node for node in ends if node in self.alive)
        outside = [node for node in heard if node not in self._behind]
        # Each of them says whom it does not reach.
        lost = tuple((node, to) for node in outside for to in sorted(self._behind & ends.keys()))
        self._later(
            1.0, ev.LinksProbed, number=action.number, heard=heard, pairs=action.pairs, lost=lost
        )

    def _start_attempt(self, action: act.StartAttempt) -> None:
        self._attempt = action
        self._step = action.resume_step
        self._inside = {worker: None for worker, _, _ in action.members if worker in self._workers}
        self._unformed = len(action.members)
        for place, (worker, _, _) in enumerate(action.members):
            form_s = self.now_s + self._after(_FORM_S, place // NUM_RANKS)
            self._at(form_s, self._formed, action, worker)

    def _formed(self, action: act.StartAttempt, worker: str) -> None:
        if action is self._attempt and worker in self._inside:
            self._tell(ev.WorkerFormed, {"attempt": action.attempt, "worker": worker})
            self._unformed -= 1
            if not self._unformed:
                self._at(self.now_s + STEP_S, self._stepped, action)

    def _stepped(self, action: act.StartAttempt) -> None:
        if action is not self._attempt or len(self._inside) < len(action.members):
            return
        self._step += 1
        number = action.attempt
        done = {"attempt": number, "step": self._step}
        self._tell(ev.StepCompleted, {**done, "step_s": STEP_S})
        if self._step % COMMIT_EVERY == 0 and self.stored:
            self._committed, self._committed_by = self._step, number
            self._tell(ev.CheckpointCommitted, done)
        self._at(self.now_s + STEP_S, self._stepped, action)
