"""Turns the keepers' reports into events: who has formed, which step is done, who hangs."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from orchestrator.core import Event, HangFound, StepCompleted
from orchestrator.detection import (
    Detector,
    Limits,
    NodeSilent,
    Verdict,
    judge,
    limits_from,
    observe,
    without_silent,
)
from workers.protocol import NodeReport, WorkerPhase, WorkerReport
from workers.settings import ParallelSettings

#: A lost node that was silent for so long is forgotten when the next attempt starts.
FORGET_S = 60.0

_NOT_FORMED = frozenset({WorkerPhase.IDLE, WorkerPhase.FORMING, WorkerPhase.LOADING})


class Observer:
    """Keeps the last report of every worker of a node and folds all of them into the detector.

    Args:
        post: Where events go.
        at_s: The run's clock.
        on_formed: Called once with (worker, attempt, when) for each that has formed.
        node_silent: Called with (node, cause) when a node says nothing beyond its bound.
        patience: A step may take this many times the observed p99.
        parallel: Says when collectives fail by themselves.
    """

    def __init__(
        self,
        *,
        post: Callable[[Event], None],
        at_s: Callable[[], float],
        on_formed: Callable[[str, int, float], None],
        node_silent: Callable[[str, str], None],
        patience: float,
        parallel: ParallelSettings,
    ) -> None:
        self._post = post
        self._at_s = at_s
        self._on_formed = on_formed
        self._node_silent = node_silent
        self._patience = patience
        self._parallel = parallel
        self._detector = Detector()
        self._attempt = 0
        self._members: tuple[str, ...] = ()
        self._formed: set[str] = set()
        self._step = 0
        self._judged = False
        self.reports: dict[str, WorkerReport] = {}
        self.seen_at_s: dict[str, float] = {}
        self._listed: dict[str, frozenset[str]] = {}

    def begin(self, attempt: int, members: tuple[str, ...], resume_step: int) -> None:
        """Watch ``attempt`` from now on; what older ones still say is only shown."""
        self._attempt = attempt
        self._members = members
        self._formed = set()
        self._step = resume_step
        self._judged = False
        self._detector = without_silent(self._detector, members, FORGET_S)
        for node in self._listed.keys() - self._detector.nodes.keys():
            self._forget(self._listed.pop(node))

    def end(self) -> None:
        """The attempt is over: its silence means nothing."""
        self._members = ()

    def on_report(self, report: NodeReport) -> None:
        """Take in one keeper's report."""
        at_s = self._at_s()
        self._detector = observe(self._detector, report, at_s)
        listed = frozenset(row.worker for row in report.workers)
        self._forget(self._listed.get(report.node, frozenset()) - listed)
        self._listed[report.node] = listed
        for row in report.workers:
            self.reports[row.worker] = row
            self.seen_at_s[row.worker] = at_s
            self._note_formed(row, at_s)
        self._note_step(at_s)

    @property
    def limits(self) -> Limits:
        """Return the bounds on waiting, as they follow from the steps so far."""
        return limits_from(
            self._detector.step_s_p99,
            step_s_p50=self._detector.step_s_p50,
            patience=self._patience,
        )

    def judge(self) -> None:
        """Post what the detector has come to, once per attempt."""
        if not self._members or self._judged:
            return
        at_s = self._at_s()
        verdict = judge(
            self._detector,
            at_s,
            attempt=self._attempt,
            members=self._members,
            limits=self.limits,
            collectives_fail_s=self._parallel.timeout_s(self._detector.step_s_p50),
        )
        if isinstance(verdict, NodeSilent):
            self._node_silent(verdict.node, verdict.evidence)
        elif isinstance(verdict, Verdict):
            self._judged = True
            self._post(
                HangFound(
                    at_s=at_s,
                    attempt=self._attempt,
                    guilty=verdict.guilty,
                    evidence=verdict.evidence,
                )
            )

    def _forget(self, workers: Iterable[str]) -> None:
        for worker in workers:
            del self.reports[worker], self.seen_at_s[worker]

    def _note_formed(self, row: WorkerReport, at_s: float) -> None:
        mine = row.attempt == self._attempt and row.worker in self._members
        if mine and row.worker not in self._formed and row.phase not in _NOT_FORMED:
            self._formed.add(row.worker)
            self._on_formed(row.worker, self._attempt, at_s)

    def _note_step(self, at_s: float) -> None:
        rows = [self.reports.get(worker) for worker in self._members]
        # Before its first step in the attempt a page still shows an older attempt's step.
        steps = [
            row.step
            for row in rows
            if row is not None and row.attempt == self._attempt and row.step_s > 0.0
        ]
        if not steps or len(steps) < len(self._members) or min(steps) <= self._step:
            return
        self._step = min(steps)
        step_s = max(row.step_s for row in rows if row is not None)
        self._post(StepCompleted(at_s=at_s, attempt=self._attempt, step=self._step, step_s=step_s))
