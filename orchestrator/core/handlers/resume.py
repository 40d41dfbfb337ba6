"""A run that is over, or whose cluster is gone, goes on: the same history, everything else anew.

What was decided under the settings of then is not folded under those of now. So a run that is
resumed starts from what the earlier journal amounts to, as a value, and not from its events.
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


def resume_event(state: RunState, *, at_s: float, incarnation: int) -> RunResumed:
    """Return the event by which the run goes on from ``state``, the last one of its journal."""
    if state.phase in TERMINAL:
        outcome = "failed" if state.phase is Phase.FAILED else "ended"
        # The user's traceback is in the reason of then; its last line says what it was about.
        why = f"it {outcome}: {state.reason.rstrip().rpartition(chr(10))[2]}"
    else:
        why = f"its cluster was gone while it was {state.phase}"
    return RunResumed(
        at_s=at_s,
        incarnation=incarnation,
        attempt=state.attempt.number,
        lineage=state.lineage,
        # A person was asked to put a sound copy back; what was in memory ended with the run.
        bad=() if state.lost else state.bad,
        next_worker=state.fleet.next_worker,
        next_slot=state.fleet.next_slot,
        why=why,
        faults_seen=state.faults_seen,
    )


def run_resumed(transition: Transition, event: RunResumed) -> None:
    """Begin anew behind what is committed: nobody is there, and no budget is spent."""
    transition.run = MutableRunState(
        phase=Phase.FENCING,
        incarnation=event.incarnation,
        attempt=Attempt(number=event.attempt),
        fleet=Fleet(next_worker=event.next_worker, next_slot=event.next_slot),
        lineage=event.lineage,
        bad=event.bad,
        faults_seen=event.faults_seen,
        cause=Cause("resume", (), event.why, event.at_s),
    )
    # Nobody is left inside, so what counts is read at once.
    recovery.proceed(transition)
