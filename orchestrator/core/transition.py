"""One event being folded: the mutable state, the rules, the time and the actions so far."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf
from typing import Any, TypeAlias

from orchestrator.core.actions import Action, FinishRun, ReportIncident
from orchestrator.core.rules import RunRules
from orchestrator.core.state import EDGES, Cause, MutableRunState, Phase, RunOutcome
from orchestrator.fault_kinds import FaultKind
from orchestrator.policies import LayoutRules
from ucp_core.numerics import shortened

#: Handles an event or a consequence. ``phase_table`` has one for each type and phase.
Handler: TypeAlias = Callable[["Transition", Any], None]
PhaseTable: TypeAlias = Mapping[type, Mapping[Phase, Handler]]
#: One line names at most this many ranks.
_NAMED = 8


class Transition:
    """The context of handlers while they fold one event, whose ``at_s`` is ``now_s``."""

    __slots__ = ("_table", "actions", "now_s", "rules", "run")

    def __init__(
        self, run: MutableRunState, rules: RunRules, now_s: float, table: PhaseTable
    ) -> None:
        self.run = run
        self.rules = rules
        self.now_s = now_s
        self.actions: list[Action] = []
        self._table = table

    def follow(self, what: Any) -> None:
        """Handle an event or a consequence with the table's entry for the current phase."""
        handler = self._table[type(what)].get(self.run.phase)
        if handler is not None:
            handler(self, what)

    def enter(self, phase: Phase, deadline_s: float) -> None:
        """Enter a phase that is bounded by ``deadline_s``; infinity for no bound."""
        before = self.run.phase
        assert phase in EDGES[before], f"{before} -> {phase}"
        self.run.phase = phase
        self.run.deadline_s = deadline_s

    @property
    def max_workers(self) -> int:
        """Return how many workers the run may have now; other runs may need some."""
        limit, most = self.run.sharing.limit, self.run.most_workers or self.rules.max_workers
        return most if limit < 0 else min(limit, most)

    @property
    def is_limited(self) -> bool:
        """Return whether the run may have fewer workers than configured."""
        return self.run.sharing.limit >= 0 or self.max_workers < self.rules.max_workers

    @property
    def layout_rules(self) -> LayoutRules:
        """Return the layout rules, with the refused layouts and the measured step times."""
        run = self.run
        if not run.refused and not run.steps:
            return self.rules.layout
        return replace(self.rules.layout, refused=run.refused, steps=run.steps)

    def wake_by(self, at_s: float) -> None:
        """Have the bounds of the fleet checked no later than ``at_s``."""
        self.run.fleet.wake_s = min(self.run.fleet.wake_s, at_s)

    def report_incident(self) -> None:
        """Record why the attempt ended, unless it completed or the run was resumed."""
        cause = self.run.cause
        if cause is not None and cause.kind not in (FaultKind.COMPLETED, FaultKind.RESUME):
            self.report(cause, fenced_s=self.run.attempt.fenced_s, killed=self.run.attempt.killed)

    def report_others(self) -> None:
        """Record the faults that the cause does not explain. A later call has only new ones."""
        others, self.run.also = self.run.also, ()
        for fault in others:
            self.report(fault, fenced_s=self.run.attempt.fenced_s)

    def report(
        self, fault: Cause, *, fenced_s: float, killed: tuple[tuple[int, str, str], ...] = ()
    ) -> None:
        """Record one fault or planned change, and the members that its fence killed."""
        self.run.faults_seen = self.run.faults_seen.and_incident(fault.kind)
        evidence = " ".join((*self._suspected(fault), fault.evidence))
        if killed:
            named = (f"rank {rank} ({worker} on {node})" for rank, worker, node in killed)
            evidence += f"; stayed after the fence, so killed: {shortened(named, _NAMED)}"
        self.actions.append(
            ReportIncident(
                attempt=self.run.attempt.number,
                incident=fault.kind.value,
                guilty=fault.guilty,
                evidence=evidence,
                found_s=fault.at_s,
                fenced_s=fenced_s,
                rule=fault.rule,
                verdict=fault.verdict,
                places=fault.places,
                killed=killed,
            )
        )

    def _suspected(self, fault: Cause) -> tuple[str, ...]:
        """Return the suspicions of the faulty workers; all if no worker is known to be faulty."""
        if fault.kind.is_planned or not fault.kind.names:
            return ()
        return tuple(
            one.evidence
            for one in self.run.attempt.suspects
            if one.worker in fault.guilty or not fault.guilty
        )

    def finish(self, outcome: RunOutcome, reason: str) -> None:
        """End the run."""
        run = self.run
        is_well = outcome in (RunOutcome.COMPLETED, RunOutcome.STOPPED)
        self.enter(Phase.FINISHED if is_well else Phase.FAILED, inf)
        run.fleet.wake_s = run.surveying_until_s = inf
        run.outcome, run.reason = outcome, reason
        self.actions.append(FinishRun(outcome=outcome, reason=reason))
