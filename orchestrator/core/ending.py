"""The end of a run."""

from __future__ import annotations

from math import inf

from orchestrator.core.actions import FinishRun
from orchestrator.core.state import Phase
from orchestrator.core.turn import Turn


def finish(turn: Turn, outcome: str, reason: str) -> None:
    """End the run for good: ``outcome`` is "completed", "stopped" or "failed"."""
    draft = turn.draft
    draft.phase = Phase.FAILED if outcome == "failed" else Phase.FINISHED
    draft.deadline_s = draft.wake_s = draft.surveying_until_s = inf
    draft.reason = reason
    turn.actions.append(FinishRun(outcome=outcome, reason=reason))
