"""The end of a run."""

from __future__ import annotations

from math import inf

from orchestrator.core.actions import FinishRun, ReportIncident
from orchestrator.core.state import Cause, Phase
from orchestrator.core.transition import Transition


def report_incident(transition: Transition) -> None:
    """Put on record why the attempt ended, unless it completed or the run was resumed."""
    run = transition.run
    cause = run.cause
    if cause is None or cause.kind in ("completed", "resume"):
        return
    for fault in (cause, *run.also):
        report(transition, fault, fenced_s=run.attempt.fenced_s)


def report(transition: Transition, fault: Cause, *, fenced_s: float) -> None:
    """Put one fault, or planned change, on record."""
    run = transition.run
    run.faults_seen = run.faults_seen.and_incident(fault.kind)
    transition.actions.append(
        ReportIncident(
            attempt=transition.run.attempt.number,
            incident=fault.kind,
            guilty=fault.guilty,
            evidence=fault.evidence,
            found_s=fault.at_s,
            fenced_s=fenced_s,
        )
    )


def finish(transition: Transition, outcome: str, reason: str) -> None:
    """End the run for good; see ``FinishRun`` for the outcomes."""
    run = transition.run
    run.phase = Phase.FINISHED if outcome in ("completed", "stopped") else Phase.FAILED
    run.deadline_s = run.fleet.wake_s = run.surveying_until_s = inf
    run.outcome, run.reason = outcome, reason
    transition.actions.append(FinishRun(outcome=outcome, reason=reason))
