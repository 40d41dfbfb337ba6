"""Resume a run that is over or has lost its cluster; its history continues.

Earlier events were handled under earlier settings and cannot be folded under new ones. So one event
carries the state that the earlier journal leads to.
"""

from dataclasses import replace

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
from orchestrator.fault_kinds import FaultKind


def resume_event(
    state: RunState, *, at_s: float, incarnation: int, num_unknown: int = 0, last_attempt: int = 0
) -> RunResumed:
    """Return the event that resumes the run from ``state``, the last one of its journal.

    At most ``num_unknown`` attempts may have started since without a record in the journal;
    ``last_attempt`` is the highest one that has a file in storage.
    """
    num_unknown = 0 if state.phase in TERMINAL else num_unknown
    if state.phase in TERMINAL:
        outcome = "failed" if state.phase is Phase.FAILED else "ended"
        # The reason may hold the user's traceback; its last line says what failed.
        why = f"it {outcome}: {state.reason.rstrip().rpartition(chr(10))[2]}"
    else:
        why = f"its cluster was gone while it was {state.phase}"
    return RunResumed(
        at_s=at_s,
        incarnation=incarnation,
        attempt=max(state.attempt.number + num_unknown, last_attempt),
        # An attempt that completed no step has no history. Without it in the lineage, versions
        # newer than the one it resumed from count again, once a person has repaired what hid them.
        lineage=tuple(one for one in state.lineage if one[0] <= max(state.trained, last_attempt)),
        # If the run failed because no version could be loaded, a person was asked to put a sound
        # copy back.
        bad=() if state.lost and state.phase in TERMINAL else state.bad,
        next_worker=state.fleet.next_worker,
        next_reservation=state.fleet.next_reservation,
        why=why,
        faults_seen=state.faults_seen,
        stored=state.stored,
    )


def go_back(resumed: RunResumed, step: int) -> RunResumed:
    """Return ``resumed`` with ``step`` of storage as the newest one that counts."""
    # The lineage is as if an attempt had resumed there and ended at once.
    attempt = resumed.attempt + 1
    lineage = (*resumed.lineage, (attempt, step))
    return replace(resumed, attempt=attempt, lineage=lineage, stored=step)


def resume_without_journal(
    attempt: int, stored: int, *, at_s: float, incarnation: int
) -> RunResumed:
    """Return the event that resumes from checkpoints without a journal.

    A script that ran alone wrote them, or the journal is gone. ``attempt`` is the highest one that
    has a file there, ``stored`` the newest step that was committed there, 0 for none.
    """
    event = resume_event(RunState(), at_s=at_s, incarnation=incarnation, last_attempt=attempt)
    why = f"checkpoints/ has step {stored}, and there was no journal"
    return replace(event, why=why, stored=stored)


def run_resumed(transition: Transition, event: RunResumed) -> None:
    """Start after the last commit, without workers and with fresh budgets."""
    transition.run = MutableRunState(
        phase=Phase.FENCING,
        incarnation=event.incarnation,
        attempt=Attempt(number=event.attempt),
        # The whole lineage of the event counts, also a step that the run went back to.
        trained=max([event.attempt, *(attempt for attempt, _ in event.lineage)]),
        fleet=Fleet(next_worker=event.next_worker, next_reservation=event.next_reservation),
        lineage=event.lineage,
        bad=event.bad,
        faults_seen=event.faults_seen,
        stored=event.stored,
        cause=Cause(FaultKind.RESUME, (), event.why, event.at_s),
    )
    # No member is inside, so the commits are read at once.
    recovery.advance(transition)
