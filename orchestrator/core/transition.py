"""One event being folded: the mutable state, the rules, the time and the actions so far."""

from __future__ import annotations

from math import inf

from orchestrator.core.actions import Action, FinishRun, ReportIncident
from orchestrator.core.rules import RunRules
from orchestrator.core.state import Cause, MutableRunState, Phase
from orchestrator.policies import FaultKind


class Transition:
    """What the handlers pass along while they fold one event.

    Attributes:
        run: The state under change.
        rules: Of the run.
        now_s: ``at_s`` of the event.
        actions: What the shell is to do, in order.
    """

    __slots__ = ("actions", "now_s", "rules", "run")

    def __init__(self, run: MutableRunState, rules: RunRules, now_s: float) -> None:
        self.run = run
        self.rules = rules
        self.now_s = now_s
        self.actions: list[Action] = []

    @property
    def max_workers(self) -> int:
        """Return the most workers that the run may have now; other runs may need some."""
        limit = self.run.sharing.limit
        return self.rules.max_workers if limit < 0 else min(limit, self.rules.max_workers)

    def wake_by(self, at_s: float) -> None:
        """Have the fleet's bounds checked no later than ``at_s``."""
        self.run.fleet.wake_s = min(self.run.fleet.wake_s, at_s)

    def report_incident(self) -> None:
        """Put on record why the attempt ended, unless it completed or the run was resumed."""
        cause = self.run.cause
        if cause is not None and cause.kind not in (FaultKind.COMPLETED, FaultKind.RESUME):
            for fault in (cause, *self.run.also):
                self.report(fault, fenced_s=self.run.attempt.fenced_s)

    def report(self, fault: Cause, *, fenced_s: float) -> None:
        """Put one fault, or planned change, on record."""
        self.run.faults_seen = self.run.faults_seen.and_incident(fault.kind)
        self.actions.append(
            ReportIncident(
                attempt=self.run.attempt.number,
                incident=fault.kind.value,
                guilty=fault.guilty,
                evidence=fault.evidence,
                found_s=fault.at_s,
                fenced_s=fenced_s,
            )
        )

    def finish(self, outcome: str, reason: str) -> None:
        """End the run for good; see ``FinishRun`` for the outcomes."""
        run = self.run
        run.phase = Phase.FINISHED if outcome in ("completed", "stopped") else Phase.FAILED
        run.deadline_s = run.fleet.wake_s = run.surveying_until_s = inf
        run.outcome, run.reason = outcome, reason
        self.actions.append(FinishRun(outcome=outcome, reason=reason))
