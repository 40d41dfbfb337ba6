"""Turn keepers' reports into events: a member has formed, a step is complete, a member hangs."""

from collections.abc import Callable, Iterable, Sequence
from math import ceil

from orchestrator import detection, diagnosis
from orchestrator.core import events as ev
from orchestrator.shell.inbox import Inbox
from orchestrator.traffic import Sent, measured
from ucp_core.layout import ParallelLayout
from workers.protocol import NOT_FORMED, NodeReport, StepCost, WorkerReport
from workers.settings import ParallelSettings

#: A lost node that was silent for this long is forgotten when the next attempt starts.
FORGET_S = 60.0

#: How often starting processes are checked: several times within the bound of a start.
STARTS_S = 10.0

#: A keeper that has not reported for this long is silent; it reports every second.
KEEPER_LATE_S = 2.5
#: How often nodes are searched for a silent keeper. With 10,000 nodes a search takes 2 ms.
SEARCH_S = 0.5

#: Shortest time between two judgements, plus a time per member. It is far shorter than the period
#: of reports on a stalled member. Judging takes 5 us per member.
JUDGE_S = 0.02
JUDGE_S_EACH = 1e-4
#: The bytes of a step are measured after this many steps, and then each time after twice as many.
_NUM_STEPS_MEASURED = 10


class Observer:
    """Keeps the last report of every worker of a node and feeds all of them to the detector.

    Args:
        on_formed: Called once with (worker, attempt, when) for each member that has formed.
        node_silent: Called with (node, seconds, cause) when a node is silent for longer than its
            bound.
        patience: A step may take this many times the observed p99.
        parallel: Has the timeout of collectives.
    """

    def __init__(
        self,
        inbox: Inbox,
        *,
        on_formed: Callable[[str, int, float], None],
        node_silent: Callable[[str, float, str], None],
        patience: float,
        parallel: ParallelSettings,
    ) -> None:
        self._inbox = inbox
        self._on_formed = on_formed
        self._node_silent = node_silent
        self._patience = patience
        self._parallel = parallel
        self._detector = detection.Detector()
        self.flows = diagnosis.Flows()
        self._attempt = 0
        self._members: tuple[str, ...] = ()
        self._is_member: frozenset[str] = frozenset()
        self._ranks: dict[str, int] = {}
        self._live = diagnosis.Live((), 0)
        self._slow_links: tuple[diagnosis.Suspicion, ...] = ()
        self._dead_links: tuple[diagnosis.Suspicion, ...] = ()
        self._formed: set[str] = set()
        self._step = 0
        #: The newest step that keepers saw committed by the attempt.
        self._stored_step = 0
        self._ahead: dict[str, WorkerReport] = {}
        #: Bytes that each member had sent at the last measurement, and the step of the next one.
        self._sent: dict[str, Sent] = {}
        self._num_measured = self._sent_step = 0
        self._told_sent: dict[str, float] = {}
        self._judged = False
        self._stalled_s = 0.0
        self._judged_at_s = float("-inf")
        #: Members of a fenced attempt, the time from which they are late, and those that still
        #: compute.
        self._fenced: tuple[str, ...] = ()
        self._late_at_s = 0.0
        self._at_work: tuple[str, ...] = ()
        #: The processor time of the loading thread at the last check, by worker.
        self._loaded_s: dict[str, float] = {}
        self._starts_at_s = self._silent_at_s = float("-inf")
        #: Nodes whose keeper does not report while others do.
        self._silent: frozenset[str] = frozenset()
        self.reports: dict[str, WorkerReport] = {}
        self.seen_at_s: dict[str, float] = {}
        #: The last cost of a step that each worker reported.
        self.costs: dict[str, StepCost] = {}
        self._listed: dict[str, frozenset[str]] = {}

    def begin(
        self,
        attempt: int,
        members: tuple[str, ...],
        resume_step: int,
        layout: ParallelLayout | None = None,
    ) -> None:
        """Watch ``attempt`` from now on; reports of older attempts are only shown.

        Without a ``layout`` all members do equal work.
        """
        self._attempt = attempt
        self._members, self._is_member = members, frozenset(members)
        self._ranks = {worker: rank for rank, worker in enumerate(members)}
        self._live = diagnosis.Live(
            [()] * len(members) if layout is None else diagnosis.roles_of(layout), resume_step + 1
        )
        self._slow_links = self._dead_links = ()
        self._formed = set()
        self._step, self._ahead = resume_step, {}
        self._sent, self._num_measured = {}, _NUM_STEPS_MEASURED
        self._sent_step = resume_step + self._num_measured
        self._stored_step = 0
        self._judged, self._stalled_s = False, 0.0
        self._fenced = self._at_work = ()
        self._detector = detection.without_silent(self._detector, members, FORGET_S)
        self.flows.forget(self._inbox.at_s())
        for node in self._listed.keys() - self._detector.nodes.keys():
            self._forget(self._listed.pop(node))

    def end(self, inside: tuple[str, ...], late_s: float) -> None:
        """Stop judging the attempt: it is fenced, so its silence means nothing.

        Members in ``inside`` must leave it. After ``late_s`` those that have not left are checked.
        """
        self._members, self._is_member = (), frozenset()
        self._fenced, self._late_at_s = inside, self._inbox.at_s() + late_s

    def on_report(self, report: NodeReport) -> None:
        """Take one keeper's report."""
        at_s = self._inbox.at_s()
        is_slowed = self._live.is_slow or bool(self._slow_links)
        self._detector = detection.observe(self._detector, report, at_s, learns=not is_slowed)
        self.flows.observe(report, at_s)
        listed = frozenset(row.worker for row in report.workers)
        self._forget(self._listed.get(report.node, frozenset()) - listed)
        self._listed[report.node] = listed
        if report.stored_attempt == self._attempt:
            self._stored_step = max(self._stored_step, report.stored_step)
        for row in report.workers:
            self.reports[row.worker] = row
            self.seen_at_s[row.worker] = at_s
            if row.digest is not None and row.digest.costs:
                self.costs[row.worker] = row.digest.costs[-1]
            if row.attempt == self._attempt and row.worker in self._is_member:
                self._note_formed(row, at_s)
                self._note_step(row, at_s)
                self._live.take(self._ranks[row.worker], row, report.node, at_s)

    @property
    def limits(self) -> detection.Limits:
        """Return the bounds on waiting that follow from the steps so far."""
        return detection.limits_from(
            self._detector.step_s_p99,
            step_s_p50=self._detector.step_s_p50,
            patience=self._patience,
        )

    @property
    def step_s(self) -> dict[str, float]:
        """Return ``p50`` and ``p99`` of the last steps in seconds; empty before the first."""
        ordered = sorted(self._detector.steps_s)
        shares = {"p50": 0.5, "p99": 0.99} if ordered else {}
        return {name: ordered[ceil(share * len(ordered)) - 1] for name, share in shares.items()}

    def judge(self) -> None:
        """Post the detector's verdict, once per attempt.

        Call it after every report. With many nodes, most reports change nothing, so several are
        judged together.
        """
        at_s = self._inbox.at_s()
        self._look_who_leaves(at_s)
        self._look_who_starts(at_s)
        self._look_who_is_silent(at_s)
        period_s = JUDGE_S + JUDGE_S_EACH * len(self._members)
        if not self._members or self._judged or at_s - self._judged_at_s < period_s:
            return
        self._judged_at_s = at_s
        self._look_whom_to_suspect(at_s)
        verdict = detection.judge(
            self._detector,
            at_s,
            attempt=self._attempt,
            members=self._members,
            limits=self.limits,
            collectives_fail_s=self._parallel.timeout_s(self._detector.step_s_p50),
        )
        if isinstance(verdict, detection.NodeSilent):
            silent_s = self._detector.silent_s(verdict.node)
            self._node_silent(verdict.node, silent_s, verdict.evidence)
        elif isinstance(verdict, detection.Hang):
            self._judged = True
            self._inbox.post(
                ev.HangFound(
                    at_s=at_s,
                    attempt=self._attempt,
                    guilty=verdict.guilty,
                    evidence=verdict.evidence,
                    is_program=verdict.is_program,
                    rule=verdict.rule,
                    verdict=str(verdict.kind),
                    at_odds=verdict.at_odds,
                    maybe_well=verdict.maybe_well,
                )
            )
        waited_s = verdict.waited_s if isinstance(verdict, detection.Stalled) else 0.0
        for link in self._dead_links:
            waited_s = max(waited_s, at_s - link.since_s)
        if waited_s >= 2.0 * self._stalled_s > 0.0 or waited_s > 0.0 == self._stalled_s:
            # Report the same stall again only after twice the time.
            self._inbox.post(ev.AttemptStalled(at_s=at_s, attempt=self._attempt, waited_s=waited_s))
            self._stalled_s = waited_s
        elif waited_s < self._stalled_s:
            self._stalled_s = 0.0

    def suspect_links(
        self,
        attempt: int,
        found: Sequence[diagnosis.Verdict],
        *,
        since_s: float,
        times: float,
        is_confirmed: bool,
    ) -> None:
        """Replace the suspected slow links and ends of links by those that keepers timed.

        Args:
            since_s: When they became slow.
            times: Step time divided by what it should be.
            is_confirmed: Whether keepers found the same before; only then may the run leave a node
                because of it.
        """
        if attempt != self._attempt or not self._members:
            return
        before, self._slow_links = (
            self._slow_links,
            tuple(
                diagnosis.Suspicion(
                    kind=one.kind,
                    guilty=one.guilty,
                    confidence=one.confidence,
                    since_s=since_s,
                    evidence=one.evidence,
                    alternatives=one.alternatives,
                    # Without a worker, the run leaves no node, but it can avoid the link.
                    worker=self._members[one.guilty.ranks[0]]
                    if one.guilty.ranks and is_confirmed
                    else "",
                    times=times,
                )
                for one in found
            ),
        )
        if _about(before) != _about(self._slow_links):
            self._post_suspected(self._inbox.at_s())

    def _look_whom_to_suspect(self, at_s: float) -> None:
        before = self._dead_links
        self._dead_links = tuple(diagnosis.dead(self.flows, self._ranks, at_s))
        is_news = self._live.look(at_s)
        if is_news or _about(before) != _about(self._dead_links):
            self._post_suspected(at_s)

    def _post_suspected(self, at_s: float) -> None:
        self._inbox.post(
            ev.Suspected(
                at_s=at_s,
                attempt=self._attempt,
                suspects=(*self._live.suspicions, *self._slow_links, *self._dead_links),
                usual_step_s=self._detector.step_s_p50,
            )
        )

    def _look_who_leaves(self, at_s: float) -> None:
        """Post which members of a fenced attempt are at work, when that changes."""
        if not self._fenced or at_s < self._late_at_s:
            return
        working = detection.at_work(self._detector, attempt=self._attempt, members=self._fenced)
        if working != self._at_work:
            self._at_work = working
            self._inbox.post(ev.MembersAtWork(at_s=at_s, attempt=self._attempt, workers=working))

    def _look_who_starts(self, at_s: float) -> None:
        """Post which processes outside of the attempt have computed since the last check."""
        if at_s - self._starts_at_s < STARTS_S:
            return
        self._starts_at_s, before = at_s, self._loaded_s
        self._loaded_s = {
            worker: row.trainer_s for worker, row in self.reports.items() if not row.attempt
        }
        # If another thread is counted now, the time differs as well; that is progress, too.
        advanced = tuple(
            worker for worker, s in self._loaded_s.items() if before.get(worker, s) != s
        )
        if advanced:
            self._inbox.post(ev.StartsAdvanced(at_s=at_s, workers=advanced))

    def _look_who_is_silent(self, at_s: float) -> None:
        """Post which keepers do not report, and which do again, when that changes."""
        if at_s - self._silent_at_s < SEARCH_S:
            return
        self._silent_at_s, before = at_s, self._silent
        self._silent = detection.silent_nodes(self._detector, KEEPER_LATE_S)
        for node in sorted(self._silent - before):
            self._inbox.post(
                ev.KeeperSilent(at_s=at_s, node=node, silent_s=self._detector.silent_s(node))
            )
        for node in sorted(before - self._silent):
            self._inbox.post(ev.KeeperReady(at_s=at_s, node=node))

    def _forget(self, workers: Iterable[str]) -> None:
        for worker in workers:
            del self.reports[worker], self.seen_at_s[worker]
            self.costs.pop(worker, None)

    def _note_formed(self, row: WorkerReport, at_s: float) -> None:
        if row.worker not in self._formed and row.phase not in NOT_FORMED:
            self._formed.add(row.worker)
            self._on_formed(row.worker, self._attempt, at_s)

    def _note_step(self, row: WorkerReport, at_s: float) -> None:
        # Before its first step in the attempt, a worker's record still shows the step of an older
        # attempt.
        if row.step <= self._step or not row.step_s:
            return
        self._ahead[row.worker] = row
        if len(self._ahead) == len(self._members):
            rows = self._ahead.values()
            self._step, step_s = min(row.step for row in rows), max(row.step_s for row in rows)
            self._ahead = {row.worker: row for row in rows if row.step > self._step}
            self._inbox.post(
                ev.StepCompleted(
                    at_s=at_s,
                    attempt=self._attempt,
                    step=self._step,
                    step_s=step_s,
                    stored=self._stored_step,
                )
            )
            self._measure_traffic()

    def _measure_traffic(self) -> None:
        """Post what a step sends: measured over some steps, then over twice as many, and so on."""
        if self._step < self._sent_step:
            return
        rows = ((worker, self.reports[worker]) for worker in self._members)
        now = {worker: Sent(row.step, row.groups) for worker, row in rows}
        before, self._sent = self._sent, now
        self._num_measured *= 2
        self._sent_step = self._step + self._num_measured
        sent = measured((before[worker], now[worker]) for worker in before)
        if sent and sent != self._told_sent:
            self._told_sent = sent
            self._inbox.post(
                ev.TrafficMeasured(
                    at_s=self._inbox.at_s(), attempt=self._attempt, sent=tuple(sent.items())
                )
            )


def _about(found: Sequence[diagnosis.Suspicion]) -> list[object]:
    return [(one.kind, one.guilty, one.worker) for one in found]
