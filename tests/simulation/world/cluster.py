"""The virtual cluster: nodes, reservations, worker processes, attempts, and the wires between.

It performs the machine's actions as the shell would and reports what happens, late, twice or not
at all where the real thing may do so. It knows the truth; the machine hears only the reports.
"""

from collections.abc import Callable
from dataclasses import replace
from heapq import heapify
from itertools import combinations
from math import inf
from random import Random
from typing import Any

from orchestrator.core import RunRules
from orchestrator.core import actions as act
from orchestrator.core import events as ev
from orchestrator.policies import Refused, bad_sources, versions
from tests.simulation.world import loading
from tests.simulation.world.memory import answers
from tests.simulation.world.parts import STEP_S, SimAttempt, SimNode, SimWorker, Tiers
from tests.simulation.world.saving import final_snapshot, save_step
from tests.simulation.world.wires import Observer, World
from workers.protocol import DEVICE_MEMORY, Pace

#: A probe of links that are whole takes up to this.
PROBE_S = 0.1
#: A node that was given up is taken in again after this.
_RETURN_S = 0.5
#: Longer than trainers take to write: what they leave behind is committed by then.
_COMMIT_S = 0.6 * STEP_S
#: Share of requests without room of which the provider says so.
_REFUSED = 0.3
#: The words of workers about one that computes something wrong.
CORRUPT = "a simulated error"
#: Period in which a restarted controller looks for unknown reservations.
_STRAY_S = 0.2


class SimCluster(World):
    """The world in motion: ``perform`` does what the machine ordered."""

    def __init__(self, rng: Random, rules: RunRules, tiers: Tiers, monitor: Observer) -> None:
        super().__init__(rng, rules, tiers, monitor)
        self._perform: dict[type, Callable[[Any], None]] = {
            act.RequestReservation: self._request_reservation,
            act.ReleaseReservation: lambda a: self.at(self.wire_s(), self.released, a.reservation),
            act.NoteRefused: lambda _: None,
            act.StartWorker: self._start_worker,
            act.KillWorker: lambda a: self.at(self.wire_s(), self._killed, a.worker),
            act.StartKeeper: self._start_keeper,
            act.EndKeeper: self._end_keeper,
            act.RestartKeeper: self._restart_keeper,
            act.GiveUpNode: self._give_up_node,
            act.FenceAttempt: self._fence_attempt,
            act.CollectEvidence: lambda _: None,
            act.YieldAttempt: self._yield_attempt,
            act.ReadCommitted: lambda a: self.at(self.wire_s(), self._read, a, self.incarnation),
            act.ProbeLinks: self._probe_links,
            act.StartAttempt: self._start_attempt,
            act.OrderKeepers: self._order_keepers,
            act.SetCadence: self._set_cadence,
            act.ReportIncident: lambda a: monitor.incident(self, a),
            act.SurveyWorkers: lambda _: self.at(0.01, self._survey, self.incarnation),
            act.FinishRun: monitor.finished,
        }

    def dissolve(self) -> None:
        """End the world: its parts know each other, which keeps them alive for the collector."""
        for node in self.nodes.values():
            node.workers.clear()
        self.__dict__.clear()

    # Actions

    def perform(self, action: act.Action) -> None:
        """Do what the machine ordered, as the shell would."""
        self._perform[type(action)](action)

    def _request_reservation(self, action: act.RequestReservation) -> None:
        self.known_reservations.add(action.reservation)
        self.at(self.wire_s(), self._requested, action, self.incarnation)

    def _requested(self, action: act.RequestReservation, incarnation: int) -> None:
        reservation = action.reservation
        if reservation not in self.granted:
            self.pending[reservation] = action
            self.place()
            if reservation in self.pending and self.market.random() < _REFUSED:
                self.post(ev.CapacityRefused, alternative=action.alternative, why="sold out")
        if incarnation != self.incarnation:
            self.at(_STRAY_S, self._stray, reservation)

    def _stray(self, reservation: int) -> None:
        # A dead incarnation asked for it so late that the next one did not find it.
        if reservation not in self.known_reservations:
            self.released(reservation)
            # It may be asked for again.
            del self.granted[reservation]

    def released(self, reservation: int) -> None:
        """Release a reservation, or cancel a request that has not arrived."""
        self.pending.pop(reservation, None)
        name = self.granted.get(reservation)
        # A request that the release overtook must have no effect.
        self.granted[reservation] = ""
        if name:
            self.nodes[name].reservations.discard(reservation)
            self.place()

    def give_back_all(self) -> None:
        """Give back what is pending, also what is only on its way to be asked for."""
        self.pending.clear()
        self.queue[:] = [entry for entry in self.queue if entry[2] != self._requested]
        heapify(self.queue)

    def place(self) -> None:
        """Grant pending reservations where there is room."""
        for reservation, asked in list(self.pending.items()):
            for node in self.nodes.values():
                free = node.alive and not node.cut_off and node.draining_until_s is None
                fits = node.kind == asked.alternative and node.name not in asked.avoid
                if free and fits and node.num_free > 0:
                    del self.pending[reservation]
                    node.reservations.add(reservation)
                    self.granted[reservation] = node.name
                    self.post(ev.ReservationGranted, reservation=reservation, node=node.name)
                    break

    def _start_worker(self, action: act.StartWorker) -> None:
        node = self.nodes[action.node]
        if action.worker in self.workers:
            return
        self.monitor.started(action.worker)
        if not node.alive or node.cut_off:
            detail = "no such node"
            self.monitor.troubled.add(node.name)
            self.post(ev.WorkerExited, 0.5, worker=action.worker, cause="crash", detail=detail)
            return
        worker = SimWorker(action.worker, node)
        self.workers[action.worker] = node.workers[action.worker] = worker
        self.at(0.5 + self.rng.random(), self._ready, worker)

    def _ready(self, worker: SimWorker) -> None:
        if not worker.alive:
            return
        if self.start_failure and self.chance(self.start_failure):
            self.monitor.troubled.add(worker.node.name)
            if self.chance(0.5):
                self.die(worker, "crash")
            elif self.chance(0.5):
                until_s = self.now_s + 5.0 * self.rng.random() * self.rules.bounds.start_s
                self._load_slowly(worker, until_s)
            # Otherwise it never gets ready: its bound has to end it.
            return
        self._get_ready(worker)

    def _load_slowly(self, worker: SimWorker, until_s: float) -> None:
        """Have a process import modules for long, which its keeper sees."""
        if not worker.alive:
            return
        if self.now_s >= until_s:
            self._get_ready(worker)
            return
        if not worker.node.cut_off:
            self.post(ev.StartsAdvanced, workers=(worker.name,))
        self.at(self.rules.bounds.start_s / 4, self._load_slowly, worker, until_s)

    def _get_ready(self, worker: SimWorker) -> None:
        worker.ready = True
        self.post(ev.WorkerReady, worker=worker.name, node=worker.node.name, pid=1)

    def _killed(self, name: str) -> None:
        worker = self.workers.get(name)
        if worker is not None and worker.alive and not worker.node.cut_off:
            self.die(worker, "killed")
        elif worker is None:
            # The order overtook the start: the process must not come up.
            self.post(ev.WorkerExited, worker=name, cause="killed", detail="")

    def die(self, worker: SimWorker, cause: str) -> None:
        """End a process and let the world notice."""
        worker.alive = False
        self.monitor.is_state_gone = True
        if not worker.node.cut_off:
            self.monitor.left(self, worker.attempt, worker.name)
        self.monitor.faulty.add(worker.name)
        worker.node.workers.pop(worker.name, None)
        del self.workers[worker.name]
        if worker.node.keeper_back_s > self.now_s:
            self.memory.lose_worker(worker)
        if worker.node.alive:
            self.post(ev.WorkerExited, 0.03, worker=worker.name, cause=cause, detail=cause)
        self.shake(worker)

    def shake(self, worker: SimWorker) -> None:
        """Let the peers of a worker that stopped answering notice it, or not."""
        attempt = self.attempts.get(worker.attempt)
        if attempt is not None:
            for name in attempt.members:
                if name != worker.name and self.chance(0.7):
                    self.at(0.02 * self.rng.random(), self._peer_lost, name, attempt.number)

    def _peer_lost(self, name: str, number: int) -> None:
        worker = self.workers.get(name)
        is_busy = worker is not None and worker.busy_until_s > self.now_s
        if worker is not None and worker.attempt == number and not worker.hung and not is_busy:
            self.leave(worker, ev.Leaving.PEER_LOST)

    def leave(self, worker: SimWorker, how: ev.Leaving, *, unreached: str = "") -> None:
        """Take a worker out of its attempt; it writes nothing more there."""
        if how in (ev.Leaving.FENCED, ev.Leaving.PEER_LOST):
            final_snapshot(self, self.attempts[worker.attempt], worker)
        number, worker.attempt = worker.attempt, 0
        worker.refuses = max(worker.refuses, number)
        if worker.node.cut_off:
            return
        self.monitor.left(self, number, worker.name)
        found: dict[str, Any] = {}
        given = self.attempts[number].loading
        if given.is_done and not given.is_loaded:
            # A worker that found something says so, also if it is fenced before it heard of others.
            damaged, unread = given.damaged.get(worker.name), given.unread.get(worker.name)
            found = {"damaged": damaged or (), "unread": unread or ()}
            how = ev.Leaving.UNLOADABLE if damaged or unread else how
        found |= {"how": how, "step": worker.completed, "detail": self._why(worker, how)}
        self._tell(worker, ev.WorkerLeft, attempt=number, unreached=unreached, **found)

    def _tell(self, worker: SimWorker, kind: type, **values: Any) -> None:
        worker.left = (kind, {"worker": worker.name, **values})
        self.post(kind, **worker.left[1])

    def _why(self, worker: SimWorker, how: ev.Leaving) -> str:
        if how != ev.Leaving.COMPLETED:
            return how
        return "enough" if worker.completed < self.rules.total_steps else ""

    def _start_keeper(self, action: act.StartKeeper) -> None:
        node = self.nodes[action.node]
        if node.alive and not node.cut_off:
            node.has_keeper = True
            if self.now_s >= node.keeper_back_s:
                self.find(ev.KeeperReady, node=node.name)

    def _end_keeper(self, action: act.EndKeeper) -> None:
        node = self.nodes[action.node]
        self.monitor.ending_keeper(self, node)
        if node.alive and not node.cut_off:
            node.has_keeper, node.keeper_back_s = False, 0.0
            self.memory.lose_node(node.name)

    def _restart_keeper(self, action: act.RestartKeeper) -> None:
        node = self.nodes[action.node]
        self.monitor.restarting(node, self.now_s)
        if node.alive and not node.cut_off:
            self.keeper_dies(node)

    def _give_up_node(self, action: act.GiveUpNode) -> None:
        node = self.nodes[action.node]
        self.monitor.giving_up(node, self.now_s)
        # It is there all the same, and its keeper is started again.
        self.at(_RETURN_S, self._is_found_again, node)

    def _is_found_again(self, node: SimNode) -> None:
        if node.alive and not node.cut_off:
            node.keeper_back_s = self.now_s
            self.memory.grew_s = self.now_s
            self.post(ev.NodeJoined, node=node.name, rack=node.rack)

    def keeper_dies(self, node: SimNode, *, returns: bool = True) -> None:
        """End a keeper's process; living workers hand their arenas to the next one."""
        away_s = 0.3 + 0.7 * self.rng.random() if returns else inf
        node.keeper_back_s = self.now_s + away_s
        self.monitor.is_state_gone = True
        self.memory.lose_keeper(node)
        if not node.cut_off:
            self.find(ev.KeeperDied, node=node.name, detail="")
        if returns:
            self.at(away_s, self._keeper_is_back, node)

    def _keeper_is_back(self, node: SimNode) -> None:
        if self.now_s < node.keeper_back_s:
            return  # it died once more
        self.memory.grew_s = self.now_s
        if node.alive and not node.cut_off:
            self.find(ev.KeeperReady, node=node.name)

    def _fence_attempt(self, action: act.FenceAttempt) -> None:
        if action.attempt in self.attempts:
            self.attempts[action.attempt].fenced_s = self.now_s
        for name in action.workers:
            self.at(self.wire_s(), self._fenced, name, action.attempt)

    def _fenced(self, name: str, number: int) -> None:
        worker = self.workers.get(name)
        if worker is None or worker.hung or worker.node.cut_off:
            return
        if worker.attempt == number and worker.busy_until_s > self.now_s:
            # It learns of the fence when it is through.
            self.at(worker.busy_until_s - self.now_s, self._fenced, name, number)
        elif worker.attempt == number:
            self.leave(worker, ev.Leaving.FENCED)
        elif worker.refuses < number:
            # The fence overtook the assignment: it will be refused, and that is an answer too.
            worker.refuses = number
            self.post(
                ev.WorkerLeft,
                attempt=number,
                worker=name,
                how=ev.Leaving.FENCED,
                step=0,
                detail="never entered",
            )
        elif worker.left is not None and worker.left[1]["attempt"] == number:
            # A restarted controller may not have heard it.
            self.post(worker.left[0], **worker.left[1])

    def _yield_attempt(self, action: act.YieldAttempt) -> None:
        for name in action.workers:
            self.at(self.wire_s(), self._asked_to_yield, name, action.attempt, action.durable)

    def _asked_to_yield(self, name: str, number: int, durable: bool) -> None:  # noqa: FBT001
        worker = self.workers.get(name)
        if worker is not None and worker.attempt == number and not worker.hung:
            # The flag rides in the next all-reduce, so one member's knowledge is enough.
            self.attempts[number].yielding = True
            self.attempts[number].durable |= durable

    def _read(self, action: act.ReadCommitted, incarnation: int) -> None:
        if incarnation != self.incarnation:
            return  # the controller's own threads read, and ended with it
        nodes = self.nodes.values()
        if self.now_s < self.storage.back_s and self.needs_storage(action):
            return  # the machine asks again
        self.monitor.reading(action, self.now_s)
        self.measure()
        stored = self.storage.newest(
            action.lineage, bad_sources.in_storage(action.bad, action.lineage)
        )
        found = versions.newest(
            bad_sources.good(
                self.memory.inventories(nodes, self.now_s), action.bad, action.unreached
            ),
            stored,
            action.lineage,
            total_steps=self.rules.total_steps,
        )
        self.post_or_lose(
            ev.CommittedRead,
            attempt=action.attempt,
            step=found.step if found else 0,
            committed_by=found.attempt if found else 0,
            skipped=(),
            number=action.number,
            source=found.source if found else "",
            lost=() if found else self.storage.steps(action.lineage),
            stored=stored[0],
            damaged=self.storage.steps(action.lineage, damaged_only=True),
            returning=tuple(
                node.name
                for node in nodes
                if self.now_s < node.keeper_back_s and node.alive and not node.cut_off
            ),
        )

    def needs_storage(self, action: act.ReadCommitted) -> bool:
        """Return whether memory holds less than all that was completed."""
        inventories = self.memory.inventories(self.nodes.values(), self.now_s)
        good = bad_sources.good(inventories, action.bad, action.unreached)
        held = versions.newest(good, (0, 0), action.lineage, total_steps=self.rules.total_steps)
        done = max((attempt.step for attempt in self.attempts.values()), default=0)
        return held is None or held.step < done

    def _probe_links(self, action: act.ProbeLinks) -> None:
        self.at(self.wire_s() + PROBE_S * self.rng.random(), self._probed, action)

    def _probed(self, action: act.ProbeLinks) -> None:
        pairs = {*combinations(action.nodes, 2), *action.pairs}
        ways = sorted(way for one, other in pairs for way in ((one, other), (other, one)))
        heard = sorted({node for node, _ in ways if answers(self.nodes[node], self.now_s)})
        self.post_or_lose(
            ev.LinksProbed,
            number=action.number,
            pairs=action.pairs,
            heard=tuple(heard),
            lost=tuple(way for way in ways if way[0] in heard and not self.is_reached(*way)),
        )

    # An attempt

    def _start_attempt(self, action: act.StartAttempt) -> None:
        self.monitor.attempt_started(self, action)
        given = loading.begin(self, action)
        self.monitor.given(action.attempt, given.sources())
        attempt = SimAttempt(action, given, self.tiers.store_every)
        self.attempts[action.attempt] = attempt
        version = (action.resume_step, action.resume_attempt)
        nothing = (action.resume_step, frozenset[str]())
        attempt.sound_step, attempt.wrong = self.checked.get(version, nothing)
        for name, _, _ in action.members:
            self.at(self.wire_s(), self._enter, name, action.attempt)

    def _order_keepers(self, action: act.OrderKeepers) -> None:
        attempt = self.attempts.get(action.attempt)
        if attempt is not None:
            attempt.protect(action.plan)

    def _set_cadence(self, action: act.SetCadence) -> None:
        self.monitor.cadence(self, action)
        self.attempts[action.attempt].store_every = action.pace.checkpoint_steps

    def _enter(self, name: str, number: int) -> None:
        worker = self.workers.get(name)
        if worker is None or worker.hung or worker.node.cut_off or worker.refuses >= number:
            return
        attempt = self.attempts[number]
        worker.attempt, worker.formed = number, False
        worker.completed = attempt.step
        attempt.arrived.add(name)
        if len(attempt.arrived) == len(attempt.members):
            for member in attempt.members:
                self.at(0.05 + 0.1 * self.rng.random(), self._form, member, attempt)
        elif not self.workers.keys() >= set(attempt.members):
            self.at(0.05, self._peer_lost, name, number)

    def _form(self, name: str, attempt: SimAttempt) -> None:
        worker = self.workers.get(name)
        if worker is None or worker.attempt != attempt.number or worker.hung:
            return
        if self.lost_way(attempt.nodes):
            self._stall(attempt)
            self.at(STEP_S, self._form, name, attempt)
            return
        attempt.stalls = False
        refuses = self.model.refuses(attempt.layout)
        if refuses not in ("", DEVICE_MEMORY) and not self.model.is_silent:
            self.raise_in(attempt, worker, attempt.step + 1, refuses)
            return
        if not attempt.loading.is_done:
            loading.load(self, attempt.loading, attempt.members)
        if not attempt.loading.is_loaded:
            self.leave(worker, ev.Leaving.UNLOADABLE)
            return
        worker.formed = True
        damaged = attempt.loading.damaged.get(name, ())
        self.post(ev.WorkerFormed, attempt=attempt.number, worker=name, damaged=damaged)
        attempt.formed.add(name)
        if len(attempt.formed) == len(attempt.members):
            then = self._step if attempt.step < self.ends_at else self._end
            self.at(self.model.step_s(attempt.layout), then, attempt)

    def present(self, attempt: SimAttempt) -> list[SimWorker] | None:
        """Return the members if all can take part in a collective, else None."""
        members: list[SimWorker] = []
        for name in attempt.members:
            worker = self.workers.get(name)
            if worker is None or worker.attempt != attempt.number or worker.hung:
                return None
            members.append(worker)
        return members

    def _step(self, attempt: SimAttempt) -> None:
        members = self.present(attempt)
        if members is None:
            return
        if self.lost_way(attempt.nodes):
            self._stall(attempt)
            self.at(STEP_S / 2, self._step, attempt)
            return
        attempt.stalls = False
        busy_until_s = max(worker.busy_until_s for worker in members)
        if busy_until_s > self.now_s:
            self.at(busy_until_s - self.now_s, self._step, attempt)
            return
        step = attempt.step + 1
        if self._raise(attempt, members, step) or self._recheck(attempt, members, step):
            return
        attempt.step = step
        self.checked[step, attempt.number] = (attempt.sound_step, attempt.wrong)
        self.trained.append(attempt.layout)
        for worker in members:
            worker.completed = step
        self.monitor.stepped(attempt.number, step)
        # All wait for the slowest.
        step_s = self.model.step_s(attempt.layout) * max(
            worker.slow[1] if self.now_s < worker.slow[2] else 1.0 for worker in members
        )
        self.post_or_lose(ev.StepCompleted, attempt=attempt.number, step=step, step_s=step_s)
        if step in self.not_finite_at:
            number = sum(attempt.begun_step < bad <= step for bad in self.not_finite_at)
            self.post_or_lose(
                ev.NotFiniteFound, attempt=attempt.number, step=step, number=number, evidence="nan"
            )
        last = step >= min(self.rules.total_steps, self.ends_at)
        stored = save_step(self, attempt, members, last=last)
        if self.tiers.costs is not None:
            pace = Pace(
                snapshot_steps=self.tiers.snapshot_every, checkpoint_steps=attempt.store_every
            )
            costs = replace(self.tiers.costs, pace=pace)
            self.find(ev.SavesMeasured, attempt=attempt.number, costs=costs)
        if last:
            self.at(_COMMIT_S, self._leave_together, attempt, ev.Leaving.COMPLETED, stored)
        elif attempt.yielding:
            self.at(_COMMIT_S, self._leave_together, attempt, ev.Leaving.YIELDED, stored)
        else:
            self.at(step_s, self._step, attempt)

    def _end(self, attempt: SimAttempt) -> None:
        """End an attempt that resumed from the step that the script made the last one."""
        members = self.present(attempt)
        if members is not None:
            stored = save_step(self, attempt, members, last=True)
            self.at(_COMMIT_S, self._leave_together, attempt, ev.Leaving.COMPLETED, stored)

    def _stall(self, attempt: SimAttempt) -> None:
        """Let an attempt wait for a link until it is whole, or until that is noticed."""
        if not attempt.stalls:
            attempt.stalls = True
            if self.chance(0.5):
                self.post(ev.AttemptStalled, 0.1, attempt=attempt.number, waited_s=0.1)
            self.at(0.3 + 0.3 * self.rng.random(), self._notice_stall, attempt)

    def _notice_stall(self, attempt: SimAttempt) -> None:
        way = self.lost_way(attempt.nodes)
        is_over = attempt.number != self.monitor.attempt or not any(
            worker.attempt == attempt.number for worker in self.workers.values()
        )
        if way is None:
            # Whole again; if it is lost before the next step, that is noticed again.
            attempt.stalls = False
            return
        if not attempt.stalls or is_over:
            return
        ends = [w for w, node, _ in attempt.placed if node == way[0]]
        worker = self.workers.get(ends[0])
        formed = len(attempt.formed) == len(attempt.members)
        if self.chance(0.3) and worker is not None and worker.attempt == attempt.number:
            # A transport may give up by itself, and name the peer.
            if not worker.hung:
                self.leave(
                    worker, ev.Leaving.PEER_LOST, unreached=way[1] if self.chance(0.7) else ""
                )
        elif formed:
            self.post(ev.HangFound, attempt=attempt.number, guilty=(), evidence="a circle")
        self.at(0.5, self._notice_stall, attempt)

    def _raise(self, attempt: SimAttempt, members: list[SimWorker], step: int) -> bool:
        """Raise at ``step`` in the ranks that are to; return whether any did."""
        if refuses := self.model.refuses(attempt.layout):
            for worker in members:
                self.raise_in(attempt, worker, step, refuses)
            return True
        wants = Refused(attempt.layout, "", "")
        if self.is_short and not any(wants.rules_out(one) for one in self.trained):
            self.is_short = False
            self.raise_in(attempt, members[-1], step, DEVICE_MEMORY)
            self._lose_peers(attempt, members)
            return True
        if step not in self.raises_at:
            return False
        ranks = [rank for rank in self.raises_at[step] if rank < len(members)]
        if step in self.raises_once:
            del self.raises_at[step]
        for rank in ranks:
            self.raise_in(attempt, members[rank], step)
        self._lose_peers(attempt, members)
        return bool(ranks)

    def _lose_peers(self, attempt: SimAttempt, members: list[SimWorker]) -> None:
        """Let most of those that are left see that others are gone."""
        for worker in members:
            if worker.attempt == attempt.number and self.chance(0.7):
                self.at(0.02 * self.rng.random(), self._peer_lost, worker.name, attempt.number)

    def _recheck(self, attempt: SimAttempt, members: list[SimWorker], step: int) -> bool:
        """Let all raise if some err and the check of ``step`` is due; return whether they did."""
        erring = [worker for worker in members if worker.errs]
        attempt.wrong |= {worker.name for worker in erring}
        if len(members) == 1 or not self.recheck_every:
            return False
        if step % self.recheck_every and step != self.rules.total_steps:
            return False
        if not erring:
            attempt.sound_step = step - 1
            # A check cannot see what a worker did that has left since.
            for version, (sound_step, _) in self.checked.items():
                if version[0] < step and self.monitor.counts(*version):
                    self.checked[version] = (sound_step, frozenset())
            attempt.wrong = frozenset()
            return False
        is_known = 2 * len(erring) < len(members)
        ranks = [rank for rank, worker in enumerate(members) if worker.errs or not is_known]
        for worker in erring:
            # A worker that nothing convicts would err in every later attempt.
            worker.errs = is_known
        self.monitor.corrupted(attempt.number, erring, is_known=is_known)
        found: dict[str, Any] = {
            "error": f"CorruptError: {CORRUPT}",
            "ranks": tuple(ranks),
            "sound_step": attempt.sound_step,
        }
        for worker in members:
            self._leave_raising(attempt, worker, step, **found)
        return True

    def raise_in(
        self, attempt: SimAttempt, worker: SimWorker, step: int, refuses: str = ""
    ) -> None:
        """Let the training code of a worker raise, which takes it out of the attempt."""
        what = "simulated" if not refuses else f"no {refuses} in {attempt.layout}"
        if self.model.is_silent and refuses != DEVICE_MEMORY:
            refuses = ""
        if not refuses:
            self.monitor.faulty.add(worker.name)
        self._leave_raising(attempt, worker, step, error=f"ValueError: {what}", refuses=refuses)

    def _leave_raising(
        self, attempt: SimAttempt, worker: SimWorker, step: int, *, error: str, **found: Any
    ) -> None:
        final_snapshot(self, attempt, worker)
        worker.attempt, worker.refuses = 0, max(worker.refuses, attempt.number)
        if worker.node.cut_off:
            return
        self.monitor.left(self, attempt.number, worker.name)
        found |= {"step": step, "error": error, "traceback": f"Traceback: {error}"}
        self._tell(worker, ev.WorkerRaised, attempt=attempt.number, **found)

    def _leave_together(self, attempt: SimAttempt, how: ev.Leaving, stored: bool) -> None:  # noqa: FBT001
        """Leave once the step is committed; where a part is missing everybody waits."""
        landed = self.storage.commits if stored else self.memory.landed_s
        if (attempt.step, attempt.number) not in landed:
            landed_s = self.storage.back_s + 2 * _COMMIT_S
            if stored and self.now_s < landed_s and self.present(attempt) is not None:
                self.at(landed_s - self.now_s, self._leave_together, attempt, how, stored)
            return
        if how == ev.Leaving.YIELDED and self.present(attempt) is not None:
            self.monitor.all_yielded(attempt.number, attempt.step)
        for name in attempt.members:
            self.at(0.05 * self.rng.random(), self._leave_alone, name, attempt, how)

    def _leave_alone(self, name: str, attempt: SimAttempt, how: ev.Leaving) -> None:
        worker = self.workers.get(name)
        if worker is not None and worker.attempt == attempt.number and not worker.hung:
            self.leave(worker, how)

    # A new incarnation of the controller

    def _survey(self, incarnation: int) -> None:
        if incarnation != self.incarnation:
            return
        # A worker that waits in a collective answers questions.
        silent = {w.name for w in self.workers.values() if w.hung and w.hung_as != "waits"}
        alive = [
            (w.name, w.node.name, ev.UNKNOWN_ATTEMPT if w.name in silent else w.attempt)
            for w in self.workers.values()
            if not w.node.cut_off and w.node.alive
        ]
        reservations = [(reservation, name) for reservation, name in self.granted.items() if name]
        pending = tuple(self.pending)
        self.known_reservations = {*(reservation for reservation, _ in reservations), *pending}
        # The survey and what happens after it come from one loop, so they keep their order.
        self.find(
            ev.WorkersSurveyed,
            alive=tuple(alive),
            reservations=tuple(reservations),
            pending_reservations=pending,
        )
        for worker in list(self.workers.values()):
            if worker.ready and not worker.node.cut_off:
                self.post(ev.WorkerReady, worker=worker.name, node=worker.node.name, pid=1)
        for node in self.nodes.values():
            if node.alive and not node.cut_off:
                self.post(ev.NodeJoined, node=node.name, rack=node.rack)
                if node.has_keeper and self.now_s >= node.keeper_back_s:
                    self.find(ev.KeeperReady, node=node.name)
                if node.draining_until_s is not None:
                    self.at(0.01 + self.wire_s(), self.read_notice, node)
            elif not node.alive:
                # It may have gone while no controller looked.
                self.post(ev.NodeLost, node=node.name, cause="died")

    def read_notice(self, node: SimNode) -> None:
        """Let the controller read the notice of a node, as it is then."""
        if node.alive:
            until_s = inf if node.draining_until_s is None else node.draining_until_s
            self.find(ev.NodeDraining, node=node.name, deadline_s=until_s)
