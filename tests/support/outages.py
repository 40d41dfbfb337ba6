"""A year of a cluster whose servers break and are repaired, and the real machine's decisions.

The world of ``tests.simulation`` is exact to the millisecond and lasts seconds. Here a step
takes ten seconds and is reported once an attempt, messages take no time, and a server is well or
broken in one of few ways.
"""

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import inf
from pathlib import Path
from random import Random
from typing import Any

from orchestrator.core import TERMINAL, Phase, RunRules, RunState, next_deadline_s, step
from orchestrator.core import actions as act
from orchestrator.core import events as ev

_TRACE = Path(__file__).parents[1] / "fixtures/node_faults/fault_trace.json.gz"
_DAY_S = 86400.0
_STEP_S = 10.0
_START_S, _FORM_S = 20.0, 5.0
#: A process on a broken device lives for so long on average once it trains.
_FAILS_AFTER_S = 60.0
#: A worker that crashes takes one peer with it so often, which is on a healthy server.
_COLLATERAL = 0.1
_NOTICE_S = 120.0

#: How a fault shows itself: ``crash`` whenever a process trains there, ``hang`` likewise, ``start``
#: lets none start, ``gone`` takes the machine, ``drain`` takes it with notice.
_SHOWS = {
    "GPU": "crash",
    "Unknown Error": "crash",
    "Stress Test Failure": "hang",
    "NIC": "hang",
    "Software Tool": "start",
    "File System": "start",
    "Firmware": "start",
    "Training Task Troubleshooting": "drain",
    "Change": "drain",
    "Test": "drain",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """The fault of a server, its beginning and end in seconds, and its symptom."""

    node: str
    begin_s: float
    end_s: float
    shows: str


def node_faults() -> list[Fault]:
    """Return the faults of the trace in the order in which they began."""
    events = json.loads(gzip.decompress(_TRACE.read_bytes()))
    begun: dict[str, list[float]] = defaultdict(list)
    found: list[Fault] = []
    for day, kind, node, what in events:
        key = f"{node} {what}"
        if kind == "fault_start":
            begun[key].append(day * _DAY_S)
            continue
        shows = _SHOWS.get(what, "gone")
        begin_s = begun[key].pop(0)
        found.append(Fault(node=node, begin_s=begin_s, end_s=day * _DAY_S, shows=shows))
    assert not any(begun.values()), "a fault has no end"
    return sorted(found, key=lambda fault: (fault.begin_s, fault.node))


@dataclass
class _Server:
    name: str
    #: To Ray, a machine that was gone and is back is another one.
    node: str
    alive: bool = True
    draining: bool = False
    reservation: int | None = None
    faults: list[Fault] = field(default_factory=list)

    def shows(self) -> str:
        """Return how it is broken now, "" if it is well."""
        return self.faults[0].shows if self.faults else ""


class Outages:
    """Replays faults through the machine."""

    def __init__(self, rules: RunRules, servers: Sequence[str], faults: Sequence[Fault]) -> None:
        self.rules = rules
        self.state = RunState()  #: State of the machine.
        self.outcome: act.FinishRun | None = None  #: How the run ended; None while it goes on.
        self.kinds: Counter[str] = Counter()  #: Attempts that ended, by incident.
        self.charged_max = 0  #: Most faults that counted at once in the budget's window.
        #: (server, from, until) of each time a server was kept out.
        self.quarantines: list[tuple[str, float, float]] = []
        self.num_events = 0
        self.now_s = 0.0
        self.trained_s = 0.0
        self._draw = Random(0)
        self._serials = count()
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._servers = {name: _Server(name, name) for name in servers}
        self._by_node = dict(self._servers)
        self._pending: dict[int, act.RequestReservation] = {}
        self._granted: dict[int, _Server] = {}
        # Worker -> its server; and who is in the attempt.
        self._workers: dict[str, _Server] = {}
        self._inside: dict[str, None] = {}
        self._attempt: act.StartAttempt | None = None
        self._trains_since_s = inf
        self._completed, self._completed_by = 0, 0
        self._perform: dict[type, Callable[[Any], None]] = {
            act.RequestReservation: self._request_reservation,
            act.ReleaseReservation: self._release_reservation,
            act.StartWorker: self._start_worker,
            act.KillWorker: self._kill_worker,
            act.StartKeeper: lambda action: self._later(0.0, ev.KeeperReady, node=action.node),
            act.FenceAttempt: lambda action: self._leave(action, ev.Leaving.FENCED),
            act.YieldAttempt: lambda action: self._leave(action, ev.Leaving.YIELDED),
            act.ReadCommitted: self._read,
            act.StartAttempt: self._start_attempt,
            act.ReportIncident: self._report,
            act.FinishRun: self._finish,
        }
        for fault in faults:
            self._at(fault.begin_s, self._break, fault)
            self._at(fault.end_s, self._repair, fault)
        self._fold(ev.ControllerStarted(at_s=0.0, incarnation=1))
        for name in servers:
            self._fold(ev.NodeJoined(at_s=0.0, node=name))

    def run_until(self, end_s: float) -> None:
        """Let time pass until then, or until the run ends."""
        while self.outcome is None:
            at_s = self._queue[0][0] if self._queue else inf
            deadline_s = next_deadline_s(self.state)
            if min(at_s, deadline_s) >= end_s:
                self.now_s = end_s
                self._stop_counting()
                return
            if at_s <= deadline_s:
                self.now_s, _, do, arguments = heappop(self._queue)
                do(*arguments)
            else:
                self.now_s = max(self.now_s, deadline_s)
                self._fold(ev.Ticked(at_s=self.now_s))

    # The world

    def _at(self, at_s: float, do: Callable[..., None], *arguments: Any) -> None:
        heappush(self._queue, (at_s, next(self._serials), do, arguments))

    def _later(self, delay_s: float, kind: type, **values: Any) -> None:
        self._at(self.now_s + delay_s, self._tell, kind, values)

    def _tell(self, kind: type, values: dict[str, Any]) -> None:
        self._fold(kind(at_s=self.now_s, **values))

    def _fold(self, event: ev.Event) -> None:
        self.num_events += 1
        self.state, actions = step(self.state, event, rules=self.rules)
        for action in actions:
            perform = self._perform.get(type(action))
            if perform is not None:
                perform(action)

    def _break(self, fault: Fault) -> None:
        server = self._servers[fault.node]
        server.faults.append(fault)
        if fault.shows == "gone" and server.alive:
            self._take(server)
        elif fault.shows == "drain" and server.alive and not server.draining:
            server.draining = True
            by_s = self.now_s + _NOTICE_S
            self._later(0.0, ev.NodeDraining, node=server.node, deadline_s=by_s)
            self._at(by_s, self._take, server)
        elif self._attempt is not None:
            self._strike_soon(self._attempt)

    def _repair(self, fault: Fault) -> None:
        server = self._servers[fault.node]
        server.faults.remove(fault)
        if not server.alive and not {"gone", "drain"} & {each.shows for each in server.faults}:
            server.alive, server.draining = True, False
            server.node = f"{server.name}-{next(self._serials)}"
            self._by_node[server.node] = server
            self._later(0.0, ev.NodeJoined, node=server.node)
            self._place()

    def _take(self, server: _Server) -> None:
        if not server.alive:
            return
        server.alive, server.reservation = False, None
        for worker in [w for w, at in self._workers.items() if at is server]:
            del self._workers[worker]
            self._inside.pop(worker, None)
        self._later(0.0, ev.NodeLost, node=server.node, cause="died")
        if not server.faults:  # a drain that was over before its deadline
            server.faults.append(Fault(node=server.name, begin_s=0.0, end_s=0.0, shows="gone"))
            self._repair(server.faults[0])

    # Orders of the machine

    def _request_reservation(self, action: act.RequestReservation) -> None:
        self._pending[action.reservation] = action
        self._place()

    def _place(self) -> None:
        free = [
            s
            for s in self._servers.values()
            if s.alive and not s.draining and s.reservation is None
        ]
        for reservation, asked in list(self._pending.items()):
            fit = [each for each in free if each.node not in asked.avoid]
            if fit:
                server = self._draw.choice(fit)
                free.remove(server)
                del self._pending[reservation]
                server.reservation = reservation
                self._granted[reservation] = server
                self._later(0.0, ev.ReservationGranted, reservation=reservation, node=server.node)

    def _release_reservation(self, action: act.ReleaseReservation) -> None:
        self._pending.pop(action.reservation, None)
        server = self._granted.pop(action.reservation, None)
        if server is not None and server.reservation == action.reservation:
            server.reservation = None
            self._place()

    def _start_worker(self, action: act.StartWorker) -> None:
        server = self._by_node[action.node]
        if server.node != action.node or not server.alive:
            self._later(0.0, ev.WorkerExited, worker=action.worker, cause="crash", detail="no node")
            return
        self._workers[action.worker] = server
        self._at(self.now_s + _START_S, self._started, action.worker, action.node)

    def _started(self, worker: str, node: str) -> None:
        server = self._workers.get(worker)
        if server is None:
            return
        if server.shows() == "start":
            self._exit(worker, "crash")
        else:
            self._later(0.0, ev.WorkerReady, worker=worker, node=node, pid=1)

    def _kill_worker(self, action: act.KillWorker) -> None:
        if action.worker in self._workers:
            self._later(0.0, ev.WorkerExited, worker=action.worker, cause="killed", detail="")
            del self._workers[action.worker]
            self._inside.pop(action.worker, None)

    def _exit(self, worker: str, cause: str) -> None:
        server = self._workers.pop(worker)
        self._inside.pop(worker, None)
        self._fold(ev.WorkerExited(at_s=self.now_s, worker=worker, cause=cause, detail=cause))
        self._note_quarantine(server)

    def _note_quarantine(self, server: _Server) -> None:
        node = self.state.fleet.nodes[self.state.fleet.node_ids[server.node]]
        if node.avoid_until_s > self.now_s:
            self.quarantines.append((server.name, self.now_s, node.avoid_until_s))

    def _leave(self, action: act.FenceAttempt | act.YieldAttempt, how: ev.Leaving) -> None:
        self._stop_counting()
        for worker in action.workers:
            if self._inside.pop(worker, 0) is None:
                self._later(
                    0.0, ev.WorkerLeft, attempt=action.attempt, worker=worker, how=how,
                    step=self._completed, detail=how,
                )  # fmt: skip

    def _stop_counting(self) -> None:
        """Count the steps of the attempt that ends."""
        trained_s = self.now_s - self._trains_since_s
        if self._attempt is not None and trained_s >= 0.0:
            self.trained_s += trained_s * len(self._attempt.members)
            self._completed += int(trained_s / _STEP_S)
            self._trains_since_s = inf

    def _read(self, action: act.ReadCommitted) -> None:
        self._later(
            0.0, ev.CommittedRead, attempt=action.attempt, step=self._completed,
            committed_by=self._completed_by, skipped=(), number=action.number,
            source="memory" if self._completed else "", stored=0,
        )  # fmt: skip

    def _start_attempt(self, action: act.StartAttempt) -> None:
        self._attempt = action
        self._inside = dict.fromkeys(worker for worker, _, _ in action.members)
        for worker in self._inside:
            self._later(_FORM_S, ev.WorkerFormed, attempt=action.attempt, worker=worker)
        self._at(self.now_s + _FORM_S + _STEP_S, self._first_step, action)

    def _first_step(self, action: act.StartAttempt) -> None:
        if self._attempt is not action or len(self._inside) < len(action.members):
            return
        self._completed += 1
        self._completed_by = action.attempt
        self._trains_since_s = self.now_s
        self._fold(
            ev.StepCompleted(
                at_s=self.now_s, attempt=action.attempt, step=self._completed, step_s=_STEP_S
            )
        )
        self._strike_soon(action)

    def _strike_soon(self, action: act.StartAttempt) -> None:
        """Let the broken members of an attempt fail, each in its time."""
        for worker in self._inside:
            if self._workers[worker].shows() in ("crash", "hang"):
                after_s = self._draw.expovariate(1 / _FAILS_AFTER_S)
                self._at(self.now_s + after_s, self._fail, action, worker)

    def _fail(self, action: act.StartAttempt, worker: str) -> None:
        server = self._workers.get(worker)
        is_over = self._attempt is not action or len(self._inside) < len(action.members)
        if server is None or is_over or self._trains_since_s == inf:
            return
        if server.shows() == "hang":
            self._fold(
                ev.HangFound(
                    at_s=self.now_s, attempt=action.attempt, guilty=(worker,), evidence="stands"
                )
            )
            self._note_quarantine(server)
        elif server.shows() == "crash":
            peers = [each for each in self._inside if each != worker]
            self._exit(worker, "crash")
            if self._draw.random() < _COLLATERAL:
                peer = self._draw.choice(peers)
                if peer in self._workers:
                    self._exit(peer, "crash")

    def _report(self, action: act.ReportIncident) -> None:
        self.kinds[action.incident] += 1
        self.charged_max = max(self.charged_max, len(self.state.faults))

    def _finish(self, action: act.FinishRun) -> None:
        self.outcome = action

    @property
    def phase(self) -> Phase:
        """Return where the run is."""
        assert (self.outcome is None) == (self.state.phase not in TERMINAL)
        return self.state.phase
