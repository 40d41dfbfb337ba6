"""Checks that broken promises never happen, against the truth of the virtual world.

The monitor keeps its own books: which attempts began where, which steps and commits are real. It
never asks the machine what it thinks.
"""

from collections.abc import Collection, Sequence
from math import inf

from orchestrator.core import actions as act
from orchestrator.core import events as ev
from orchestrator.policies import Share, bad_sources, complete, versions
from tests.simulation.violation import Violation, require
from tests.simulation.world import CORRUPT, STEP_S, SimNode, SimWorker, World, answers
from ucp_core.lineage import Lineage
from workers.protocol import Source, stored_source

#: A version that this many attempts could not read must not be tried again.
_UNREAD_MAX = 2
#: The run waits for a worker that is slow for less.
SLOW_STEADY_S = 0.5
#: A window of steps has passed by then in which a worker is well again, and a replacement came.
SLOW_SEEN_S = 8.0
#: Longest time from an event to the controller's decision on it.
_FOLDED_LATE_S = 0.05


class Monitor:
    """Checks every action and everything that happens in the world."""

    def __init__(self) -> None:
        self.starts: list[tuple[int, int]] = []
        # The newest that was started.
        self.attempt = 0
        # The version that the newest of them resumed from, and the claim under which it began.
        self.named, self.named_by = (0, 0), 1
        self.last_step = 0
        self.fence_began_s = 0.0
        # Members that leave late because they compute, as the machine was told.
        self.at_work: tuple[int, tuple[str, ...]] = (0, ())
        #: When a process that was not ready was last seen to compute.
        self.advanced_s: dict[str, float] = {}
        self.timed = 0
        self.yielded: tuple[int, int] | None = None
        # When each was killed first, and whose kill was decided on and then lost.
        self.kill_ordered: dict[str, float] = {}
        self.kill_lost: set[str] = set()
        self.started_names: set[str] = set()
        self.outcome: act.FinishRun | None = None
        self.num_lost_steps = 0
        self.num_faults = 0
        self.troubled: set[str] = set()
        self.faulty, self.blamed = set[str](), set[tuple[str, tuple[str, ...], float]]()
        # The slow ones, in truth: since when, until when, and how many times as long it takes.
        self.slowed: dict[str, tuple[float, float, float]] = {}
        self.unlinked: set[str] = set()
        self.lost_nodes: set[str] = set()
        # When providers take nodes, by what the machine was told.
        self.taken_by_s: dict[str, float] = {}
        self.last_left_s = 0.0
        # Whether a member could not leave its state in memory, or that could not be asked once; and
        # whether nothing kept what was on a node.
        self.is_state_gone = False
        self.is_unkept = False
        self.found_damaged: set[tuple[int, int]] = set()
        # Checkpoints deleted by requests sent while their claim counted.
        self.deleted_rightly: set[tuple[int, int]] = set()
        self.cut_off: dict[int, bool] = {}
        # Facts sent to the machine: damaged sources, and the ranks that could not read them.
        self.told_damaged: set[Source] = set()
        # When reads were answered, by number, and the newest that was heard.
        self.reads: dict[int, float] = {}
        self.heard_s = 0.0
        self.told_unread: dict[Source, set[int]] = {}
        # The same, with what it was perhaps told of.
        self.heard_damaged: set[Source] = set()
        # Whether a run that may have some of the workers ever lacked any.
        self.is_shared = False
        self.heard_unread: dict[Source, set[int]] = {}
        # By attempt, the workers that erred when it was checked, and those that this showed.
        self.erred: dict[int, tuple[list[str], list[str]]] = {}
        self.erring_nodes: set[str] = set()
        # The same as the machine knows them, and to which step it has to go back, or may.
        self.told_wrong: set[str] = set()
        self.convicted: set[str] = set()
        self.back: list[tuple[int, int]] = []
        self.perhaps_back: list[tuple[int, int]] = []

    def resumed(self, lineage: Lineage, commits: Collection[tuple[int, int]]) -> None:
        """Check that a resume forgets only attempts that have committed nothing."""
        left_out = {number for number, _ in self.starts} - {number for number, _ in lineage}
        lost = sorted(left_out & {attempt for _, attempt in commits})
        require(not lost, "S3", f"a resume forgets attempts {lost}, which have committed")
        self.starts = [one for one in self.starts if one[0] not in left_out]

    def started(self, name: str) -> None:
        """Check the start of a worker process."""
        require(name not in self.started_names, "S1", f"{name} was started twice")
        self.started_names.add(name)

    def attempt_started(self, world: World, action: act.StartAttempt) -> None:
        """Check the start of an attempt."""
        number, rules = action.attempt, world.rules
        require(number > self.attempt, "S1", f"attempt {number} follows {self.attempt}")
        names = [name for name, _, _ in action.members]
        kept = self.convicted & {*names}
        require(not kept, "S5", f"{kept} erred, and train on")
        reservations = [reservation for _, _, reservation in action.members]
        if len({*names}) < len(names) or len({*reservations}) < len(reservations):
            raise Violation(f"S1: a worker or a reservation twice in {action.members}")
        size = action.layout.world_size
        require(size == len(names), "S3", f"{size} ranks, {len(names)} members")
        require(
            rules.min_workers <= size <= rules.max_workers, "L1", f"{size} members out of bounds"
        )
        for worker in world.workers.values():
            gone = worker.name in self.kill_ordered or worker.node.cut_off
            still_in = 0 < worker.attempt < number and not gone
            if still_in:
                raise Violation(f"S1: {worker.name} is in {worker.attempt} as {number} begins")
        lead_s = rules.bounds.drain_lead_s
        for _, node, _ in action.members:
            late_s = world.now_s - self.taken_by_s.get(node, inf)
            is_taken = _FOLDED_LATE_S - lead_s <= late_s < lead_s - 1e-9
            require(not is_taken, "L3", f"{node} is taken as {number} begins")
        if self.attempt:
            old = world.attempts[self.attempt].members
            given_up = self.kill_ordered.keys() | self.kill_lost
            self.cut_off[self.attempt] = given_up.issuperset(old)
        # A controller may have died between the decision and the start of an attempt.
        unperformed = [entry for entry in action.lineage[:-1] if entry[0] > self.attempt]
        self.starts += unperformed
        self._check_resume(world, action)
        self.starts.append((number, action.resume_step))
        self.attempt = number
        self.named = (action.resume_step, action.resume_attempt)
        self.named_by = world.storage.claim
        if list(action.lineage) != self.starts:
            raise Violation(f"S3: lineage {action.lineage}")
        self.last_step = action.resume_step

    def deleted(self, version: tuple[int, int], *, claim: int, owner: int) -> None:
        """Check that the retention under a claim leaves what a newer one resumed from.

        ``owner`` is the claim that counted when the request was sent.
        """
        is_named = version == self.named and claim < self.named_by
        require(not is_named, "S2", f"{version} is deleted, from which a newer claimant resumed")
        if claim == owner:
            self.deleted_rightly.add(version)

    def failed_without_state(self, world: World) -> bool:
        """Check a failure for want of a version to load; return whether repairs bring one back.

        Something was committed, and all of it that counts is damaged.
        """
        left_out = self._steps_left_out()
        known = [v for v in world.storage.commits if self.counts(*v, *self.perhaps_back)]
        sound = [
            v
            for v in known
            if not world.storage.commits[v].damaged
            and stored_source(*v) not in world.damaged
            and v[0] not in left_out
            # The last request of a superseded claimant may land when all was read.
            and world.storage.commits[v].landed_s <= self.heard_s
        ]
        require(bool(world.storage.commits), "L1", "nothing was committed, and the run failed")
        require(not sound, "S2", f"{sound} can be loaded, and the run failed")
        return bool(known)

    def repaired(self, now_s: float) -> None:
        """Note that sound copies of everything were put back, and are to be found."""
        self.heard_s = now_s
        for books in (self.found_damaged, self.told_damaged, self.heard_damaged):
            books.clear()
        self.told_unread.clear()
        self.heard_unread.clear()

    def reading(self, action: act.ReadCommitted, now_s: float) -> None:
        """Note when a read was answered, and check that no memory is left out without need."""
        self.reads[action.number] = now_s
        self._check_unreached(action.unreached)

    def told(  # noqa: C901  a branch for each kind
        self,
        event: ev.WorkerLeft
        | ev.WorkerFormed
        | ev.WorkerRaised
        | ev.CommittedRead
        | ev.StepCompleted
        | ev.MembersAtWork
        | ev.StartsAdvanced
        | ev.NodeDraining
        | ev.NodeJoined,
    ) -> None:
        """Note what the machine hears of sources, versions, notices, and of who is at work."""
        if isinstance(event, ev.NodeDraining | ev.NodeJoined):
            until_s = event.deadline_s if isinstance(event, ev.NodeDraining) else inf
            self.taken_by_s[event.node] = until_s
            return
        if isinstance(event, ev.StartsAdvanced):
            self.advanced_s.update(dict.fromkeys(event.workers, event.at_s))
            return
        if isinstance(event, ev.MembersAtWork):
            self.at_work = (event.attempt, event.workers)
            return
        if isinstance(event, ev.StepCompleted):
            # From now on it knows how long a step takes.
            self.timed = event.attempt
            return
        if isinstance(event, ev.WorkerRaised):
            self._told_wrong(event)
            return
        if isinstance(event, ev.CommittedRead):
            # Answers may overtake one another.
            self.heard_s = max(self.heard_s, self.reads[event.number])
            return
        if event.attempt != self.attempt:
            return
        unread = event.unread if isinstance(event, ev.WorkerLeft) else ()
        if not event.damaged and not unread:
            return
        # A restarted controller may have forgotten workers that it killed, and ignores their
        # late messages.
        is_sure = event.worker not in self.kill_ordered
        for damaged, by in (
            (self.heard_damaged, self.heard_unread),
            *([(self.told_damaged, self.told_unread)] if is_sure else []),
        ):
            damaged.update(event.damaged)
            for source in unread:
                by.setdefault(source, set()).add(event.attempt)

    def corrupted(self, attempt: int, erring: Sequence[SimWorker], *, is_known: bool) -> None:
        """Note that a check has found that some workers err, and whether it knows which."""
        names = [worker.name for worker in erring]
        self.erred[attempt] = (names, names if is_known else [])
        if is_known:
            self.erring_nodes.update(worker.node.name for worker in erring)

    def _told_wrong(self, event: ev.WorkerRaised) -> None:
        """Note to which step the run is to go back; the word of who is gone counts no more."""
        if event.attempt == self.attempt and event.sound_step >= 0:
            entry = (event.attempt + 1, event.sound_step)
            self.perhaps_back = [entry]
            if event.worker not in self.kill_ordered.keys() | self.faulty:
                self.back = [entry]
                erred, shown = self.erred[event.attempt]
                self.told_wrong.update(erred)
                self.convicted.update(shown)

    def given(self, attempt: int, sources: list[Source]) -> None:
        """Check what an attempt is to load from."""
        for source in sources:
            if source in self.told_damaged:
                raise Violation(f"S6: {attempt} loads {source} again")
            if len(self.told_unread.get(source, ())) >= _UNREAD_MAX:
                raise Violation(f"S6: {attempt} tries {source} for ever")

    def _left_out(self) -> list[Source]:
        """Return what may be left out."""
        unread = (source for source, by in self.heard_unread.items() if len(by) >= _UNREAD_MAX)
        return [*self.heard_damaged, *unread]

    def _steps_left_out(self) -> frozenset[int]:
        """Return what may be left out of storage: a step has one manifest, of its newest commit."""
        return bad_sources.in_storage(self._left_out(), self.starts)

    def _check_unreached(self, names: tuple[str, ...]) -> None:
        for name in names:
            # A node that does not reach a lost one has a lost link, until that is known to be lost.
            known = name in self.unlinked or bool(self.lost_nodes)
            require(known, "S5", f"memory of {name} is left out")

    def _check_resume(self, world: World, action: act.StartAttempt) -> None:
        self._check_unreached(action.unreached)
        at = (action.resume_step, action.resume_attempt)
        commits, landed_s = world.storage.commits, world.memory.landed_s
        # The last request of a superseded claimant may land when all was read.
        exists = at == (0, 0) or at in commits or at in landed_s or at in self.deleted_rightly
        require(exists, "S2", f"attempt {action.attempt} from {at}: no such")
        is_valid = at == (0, 0) or self.counts(*at, *self.back)
        require(is_valid, "S3", f"resumes from {at}, which does not count")
        held = self._held(world, action.unreached)
        damaged = (
            at in commits
            and commits[at].damaged
            and not world.memory.holds(at, world.nodes.values(), world.now_s)
        )
        require(not damaged or at not in self.found_damaged, "S6", f"loads {at} again")
        if damaged:
            self.found_damaged.add(at)
        left_out = self._steps_left_out()
        intact = {
            v: commit.landed_s
            for v, commit in commits.items()
            if not commit.damaged and v[0] not in left_out
        }
        # Until the last member that could be reached was out, commits may have landed.
        in_time = [v for v in intact if intact[v] <= self.last_left_s]
        in_time += [v for v in held if landed_s[v] <= self.last_left_s]
        in_time = [v for v in in_time if self.counts(*v, *self.perhaps_back)]
        newest = max(in_time, default=(0, 0))
        # All versions of a step that count have the same state.
        require(at[0] >= newest[0], "S3", f"resumes from {at}, though {newest} was committed")
        if self.yielded is not None and self.yielded[0] == self.attempt:
            version = (self.yielded[1], self.attempt)
            heard = not self.cut_off[self.attempt]
            lost = (version in intact or version in held) and heard and at != version
            require(not lost, "L3", f"yielded at {self.yielded}, resumes {at}")
        wrong = self.told_wrong & world.checked.get(at, (0, frozenset[str]()))[1]
        require(not wrong, "S6", f"{at} is loaded, in which {wrong} erred")
        self.back, self.perhaps_back = [], []
        self._check_lost(world, max(self.last_step - action.resume_step, 0))

    def _held(self, world: World, unreached: tuple[str, ...]) -> list[tuple[int, int]]:
        """Return what could be loaded from memory now and could be read when that was asked."""
        memory = world.memory
        if memory.grew_s >= self.heard_s:
            return []
        inventories = [
            one
            for one in memory.inventories(world.nodes.values(), world.now_s)
            if one.node not in unreached
        ]
        left_out = [*self._left_out(), *memory.copied_since(self.heard_s)]
        held = complete(bad_sources.good(inventories, left_out), self.starts)
        return [(v.step, v.attempt) for v in held if v.step < world.rules.total_steps]

    def _check_lost(self, world: World, num_lost: int) -> None:
        """Check that a single fault costs at most one step while snapshots are protected."""
        self.num_lost_steps += num_lost
        # A bug of the training code is a fault too, and is not among those that were injected.
        is_single = self.num_faults == 1 and not world.damaged and not world.raises_at
        is_single = is_single and not self.erred
        if num_lost > 1 and is_single and world.tiers.loses_one_step:
            # Nothing protects an attempt on one node from the loss of that node.
            attempt = world.attempts[self.attempt]
            # How to protect snapshots may be open until the first one shows their size.
            is_open = world.tiers.mechanism == "auto" and (
                attempt.first_kept_step is None or self.last_step <= attempt.first_kept_step + 1
            )
            # A version taken on one node is on that node alone until the next one is protected.
            source = world.attempts.get(self.named[1])
            was_alone = source is not None and len(source.copiers) == 1
            is_alone = was_alone and (
                attempt.first_kept_step is None or self.last_step <= attempt.first_kept_step
            )
            # Nothing on a node is protected while its keeper is away and was waited for in vain.
            waited_s = world.now_s - self.last_left_s
            is_unkept = self.is_unkept or (
                waited_s >= world.rules.bounds.read_s
                and any(world.now_s < node.keeper_back_s for node in world.nodes.values())
            )
            is_exempt = len(attempt.copiers) == 1 or is_alone or is_open or is_unkept
            # A version behind a lost link cannot be loaded or copied there.
            is_exempt = is_exempt or bool(self.unlinked)
            require(is_exempt, "L3", f"one fault, {num_lost} steps lost")
        # The last step is in storage or nowhere: who is fenced while it is written repeats it.
        is_kept = world.tiers.snapshot_every and self.last_step < world.rules.total_steps
        if is_single and is_kept and not self.is_state_gone:
            require(num_lost == 0, "L3", f"all members live, {num_lost} steps lost")

    def counts(self, step: int, attempt: int, *also: tuple[int, int]) -> bool:
        """Return whether a commit is in the history: no later attempt began before its step."""
        starts = (*self.starts, *also)
        return all(resume >= step for number, resume in starts if number > attempt)

    def stepped(self, attempt: int, step: int) -> None:
        """Check a completed step."""
        if attempt != self.attempt and self.cut_off.get(attempt):
            # All of it was declared lost, and nothing reaches it. It trains on in vain.
            return
        if attempt != self.attempt:
            raise Violation(f"S1: attempt {attempt} steps during {self.attempt}")
        if step != self.last_step + 1:
            raise Violation(f"S3: step {step} follows {self.last_step}")
        self.last_step = step

    def all_yielded(self, attempt: int, step: int) -> None:
        """Note that every member left together."""
        self.yielded = (attempt, step)

    def killing(self, world: World, action: act.KillWorker) -> None:
        """Check that no worker is killed without proof."""
        killed_before = action.worker in self.kill_ordered.keys() | self.kill_lost
        self.kill_ordered.setdefault(action.worker, world.now_s)
        worker = world.workers.get(action.worker)
        if action.reason.startswith("not ready after"):
            still_s = world.now_s - self.advanced_s.get(action.worker, -inf)
            is_stuck = still_s >= world.rules.bounds.start_s - 1e-9
            require(is_stuck, "S5", f"{action.worker} was about to get ready")
        if worker is None or worker.hung or not worker.ready or killed_before:
            return
        reachable = worker.node.alive and not worker.node.cut_off
        # A mistake of detection is a fault like others: what follows from it keeps the promises.
        others = ("node lost", "not ready after", "hang: a mistake")
        if not reachable or action.reason.startswith(others):
            return
        # A controller died before it performed what the journal says, as that a node is given up.
        if worker.node.name in self.erring_nodes and CORRUPT in action.reason:
            return
        needless = ("no reservation", "killed before", "not known")
        if worker.attempt == 0 and action.reason.startswith(needless):
            return
        bound_s = world.rules.bounds.fence_s
        number, at_work = self.at_work
        if number == self.attempt == self.timed and action.worker in at_work:
            bound_s += 0.0 if action.reason.startswith("killed before") else STEP_S
        overdue = world.now_s - self.fence_began_s >= bound_s - 1e-9
        # Its report may be late, though it is ready or has left: only the bound decides.
        fenced = action.reason.startswith(("did not leave", "killed before")) and overdue
        require(fenced, "S5", f"healthy {action.worker}: {action.reason}")
        # A word that is late by more than the bound is a fault too, and beside a keeper that is
        # away it is the second: the process was the last that held its snapshots.
        self.is_unkept |= world.now_s < worker.node.keeper_back_s

    def restarting(self, node: SimNode, now_s: float) -> None:
        """Check that only a keeper is restarted that says nothing."""
        is_silent = node.keeper_back_s > now_s or not node.alive or node.cut_off
        require(is_silent, "S5", f"the keeper of {node.name} answers and is restarted")

    def ending_keeper(self, world: World, node: SimNode) -> None:
        """Check that a keeper is only ended where the run has nothing that it may need."""
        is_used = any(worker.attempt == self.attempt for worker in node.workers.values())
        require(
            node.cut_off or not is_used,
            "L3",
            f"the keeper of {node.name} ends, and members are there",
        )
        attempt = world.attempts[self.attempt]
        if not all(answers(world.nodes[name], world.now_s) for name in attempt.nodes):
            return  # the machine may not know of that yet
        stored = world.storage.newest(attempt.lineage)
        step, left = (
            found.step if found is not None else 0
            for found in (
                versions.newest(
                    world.memory.inventories(nodes, world.now_s),
                    stored,
                    attempt.lineage,
                    total_steps=world.rules.total_steps,
                )
                for nodes in (
                    world.nodes.values(),
                    [each for each in world.nodes.values() if each is not node],
                )
            )
        )
        require(left == step, "L3", f"the keeper of {node.name} ends, without which {step} is gone")

    def giving_up(self, node: SimNode, now_s: float) -> None:
        """Check that a node is only given up when its keeper does not come back."""
        is_away = node.keeper_back_s > now_s or not node.alive or node.cut_off
        require(is_away, "S5", f"healthy node {node.name} is given up")
        self.faulty.update(node.workers)
        self.is_unkept = True

    def requesting(self, world: World, action: act.RequestReservation) -> None:
        """Check that no healthy node is avoided."""
        for name in action.avoid:
            node = world.nodes[name]
            # That it is lost may be known only from the others, which do not reach it.
            failed = self.troubled | self.unlinked | self.lost_nodes
            known = name in failed or node.draining_until_s is not None
            require(known or node.cut_off, "S5", f"healthy node {name} is avoided")

    def struck(self, name: str) -> None:
        """Check that a node has strikes only for what its own workers did."""
        require(name in self.troubled, "S5", f"node {name} is struck, and nothing failed on it")

    def cadence(self, world: World, action: act.SetCadence) -> None:
        """Check that saves keep their budget, and the user's own intervals."""
        costs, rules, every = world.tiers.costs, world.rules.cadence, action.pace
        assert costs is not None
        require(action.attempt == self.attempt, "S1", f"{action} in attempt {self.attempt}")
        require(every.snapshot_steps == 0, "S5", f"{action} changes what the user asked for")
        checkpoint_s = every.checkpoint_steps * costs.step_s
        share = costs.snapshot_stall_s / costs.step_s + costs.checkpoint_stall_s / checkpoint_s
        is_cheap = share <= rules.cost_share_max or checkpoint_s >= rules.persist_s_max
        require(is_cheap, "cost", f"{action} stalls {share:.1%} of step time")

    def left(self, world: World, attempt: int, worker: str = "") -> None:
        """Note that a member is out of the newest attempt, in truth."""
        # One on which a kill has no effect for so long is not waited for.
        until_s = self.kill_ordered.get(worker, inf) + world.rules.bounds.kill_s
        if attempt == self.attempt and world.now_s <= until_s:
            self.last_left_s = world.now_s

    def neighbour_says(self, world: World, share: Share) -> None:
        """Note whether another run on the cluster may have workers of this one."""
        is_rival = share.priority >= world.rules.sharing.priority
        self.is_shared |= bool(share.num_lacking) and is_rival

    def incident(self, world: World, action: act.ReportIncident) -> None:
        """Check that only who did fail is called guilty, and once."""
        told = (action.incident, action.guilty, action.found_s)
        is_new = told not in self.blamed or not action.guilty
        require(is_new, "S5", f"{action.guilty} is blamed again: {action.evidence}")
        self.blamed.add(told)
        if action.incident == "slow":
            self._check_slow(world, action)
            return
        for name in action.guilty:
            require(name in self.faulty, "S5", f"{name} is blamed: {action.evidence}")
        if action.incident == "share":
            require(self.is_shared, "S5", f"no run may have them: {action.evidence}")
        if action.incident == "link":
            require(bool(self.unlinked or self.lost_nodes), "S5", f"no link: {action.evidence}")

    def _check_slow(self, world: World, action: act.ReportIncident) -> None:
        """Check that a node left for being slow was slow for long and recently, and that leaving
        pays."""
        num_left = world.rules.total_steps - world.attempts[action.attempt].step
        require(bool(action.guilty), "S5", f"no worker is slow: {action.evidence}")
        for name in action.guilty:
            since_s, until_s, times = self.slowed.get(name, (inf, -inf, 1.0))
            is_slow = since_s + SLOW_STEADY_S <= action.found_s <= until_s + SLOW_SEEN_S
            require(is_slow, "S5", f"{name} is no slow worker: {action.evidence}")
            # It was decided two steps ago or less.
            won_s = (num_left + 2) * STEP_S * (times - 1.0)
            pays = won_s >= world.rules.growth.pause_guess_s
            require(pays, "S5", f"{name} is left for {won_s:.2f} s: {action.evidence}")

    def finished(self, action: act.FinishRun) -> None:
        """Note the end."""
        require(self.outcome is None or self.outcome == action, "S1", f"{action} after the end")
        self.outcome = action
