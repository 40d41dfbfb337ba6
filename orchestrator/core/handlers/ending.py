"""The end of a run."""

from __future__ import annotations

from math import inf

from orchestrator.core.actions import FinishRun, ReportIncident
from orchestrator.core.state import Cause, Phase
from orchestrator.core.transition import Turn


def report_incident(turn: Turn) -> None:
    """Put on record why the attempt ended, unless it did all there was to do or is long over."""
    draft = turn.draft
    cause = draft.cause
    if cause is None or cause.kind in ("completed", "resume"):
        return
    for fault in (cause, *draft.also):
        report(turn, fault, fenced_s=draft.fenced_s)


def report(turn: Turn, fault: Cause, *, fenced_s: float) -> None:
    """Put one fault, or planned change, on record."""
    turn.actions.append(
        ReportIncident(
            attempt=turn.draft.attempt,
            incident=fault.kind,
            guilty=fault.guilty,
            evidence=fault.evidence,
            found_s=fault.at_s,
            fenced_s=fenced_s,
        )
    )


def finish(turn: Turn, outcome: str, reason: str) -> None:
    """End the run for good: ``outcome`` is "completed", "stopped" or "failed"."""
    draft = turn.draft
    draft.phase = Phase.FAILED if outcome == "failed" else Phase.FINISHED
    draft.deadline_s = draft.wake_s = draft.surveying_until_s = inf
    draft.reason = reason
    turn.actions.append(FinishRun(outcome=outcome, reason=reason))
