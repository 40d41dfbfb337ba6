"""Resuming a run that is over or has lost its cluster: its history continues.

Earlier events were decided under earlier settings and cannot be folded under the new ones. So the
run resumes from the state that the earlier journal leads to, carried by one event.
"""

from __future__ import annotations

from orchestrator.core.events import RunResumed
from orchestrator.core.handlers import recovery
from orchestrator.core.state import (
    TERMINAL,
    Attempt,
    Cause,
    Fleet,
    MutableRunState,
    Phase,
    RunState,
)
from orchestrator.core.transition import Transition


def resume_event(
    state: RunState,
    *,
    at_s: float,
    incarnation: int,
    num_unknown: int = 0,
    back_to: int | None = None,
) -> RunResumed:
    """Return the event that resumes the run from ``state``, the last one of its journal.

    Args:
        state: Of the run.
        at_s: When.
        incarnation: Of the controller.
        num_unknown: Most attempts that may have begun since, of which the journal does not know.
        back_to: The step of a version in storage that the user goes back to; newer ones do not
            count any more. None to continue from the newest.
    """
    num_unknown = 0 if state.phase in TERMINAL else num_unknown
    if state.phase in TERMINAL:
        outcome = "failed" if state.phase is Phase.FAILED else "ended"
        # The reason may hold the user's traceback; its last line says what went wrong.
        why = f"it {outcome}: {state.reason.rstrip().rpartition(chr(10))[2]}"
    else:
        why = f"its cluster was gone while it was {state.phase}"
    attempt, lineage, stored = state.attempt.number + num_unknown, state.lineage, state.stored
    if back_to is not None:
        # As if an attempt had resumed there and ended at once.
        attempt, stored = attempt + 1, back_to
        lineage = (*lineage, (attempt, back_to))
    return RunResumed(
        at_s=at_s,
        incarnation=incarnation,
        attempt=attempt,
        lineage=lineage,
        # Where the run failed for it, a person was asked to put a sound copy back.
        bad=() if state.lost and state.phase in TERMINAL else state.bad,
        next_worker=state.fleet.next_worker,
        next_slot=state.fleet.next_slot,
        why=why,
        faults_seen=state.faults_seen,
        stored=stored,
    )


def run_resumed(transition: Transition, event: RunResumed) -> None:
    """Start behind the last commit, with no worker and with fresh budgets."""
    transition.run = MutableRunState(
        phase=Phase.FENCING,
        incarnation=event.incarnation,
        attempt=Attempt(number=event.attempt),
        fleet=Fleet(next_worker=event.next_worker, next_slot=event.next_slot),
        lineage=event.lineage,
        bad=event.bad,
        faults_seen=event.faults_seen,
        stored=event.stored,
        cause=Cause("resume", (), event.why, event.at_s),
    )
    # No member is inside, so the commits are read at once.
    recovery.proceed(transition)
