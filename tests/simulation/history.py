"""One seed, one history: a safety phase with faults, then a liveness phase without."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import heapify
from itertools import combinations
from math import inf
from random import Random
from typing import Any

from orchestrator.core import (
    TERMINAL,
    AvoidRules,
    Bounds,
    Phase,
    RunRules,
    RunState,
    machine,
    next_deadline_s,
    resume_event,
    take_alike,
)
from orchestrator.core import actions as act
from orchestrator.core import events as ev
from orchestrator.policies import (
    BudgetRules,
    CadenceRules,
    CapacityRules,
    GrowthRules,
    LayoutRules,
    SharingRules,
    SlowRules,
)
from tests.simulation.checkers import SLOW_STEADY_S, Monitor, check
from tests.simulation.faults import drawing, slowing
from tests.simulation.violation import Violation, require
from tests.simulation.world import (
    COPY_S,
    STEP_S,
    Neighbour,
    SimCluster,
    SimJournal,
    SimModel,
    SimNode,
    Tiers,
)
from workers.protocol import Pace, SaveCosts
from workers.settings import SnapshotSettings

#: Every wait of the machine is shorter than a minute here, and some follow each other.
LIVENESS_S = 120.0
#: A history that needs more events than this goes round in circles.
EVENTS_MAX = 20_000

#: Chance that the controller dies while it performs the actions of one event.
_DEATH = 0.004
#: Share of the histories whose training code has a bug, and of those that are stopped.
_BUG = 0.05
_STOP = 0.05
#: Share of those whose script ends before the last step, and whose numbers are not finite at times.
_ENDS_EARLY = 0.05
_NOT_FINITE = 0.2
#: Said of a failure for want of a version to load.
_WITHOUT_STATE = "name another run.directory"
#: For how long the controller is busy with something else, in a third of the histories.
_BUSY_S = 0.03
#: Share of those whose head is lost while the run goes on.
_HEAD_LOST = 0.1
#: Share of those in which connections are reset for a while, and the longest such time: attempts
#: fail in a row more often than a run survives for another reason.
_RESETS = 0.05
_RESETS_S = 160.0
#: Share of the histories in which storage is away for a while.
_OUTAGE = 0.1
#: Share of histories in which the model cannot have some layouts.
_REFUSES = 0.3
_SHORT = 0.2
#: Share of those in which another run comes to the cluster, and goes again.
_SHARED = 0.25
#: Share of those in which workers get slow, compile, or share a machine with something.
_SLOW = 0.15
#: They are longer, as it takes steps to see that.
_SLOW_STEPS = 4
#: Share of those in which workers compare what they compute, and one errs.
_CORRUPT = 0.15
#: Share of those with snapshots whose interval of checkpoints is chosen.
_CHOSEN = 0.25

_BOUNDS = Bounds(
    grace_s=1.0,
    capacity_s=10_000.0,
    start_s=4.0,
    form_s=2.5,
    fence_s=0.4,
    kill_s=0.5,
    read_s=1.0,
    probe_s=0.6,
    yield_s=1.5,
    survey_s=1.0,
    drain_lead_s=0.7,
    backoff_s=0.2,
    keeper_silent_s=1.5,
    keeper_return_s=2.0,
)
_GROWTH = GrowthRules(interval_s_min=0.3, gather_s=0.15, pause_guess_s=0.1)
_SLOW_RULES = SlowRules(
    lasts_s=4.0, steady_s=SLOW_STEADY_S, lost_steps=2.0, agreed_lost_steps=1.0, replace_s=0.5
)
_CAPACITY = CapacityRules(guess_s=1.0, wait_s_min=0.3, seen_s=0.1)
_SHARING = SharingRules(settle_s=0.5, deaf_s=2.0)
#: In a quarter of the histories there are alternatives.
_PRICES = (*[(0.0,)] * 6, (1.0, 3.0), (1.0, 2.0, 3.0))
#: Those of production, but for the training code: a history may inject more errors in its few
#: seconds than a run survives in an hour.
_BUDGETS = BudgetRules(user_max=100)

#: Events by which the machine learns of sources and versions.
_TELLING = (
    ev.WorkerLeft,
    ev.WorkerFormed,
    ev.WorkerRaised,
    ev.CommittedRead,
    ev.StepCompleted,
    ev.MembersAtWork,
    ev.StartsAdvanced,
    ev.NodeDraining,
    ev.NodeJoined,
)

_PHASES_FOR_SECOND_FAULT = frozenset({Phase.FENCING, Phase.READING, Phase.FORMING, Phase.YIELDING})


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryResult:
    """The numbers of one history."""

    seed: int
    num_events: int
    num_attempts: int
    num_faults: int
    num_lost_steps: int
    virtual_s: float


class History:
    """Drives the machine through one seed.

    Args:
        fault_limit: Inject only the first so many faults; how a failing seed is made smaller.
        kinds: Inject faults of these kinds only; None draws them.
        tiers: How the run saves; None draws it.
        observe: Called with every event, the state after it, and the actions.
    """

    def __init__(
        self,
        seed: int,
        *,
        fault_limit: int | None = None,
        kinds: Sequence[drawing.Fault] | None = None,
        tiers: Tiers | None = None,
        observe: Callable[[ev.Event, RunState, Sequence[act.Action]], None] | None = None,
    ) -> None:
        self.seed = seed
        self.observe = observe
        self.rng = rng = Random(seed)
        self.monitor = Monitor()
        # Separate draws change nothing else in the history.
        apart = Random(f"memory {seed}")
        drawn = _draw_tiers(rng, apart)
        tiers = tiers or drawn
        market = Random(f"market {seed}")
        axes = Random(f"axes {seed}")
        self.rules, rooms = _draw_rules(rng, tiers, market, axes, seed)
        self.cluster = SimCluster(rng, self.rules, tiers, self.monitor)
        self.state = RunState()
        # The state's deadline; the inbox comes first, so it need not be known before a fold.
        self.deadline_s = inf
        # The newest whose invariants were seen to hold.
        self.passed: RunState | None = None
        self.num_events = 0
        self.num_faults = 0
        self.fault_limit = 10_000 if fault_limit is None else fault_limit
        self.second_fault = rng.choice((0.0, 0.1, 0.3))
        # Not all kinds in one history: some bugs need many faults of one kind.
        some = rng.sample(drawing.FAULTS, k=rng.randint(1, len(drawing.FAULTS)))
        self.kinds: tuple[drawing.Fault, ...] = tuple(kinds or some)
        self.check_always = seed % 16 == 0
        self.is_replayed = seed % 32 == 0
        # Reading the journal in every history would take a tenth of the time of all.
        self.journal = (
            SimJournal(seed, self.rules, is_thorough=self.is_replayed) if seed % 4 == 0 else None
        )
        self.healing = False
        # Whether links stay lost in the liveness phase.
        self.network_ails = apart.random() < 1 / 3
        self.resets_until_s = 0.0
        self.died_at_the_end = False
        # Whether it failed because all that was committed is damaged, and can be repaired.
        self.is_lost = False
        # Whether it failed because the layout that was asked for cannot train.
        self.is_refused = False
        cluster = self.cluster
        cluster.start_failure = rng.choice((0.0, 0.0, 0.1))
        cluster.market = market
        for room in rooms:
            drawing.return_node(cluster, room, apart.choice(("", "", "r0", "r1")))
        self.expected = self._draw_ending()
        self._draw_script()
        self._draw_model()
        self.neighbour: Neighbour | None = None
        cluster.begin_claim = self._begin_claim
        self._draw_faults(apart, is_swarm=kinds is None)
        cluster.inbox.append(ev.ControllerStarted(at_s=0.0, incarnation=1))

    def _draw_faults(self, apart: Random, *, is_swarm: bool) -> None:
        """Decide what happens when, up to the liveness phase."""
        rng, cluster = self.rng, self.cluster
        safety_s = 2.0 + self.rules.total_steps * STEP_S
        # Reports of members gather while it is busy, and are then one event.
        self.busy_s = _BUSY_S if self.seed % 3 == 0 else 0.0
        for _ in range(rng.choice((0, 1, 2, 3, 4, 6, 12))):
            cluster.at(1.0 + rng.random() * safety_s, self._inject)
        # Mostly after the end of the run.
        cluster.at(1.0 + safety_s * apart.random() / _OUTAGE, self._cut_off_storage)
        cluster.at(safety_s + 2.0, self._heal)
        head = Random(f"head {self.seed}")
        if is_swarm and head.random() < _HEAD_LOST:
            cluster.at(1.0 + head.random() * safety_s, self._lose_head, head)
        other = Random(f"neighbour {self.seed}")
        if is_swarm and other.random() < _SHARED:
            cluster.at(1.0 + safety_s * other.random(), self._share, other)
        slow = Random(f"slow {self.seed}")
        if slow.random() < _SLOW and is_swarm:
            for _ in range(slow.choice((1, 1, 2, 4))):
                cluster.at(1.0 + safety_s * slow.random() / 4, self._slow_down, slow)
        wrong = Random(f"corrupt {self.seed}")
        if is_swarm and wrong.random() < _CORRUPT:
            cluster.recheck_every = wrong.randint(1, 3)
            cluster.at(1.0 + safety_s * wrong.random(), self._corrupt, wrong)
        resets = Random(f"resets {self.seed}")
        if is_swarm and resets.random() < _RESETS:
            cluster.at(1.0 + safety_s * resets.random(), self._reset_connections, resets)

    def _draw_ending(self) -> str:
        """Decide how the run is to end: most complete, some are stopped or have a bug."""
        rng, cluster = self.rng, self.cluster
        ending = rng.random()
        if ending < _BUG:
            cluster.raises_at[rng.randint(1, self.rules.total_steps)] = rng.choice(((0,), (0, 1)))
            return "failed"
        if ending < _BUG + _STOP:
            at_s = rng.random() * self.rules.total_steps * STEP_S
            cluster.at(at_s, self._stop)
            return "stopped"
        return "completed"

    def _draw_script(self) -> None:
        """Decide what the script does beside its steps."""
        script = Random(f"script {self.seed}")
        if script.random() < _ENDS_EARLY and self.expected != "failed":
            self.cluster.ends_at = script.randint(1, self.rules.total_steps)
        if script.random() < _NOT_FINITE:
            steps = range(1, self.rules.total_steps + 1)
            self.cluster.not_finite_at = {step for step in steps if script.random() < _NOT_FINITE}

    def _draw_model(self) -> None:
        """Decide which layouts the model cannot have, and which are slow.

        Data parallelism of some size can train.
        """
        model = Random(f"model {self.seed}")
        pace = Random(f"pace {self.seed}")
        layout, most = self.rules.layout, self.rules.max_workers // _copies(self.rules)
        wish = tuple((axis, getattr(layout, axis)) for axis in ("tp", "pp", "ep", "cp"))
        degrees = [(axis, one) for axis, top in wish for one in range(2, top + 1) if top % one == 0]
        slow = frozenset(pace.sample(degrees, k=min(len(degrees), pace.randint(0, 2))))
        self.cluster.model = SimModel(slow=slow)
        self.cluster.is_short = Random(f"short {self.seed}").random() < _SHORT
        if model.random() > _REFUSES:
            return
        cannot = frozenset(model.sample(degrees, k=min(len(degrees), model.randint(0, 2))))
        shards_min, is_silent = model.randint(1, most), model.random() < 0.5
        self.cluster.model = SimModel(cannot, shards_min, slow, is_silent)

    def _stop(self) -> None:
        # A run that was resumed meanwhile is to complete.
        if self.expected == "stopped":
            self.cluster.post(ev.StopRequested, reason="stopped")

    def run(self) -> HistoryResult:
        """Run to the end; raise ``Violation`` if a promise was broken."""
        cluster = self.cluster
        try:
            self._run_to_end()
            while self.is_lost or self.is_refused or self.expected != "completed":
                self._resume_run()
                self._run_to_end()
        except Violation:
            raise
        except AssertionError as error:
            raise Violation(f"invariant: {error}") from error
        return HistoryResult(
            seed=self.seed,
            num_events=self.num_events,
            num_attempts=self.state.attempt.number,
            num_faults=self.num_faults,
            num_lost_steps=self.monitor.num_lost_steps,
            virtual_s=cluster.now_s,
        )

    def _run_to_end(self) -> None:
        cluster, monitor = self.cluster, self.monitor
        # A controller that dies before the run's last action repeats it in its next incarnation.
        while monitor.outcome is None:
            deadline_s = self.deadline_s if cluster.controller_up else inf
            cluster.run_until(deadline_s)
            if cluster.inbox:
                self._take_in()
            elif cluster.controller_up and deadline_s < inf:
                cluster.now_s = max(deadline_s, cluster.now_s)
                self._fold(ev.Ticked(at_s=cluster.now_s))
            elif not cluster.queue:
                raise Violation(f"L2: {self.state.phase} waits for nothing")
        self._check_end()

    def _resume_run(self) -> None:
        """Fix the user's bug, resume the run that stopped or failed, and let it complete."""
        cluster = self.cluster
        if self.is_lost:
            # A person puts sound copies back.
            for commit in cluster.storage.commits.values():
                commit.damaged = False
            cluster.damaged.clear()
            self.monitor.repaired(cluster.now_s)
            self.is_lost = False
        if self.is_refused:
            cluster.model = SimModel()
            self.is_refused = False
        self.monitor.outcome = None
        self.expected = "completed"
        cluster.raises_at.clear()
        cluster.storage.claim_again()
        self._begin_claim()

    def _begin_claim(self) -> None:
        """Resume the run under the next claim, by its journal."""
        cluster = self.cluster
        # The end of a run takes all that was in memory along, as no single fault does.
        self.num_faults += 1
        self._count_fault()
        self._restart()
        before, self.state = self.state, RunState()
        if self.journal is not None:
            self.journal.resume()
        drawing.end_everything(cluster)
        # It may know of no step, and a run that never trained gives up.
        self._drop(drawing.reset_connections)
        self.resets_until_s = 0.0
        cluster.num_incarnations += 1
        commits = cluster.storage.commits
        resumed = resume_event(
            before,
            at_s=cluster.now_s,
            incarnation=cluster.num_incarnations,
            last_attempt=max((attempt for _, attempt in commits), default=0),
        )
        self.monitor.resumed(resumed.lineage, commits)
        cluster.inbox.append(resumed)

    def _take_in(self) -> None:
        """Let the machine hear what arrived; members that tell the same are heard together."""
        cluster = self.cluster
        cluster.gather(self.busy_s, self._is_alike)
        events, cluster.inbox = deque(cluster.inbox), []
        while events and cluster.controller_up:
            self._fold(take_alike(events))

    def _is_alike(self, event: ev.Event) -> bool:
        """Return whether an event may wait for others like it: nothing is ordered for it alone."""
        if isinstance(event, ev.WorkerLeft):
            is_yielded = event.how is ev.Leaving.YIELDED and self.state.phase is Phase.YIELDING
            return is_yielded or self.state.phase is Phase.FENCING
        return isinstance(event, ev.WorkerFormed)

    def _fold(self, event: ev.Event) -> None:
        if isinstance(event, _TELLING):
            self.monitor.told(event)
        elif isinstance(event, ev.ControllerStarted) and event.incarnation > 1:
            self._restart()
        before = self.state
        state, actions = machine.step(before, event, rules=self.rules)
        self.num_events += 1
        if self.num_events >= EVENTS_MAX:
            raise Violation("L2: the machine goes round in circles")
        if self.observe is not None:
            self.observe(event, state, actions)
        if state is before:
            return
        self.state, self.deadline_s = state, next_deadline_s(state)
        if self.check_always or state.attempt.number != before.attempt.number:
            self._check(state)
        if self.journal is not None:
            self.journal.add(event, state, actions)
        if actions:
            self._perform(actions)
        if state.phase is not before.phase:
            self._phase_changed(state)

    def _check(self, state: RunState) -> None:
        check(state, self.passed)
        self.passed = state
        for node in state.fleet.nodes.values():
            if node.strikes:
                self.monitor.struck(node.name)

    def _perform(self, actions: Sequence[act.Action]) -> None:
        """Perform the machine's actions; the controller may die in between."""
        cluster = self.cluster
        dies = self._may_inject() and cluster.chance(_DEATH)
        done = self.rng.randint(0, len(actions)) if dies else len(actions)
        for action in actions[:done]:
            self._observe_action(action)
            cluster.perform(action)
        if dies:
            self._count_fault()
            # The end of the run, which releases all, covers everything else that was to be done.
            self.died_at_the_end = self.state.phase in TERMINAL
            lost = (action for action in actions[done:] if isinstance(action, act.KillWorker))
            self.monitor.kill_lost.update(action.worker for action in lost)
            drawing.kill_controller(cluster)

    def _restart(self) -> None:
        """Begin an incarnation with the state that the journal and its compaction say."""
        if self.journal is None:
            return
        restored = self.journal.restored()
        require(restored == self.state, "L1", "the journal does not lead to the state")
        self.state = restored

    def _observe_action(self, action: act.Action) -> None:
        if isinstance(action, act.KillWorker):
            self.monitor.killing(self.cluster, action)
        elif isinstance(action, act.FenceAttempt):
            self.monitor.fence_began_s = self.cluster.now_s
        elif isinstance(action, act.RequestReservation):
            self.monitor.requesting(self.cluster, action)

    def _phase_changed(self, state: RunState) -> None:
        if state.phase is Phase.FENCING:
            self.monitor.fence_began_s = self.cluster.now_s
        if state.phase in _PHASES_FOR_SECOND_FAULT and self.cluster.chance(self.second_fault):
            self.cluster.at(0.2 * self.rng.random(), self._inject)

    def _lose_head(self, rng: Random) -> None:
        if self._may_inject() and self.state.phase not in TERMINAL:
            self._count_fault()
            drawing.lose_head(self.cluster, rng)

    def _reset_connections(self, rng: Random) -> None:
        if not self.state.step_s:
            # A run that never trained may give up.
            self.cluster.at(1.0, self._reset_connections, rng)
        elif self._may_inject() and self.state.phase not in TERMINAL:
            self._count_fault()
            self.resets_until_s = self.cluster.now_s + _RESETS_S * rng.random()
            drawing.reset_connections(self.cluster, rng.choice((0.1, 1.0)), self.resets_until_s)

    def _share(self, rng: Random) -> None:
        if not self.healing:
            self.neighbour = Neighbour(self.cluster, rng)
            self.cluster.at(0.5 + 5 * rng.random(), self.neighbour.end)

    def _may_inject(self) -> bool:
        return not self.healing and self.num_faults < self.fault_limit

    def _inject(self) -> None:
        if self._may_inject() and self.state.phase not in TERMINAL:
            self._count_fault()
            self.rng.choice(self.kinds)(self.cluster)

    def _cut_off_storage(self) -> None:
        if self._may_inject() and self.state.phase not in TERMINAL:
            self._count_fault()
            drawing.cut_off_storage(self.cluster)

    def _slow_down(self, rng: Random) -> None:
        if self._may_inject() and self.state.phase not in TERMINAL:
            self._count_fault()
            slowing.slow_down(self.cluster, rng)

    def _corrupt(self, rng: Random) -> None:
        if self._may_inject() and self.state.phase not in TERMINAL:
            self._count_fault()
            drawing.corrupt(self.cluster, rng)

    def _count_fault(self) -> None:
        self.num_faults += 1
        self.monitor.num_faults = self.num_faults

    def _drop(self, kind: Callable[..., None]) -> None:
        """End what goes on by itself."""
        queue = self.cluster.queue
        queue[:] = [entry for entry in queue if entry[2] is not kind]
        heapify(queue)

    def _heal(self) -> None:
        """Enter the liveness phase: no new faults, and a core that is large enough stays up."""
        cluster = self.cluster
        self.healing = True
        if self.neighbour is not None:
            self.neighbour.end()
        cluster.loss = cluster.doubling = cluster.start_failure = 0.0
        if self.expected != "failed":
            cluster.raises_at.clear()
        nodes = list(cluster.nodes.values())
        for node in nodes:
            drawing.heal_node(cluster, node)
        # Flaps that were drawn before end now.
        self._drop(drawing.flap_pair)
        cluster.lost_ways.clear()
        stay = [node for node in nodes if node.alive and node.draining_until_s is None]
        room = sum(node.room for node in stay)
        multiple = self.rules.layout.multiple_min
        needed = -(-self.rules.min_workers // multiple) * multiple
        needed = max(needed, cluster.model.shards_min * _copies(self.rules))
        if self.expected == "failed" and self.state.fits:
            # An error in the first step of a layout may be the layout's. So one that has trained
            # must be able to raise it again.
            needed = max(needed, self.rules.max_workers)
        if room < needed:
            drawing.return_node(cluster, needed - room)
        elif self.network_ails:
            self._leave_links_lost(stay, needed)
        resets_s = max(self.resets_until_s - cluster.now_s, 0.0)
        cluster.at(resets_s + LIVENESS_S, self._must_be_over)

    def _leave_links_lost(self, nodes: Sequence[SimNode], needed: int) -> None:
        """Cut links for good, and let one flap, as long as enough workers reach each other."""
        cluster, rng = self.cluster, self.rng
        pairs = list(combinations([node.name for node in nodes], 2))
        rng.shuffle(pairs)
        room = {node.name: node.room for node in nodes}
        cut: list[tuple[str, str]] = []
        for pair in pairs[: rng.randint(1, 4)]:
            if _largest_room(room, [*cut, pair]) >= needed:
                cut.append(pair)
        for number, pair in enumerate(cut):
            if number == 0 and cluster.chance(0.5):
                drawing.flap_pair(cluster, pair, 0.3 + 4 * rng.random(), 1000)
            else:
                drawing.lose_ways(cluster, [pair, pair[::-1]])

    def _must_be_over(self, *, is_last: bool = False) -> None:
        attempt = self.state.attempt
        if self._is_refused_by_bug() and not is_last:
            # The run waits for other nodes, until it ends.
            last = partial(self._must_be_over, is_last=True)
            self.cluster.at(self.rules.bounds.capacity_s, last)
            return
        raise Violation(
            f"L1: {LIVENESS_S:g} s after the last fault the run is {self.state.phase} in attempt "
            f"{attempt.number} at step {attempt.step} of {self.rules.total_steps}"
        )

    def _is_refused_by_bug(self) -> bool:
        """Return whether the script's error may be taken for that of all layouts that fit."""
        return self.expected == "failed" and bool(self.state.refused)

    def _check_end(self) -> None:
        check(self.state)
        if self.journal is not None and self.is_replayed:
            replayed = self.journal.replayed()
            require(replayed == self.state, "L1", "a replay does not lead to the state")
        outcome, cluster = self.monitor.outcome, self.cluster
        assert outcome is not None
        for one in self.state.refused:
            fits = one.axis or cluster.model.refuses(one.layout)
            require(bool(fits), "L1", f"{one.layout} was refused for ever for want of memory once")
        kept = {reservation for reservation, node in cluster.granted.items() if node} | set(
            cluster.pending
        )
        on_the_way = {args[0] for _, _, do, args in cluster.queue if do == cluster.released}
        leaked = kept - set(self.state.fleet.reservations) - on_the_way
        require(
            self.died_at_the_end or not leaked,
            "L1",
            f"reservations {sorted(leaked)} are reserved for nothing",
        )
        if outcome.outcome == "failed" and _WITHOUT_STATE in outcome.reason:
            self.is_lost = self.monitor.failed_without_state(cluster)
            if not self.is_lost:
                # Everything behind it is also damaged.
                self.expected = "completed"
            return
        why = f"the run {outcome.outcome}: {outcome.reason}"
        layout = self.state.attempt.layout
        if outcome.outcome == "failed" and layout and cluster.model.refuses(layout):
            require(not self.state.fits, "L1", f"it has trained, and {why}")
            self.is_refused = True
            return
        if outcome.outcome == "no_capacity" and self._is_refused_by_bug():
            require("ValueError" in outcome.reason, "L1", why)
            return
        require(outcome.outcome in ("completed", self.expected), "L1", why)
        if outcome.outcome == "failed":
            require(outcome.reason.startswith("Traceback: ValueError"), "L1", why)
        if outcome.outcome != "completed":
            require(self.expected != "failed" or outcome.outcome == "failed", "L1", why)
            return
        require(self.expected != "failed", "L1", "a bug of the user's code was not seen")
        total = min(self.rules.total_steps, cluster.ends_at)
        says = "the script stopped" in outcome.reason
        require(not says or total < self.rules.total_steps, "L1", f"the run did not stop: {why}")
        done = any(
            step >= total and self.monitor.counts(step, attempt)
            for step, attempt in self.cluster.storage.commits
        )
        require(done, "S2", f"completed without a commit of step {total}")


def _copies(rules: RunRules) -> int:
    """Return the copies of the model that every layout has."""
    return rules.layout.dp_replicate if "dp_replicate" in rules.layout.fixed else 1


def _largest_room(room: dict[str, int], cut: Sequence[tuple[str, str]]) -> int:
    """Return the room of the largest set of nodes that reach each other, by trying all."""
    best = 0
    ends = sorted({node for pair in cut for node in pair})
    free = sum(room.values()) - sum(room[node] for node in ends)
    for chosen in range(1 << len(ends)):
        kept = {node for index, node in enumerate(ends) if chosen >> index & 1}
        if not any(kept.issuperset(pair) for pair in cut):
            best = max(best, free + sum(room[node] for node in kept))
    return best


def _draw_tiers(rng: Random, apart: Random) -> Tiers:
    """Decide how the run saves: in a third of the histories to storage only."""
    if rng.random() < 1 / 3:
        return Tiers(snapshot_every=0, store_every=rng.choice((1, 1, 2, 3)), tolerance=0)
    tiers = Tiers(
        snapshot_every=rng.choice((1, 1, 2)),
        store_every=rng.choice((2, 3, 5, 10)),
        tolerance=rng.choice((1, 1, 1, 2, 0)),
        mechanism=rng.choice(("copy", "parity")),
        copy_s=rng.choice((COPY_S, COPY_S, 2.5 * STEP_S)),
    )
    if apart.random() < 1 / 3:
        tiers = replace(tiers, mechanism="auto")
    costs = SaveCosts(
        step_s=STEP_S,
        snapshot_stall_s=0.001,
        snapshot_busy_s=COPY_S,
        checkpoint_stall_s=apart.choice((0.0, 0.01, 0.1)),
        checkpoint_busy_s=apart.choice((0.2, 2.0)),
        pace=Pace(),
    )
    return replace(
        tiers,
        budget_bytes=apart.choice((0, 0, 8, 12, 24)),
        costs=costs if apart.random() < _CHOSEN else None,
    )


def _draw_rules(
    rng: Random, tiers: Tiers, market: Random, axes: Random, seed: int
) -> tuple[RunRules, list[int]]:
    slow = Random(f"slow {seed}")
    rooms = [rng.randint(1, 3) for _ in range(rng.randint(1, 5))]
    dp_replicate = rng.choice((1, 1, 1, 2))
    total_room = max(sum(rooms), dp_replicate)
    if sum(rooms) < dp_replicate:
        rooms[0] += dp_replicate - sum(rooms)
    max_workers = rng.randint(dp_replicate, total_room + 1)
    # Nothing pins tp: where Ray puts workers one by one, pairs on one node cannot be promised.
    layout = LayoutRules(
        dp_replicate=dp_replicate,
        tp=axes.choice((1, 1, 2, 3)),
        pp=axes.choice((1, 1, 2, 4)),
        fixed=axes.choice(((), (), ("dp_replicate",))),
        num_micro_batches=axes.choice((0, 4, 8)),
        ep=axes.choice((1, 1, 2, 4)),
        cp=axes.choice((1, 1, 1, 2)),
    )
    most = min(max_workers, total_room)
    most -= most % layout.multiple_min
    rules = RunRules(
        run="simulated",
        min_workers=rng.randint(1, most),
        max_workers=max_workers,
        standby_per_node=rng.randint(0, 1),
        total_steps=rng.randint(3, 12) * (_SLOW_STEPS if slow.random() < _SLOW else 1),
        checkpoint_every=tiers.commit_every,
        starts_failed_max=1000,
        layout=layout,
        growth=_GROWTH,
        slow=_SLOW_RULES,
        budgets=_BUDGETS,
        cadence=CadenceRules(chooses_checkpoints=tiers.costs is not None),
        snapshot=SnapshotSettings(tolerance=tiers.tolerance, mechanism=tiers.mechanism),
        avoid=AvoidRules(strikes_max=rng.choice((2, 3)), window_s=20.0, avoid_s=5.0),
        sharing=_SHARING,
        capacity=replace(_CAPACITY, usd_per_hour=market.choice(_PRICES)),
        bounds=_BOUNDS,
    )
    return rules, rooms


def run_history(seed: int, **drawn: Any) -> HistoryResult:
    """Run one history, as ``History`` takes it; raise ``Violation`` if a promise was broken."""
    history = History(seed, **drawn)
    try:
        return history.run()
    finally:
        history.cluster.dissolve()
