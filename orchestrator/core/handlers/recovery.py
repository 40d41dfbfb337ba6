"""From a fault to the next attempt: fence, read what was committed, decide.

The order is what keeps the promises. Nothing is started before every member has left or is gone;
what counts is read from keepers and storage, never from reports; who is blamed was proven guilty.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from orchestrator.core.actions import FenceAttempt, ReadCommitted
from orchestrator.core.events import CommittedRead
from orchestrator.core.handlers import fleet
from orchestrator.core.handlers.ending import finish, report, report_incident
from orchestrator.core.handlers.formation import wait
from orchestrator.core.state import Cause, Phase, WorkerStatus
from orchestrator.core.transition import Turn
from orchestrator.policies import MEMORY, Fault, FaultClass, UserError, budgets
from workers.protocol import Source

#: How much a kind explains; what explains more replaces the cause while an attempt is fenced.
_WEIGHT = {
    "peer_lost": 0,
    "controller_restart": 0,
    "resume": 0,
    "stop": 0,
    "growth": 0,
    "drain": 0,
    "undecided": 1,
    "unloadable": 1,
    "hang": 3,
    "exception": 2,
    "preemption": 3,
    "crash": 3,
    "node_loss": 3,
}
_CLASS = {
    "exception": FaultClass.USER,
    "preemption": FaultClass.PREEMPTION,
    "undecided": FaultClass.UNDECIDED,
}
#: Storage that did not answer this often in a row is taken for gone.
_READS_MAX = 20
#: Part of ``read_s`` after which keepers are asked again while one of them is being started.
_READ_AGAIN = 0.1


def fault(turn: Turn, kind: str, guilty: tuple[str, ...], evidence: str) -> None:
    """Note why the attempt cannot go on, and fence it if that was not begun yet."""
    draft = turn.draft
    cause = draft.cause
    if draft.phase not in (Phase.FENCING, Phase.READING):
        draft.cause, draft.also = Cause(kind, guilty, evidence, turn.now_s), ()
        _fence(turn)
    elif cause is None or _WEIGHT[kind] > _WEIGHT[cause.kind]:
        # The fault was found when the first hint of it came.
        at_s = cause.at_s if cause else turn.now_s
        draft.cause = Cause(kind, guilty, evidence, at_s)
    elif kind == cause.kind and guilty and not set(guilty) <= set(cause.guilty):
        draft.cause = replace(
            cause, guilty=(*cause.guilty, *(g for g in guilty if g not in cause.guilty))
        )
    elif kind != cause.kind and guilty and _WEIGHT[kind] == _WEIGHT[cause.kind]:
        new = tuple(name for name in guilty if name not in cause.guilty)
        draft.also += (Cause(kind, new, evidence, turn.now_s),)


def loss(turn: Turn, kind: str, evidence: str) -> None:
    """Note what was lost while nobody trained; nobody is guilty who was not in an attempt."""
    draft = turn.draft
    fault = Cause(kind, (), evidence, turn.now_s)
    if draft.phase is Phase.WAITING:
        report(turn, fault, fenced_s=turn.now_s)
    elif draft.phase in (Phase.FENCING, Phase.READING):
        draft.also += (fault,)


def _fence(turn: Turn) -> None:
    draft = turn.draft
    assert draft.cause is not None
    draft.phase = Phase.FENCING
    draft.deadline_s = turn.now_s + turn.rules.bounds.fence_s
    draft.down_since_s = min(draft.down_since_s, turn.now_s)
    inside = members_inside(turn)
    if inside:
        turn.actions.append(
            FenceAttempt(
                attempt=draft.attempt,
                workers=inside,
                reason=draft.cause.evidence or draft.cause.kind,
            )
        )
    draft.reads_pending = 0
    if draft.num_inside:
        # Read while the members leave: often the answer can be proven final when they have.
        read(turn)


def members_inside(turn: Turn) -> tuple[str, ...]:
    """Return the members that are still in the attempt and not killed, in rank order."""
    workers = (turn.draft.workers.get(number) for number in turn.draft.members)
    return tuple(
        worker.name
        for worker in workers
        if worker is not None and worker.inside and worker.status is WorkerStatus.READY
    )


def read(turn: Turn) -> None:
    """Ask keepers and storage what was committed."""
    draft = turn.draft
    draft.num_reads += 1
    draft.reads_pending += 1
    draft.read_seen = False
    turn.actions.append(
        ReadCommitted(
            attempt=draft.attempt,
            lineage=draft.lineage,
            number=draft.num_reads,
            bad=draft.bad,
        )
    )


def memory_shrank(turn: Turn) -> None:
    """A node was lost with what it held: what was read in memory has to be read again."""
    draft = turn.draft
    if draft.phase not in (Phase.FENCING, Phase.READING):
        return
    draft.read_memory_from = draft.num_reads + 1
    if draft.known_in_memory:
        draft.read_seen = False
    if draft.num_inside:
        # As early as the first read, for the same reason.
        read(turn)


def leave_out(turn: Turn, damaged: tuple[Source, ...], unread: tuple[Source, ...] = ()) -> None:
    """Load no more from what is damaged, nor from what a second attempt could not read."""
    if not damaged and not unread:
        return
    draft = turn.draft
    draft.unread += tuple(source for source in unread if source not in draft.unread)
    again = (source for source in unread if source in draft.unread_before)
    new = tuple(source for source in dict.fromkeys((*damaged, *again)) if source not in draft.bad)
    if new:
        draft.bad += new
        # What is being read does not know of it.
        draft.read_bad_from = draft.num_reads + 1
        draft.read_seen = False


def heard_late(turn: Turn, damaged: tuple[Source, ...], unread: tuple[Source, ...] = ()) -> None:
    """Take what a member of the attempt found bad, though it is known to be gone already.

    What was read before may be just that: then it is read again before anything starts from it.
    """
    draft = turn.draft
    num_bad = len(draft.bad)
    leave_out(turn, damaged, unread)
    if draft.phase is Phase.WAITING and len(draft.bad) > num_bad:
        draft.phase = Phase.READING
        draft.deadline_s = turn.now_s + turn.rules.bounds.read_s
    proceed(turn)


def proceed(turn: Turn) -> None:
    """Go on with a recovery if all members are gone and what to resume from is known."""
    draft = turn.draft
    if draft.phase is Phase.FENCING and draft.num_inside == 0:
        draft.phase = Phase.READING
        draft.fenced_s = turn.now_s
        draft.read_final_from = draft.num_reads + 1
        draft.deadline_s = turn.now_s + turn.rules.bounds.read_s
    if draft.phase is not Phase.READING:
        return
    if _known_is_final(turn):
        decide(turn)
    elif draft.reads_pending == 0 or draft.num_reads < max(
        draft.read_memory_from, draft.read_bad_from
    ):
        read(turn)


def _known_is_final(turn: Turn) -> bool:
    """Return whether no commit of the fenced attempt can be newer than the known one.

    A commit of step s needs every rank to have completed s. So the least step that any member
    had completed when it left bounds it. Where that is not reached, or nobody could say, only a
    read that was sent after the fence is final. An attempt that never trained is always read
    for, because what it failed to load may be damaged. Final means that nothing newer can come:
    a version in memory can still be lost, then loading it fails and the next attempt reads anew.
    """
    draft = turn.draft
    if draft.read_seen and draft.num_reads - draft.reads_pending >= draft.read_final_from:
        return True
    reported = draft.stepped and not draft.known_in_memory
    if not (draft.read_seen or reported) or draft.left_step < 0:
        return False
    every = turn.rules.checkpoint_every
    if draft.yield_asked or draft.known[0] % every or draft.left_step >= turn.rules.total_steps:
        # A yield commits at any step, and the last step is always committed.
        every = 1
    return draft.known[0] >= draft.left_step - draft.left_step % every


def committed_read(turn: Turn, event: CommittedRead) -> None:
    """Take the answer to a read, unless one to a newer read was taken."""
    draft = turn.draft
    number = event.number or draft.num_reads
    is_awaited = draft.num_reads - draft.reads_pending < number <= draft.num_reads
    if draft.phase not in (Phase.FENCING, Phase.READING) or not is_awaited:
        return
    draft.reads_pending = draft.num_reads - number
    # Also if older than what was known: a damaged version is passed over, memory can be lost.
    draft.known = (event.step, event.committed_by)
    draft.known_in_memory = event.source == MEMORY
    read_from = draft.read_bad_from
    if draft.known_in_memory:
        read_from = max(read_from, draft.read_memory_from)
    draft.read_seen = number >= read_from
    draft.lost = event.lost
    if _may_come_back(turn, event):
        draft.read_seen = False
        if draft.phase is Phase.READING and not draft.reads_pending:
            draft.deadline_s = turn.now_s + _READ_AGAIN * turn.rules.bounds.read_s
            return
    proceed(turn)


def _may_come_back(turn: Turn, event: CommittedRead) -> bool:
    """Return whether to wait for a keeper that may hold a much newer version.

    It is back in about a second: with what the attempt began from, which workers that live kept for
    it; or with all that memory had, if they or a vault kept that, while storage has less. Where it
    is not, the run goes on from what is there.
    """
    draft = turn.draft
    is_stored = event.source != "memory" and event.step < draft.step
    is_older = is_stored or event.step < draft.known_at_start[0]
    patience_end_s = draft.fenced_s + turn.rules.bounds.read_s
    is_early = draft.phase is Phase.FENCING or turn.now_s < patience_end_s
    return bool(event.returning) and is_older and is_early


def fence_bound(turn: Turn) -> None:
    """Kill the members that did not leave in time; give up those that cannot be killed."""
    draft = turn.draft
    draft.deadline_s = turn.now_s + turn.rules.bounds.kill_s
    for number in draft.members:
        worker = draft.workers.get(number)
        if worker is None or not worker.inside:
            continue
        if worker.status is WorkerStatus.READY:
            fleet.kill_worker(turn, number, f"did not leave attempt {draft.attempt} when fenced")
        elif worker.deadline_s <= turn.now_s:
            give_up(turn, number)
        else:
            draft.deadline_s = min(draft.deadline_s, worker.deadline_s)
    proceed(turn)


def give_up(turn: Turn, number: int) -> None:
    """Forget a killed process of which nothing was heard.

    It cannot commit alone, and what it writes belongs to an attempt that no longer counts. It is
    no strike against its node: the order or its answer may just be late.
    """
    fleet.drop_worker(turn, number)


def read_bound(turn: Turn) -> None:
    """Ask again, or give up on storage."""
    draft = turn.draft
    if draft.reads_pending >= _READS_MAX:
        waited_s = _READS_MAX * turn.rules.bounds.read_s
        finish(turn, "failed", f"storage has not answered for {waited_s:.0f} s: check checkpoints/")
        return
    read(turn)
    draft.deadline_s = turn.now_s + turn.rules.bounds.read_s


def decide(turn: Turn) -> None:
    """End the run or start the next attempt, now that the last one is fenced and read."""
    draft = turn.draft
    is_first_time = not draft.judged
    draft.judged = True
    if is_first_time:
        report_incident(turn)
    if draft.known[0] >= turn.rules.total_steps:
        finish(turn, "completed", f"step {draft.known[0]} is committed")
        return
    if draft.stop_reason:
        finish(turn, "stopped", draft.stop_reason)
        return
    if is_first_time:
        problem = _charge(turn)
        if problem:
            finish(turn, "failed", problem)
            return
    if draft.lost and not draft.known[0]:
        finish(turn, "failed", _lost(draft.lost))
        return
    if is_first_time:
        draft.hold_until_s = turn.now_s + budgets.pause_s(draft.num_stuck)
    wait(turn)


def _lost(steps: tuple[int, ...]) -> str:
    names = ", ".join(f"step-{step:08d}" for step in steps)
    return (
        f"none of the committed checkpoints can be loaded ({names}), and memory holds nothing. "
        "Nothing was deleted: `everstep report` and `ucp verify` say what is wrong with them; put "
        "a sound copy of one back and run again, or delete checkpoints/ to begin anew"
    )


def _charge(turn: Turn) -> str:
    """Charge the failed attempt to its budget; return why the run must fail, or ""."""
    draft, rules = turn.draft, turn.rules.budgets
    bug = budgets.user_bug(draft.raised, draft.raised_before)
    if bug is not None:
        return (
            f"{bug.traceback.rstrip()}\n\nrank {bug.rank} raised at step {bug.step}: {bug.error} "
            f"(attempt {draft.attempt}; seen twice, so it is taken for a bug)"
        )
    # The last 64 are enough: what is to be recognised comes back at the same step, at once.
    draft.raised_before = (*draft.raised_before, *draft.raised)[-64:]
    kind = draft.cause.kind if draft.cause else "peer_lost"
    if kind == "resume":
        return ""  # what there was to charge was charged when it failed
    if kind == "unloadable" and len(draft.bad) > draft.num_bad_at_start:
        # Nobody failed, and it comes to an end: there are fewer sources for the next attempt.
        return ""
    fault_class = _CLASS.get(kind, FaultClass.INFRASTRUCTURE)
    if kind == "exception" and all(error.is_of_data for error in draft.raised):
        fault_class = FaultClass.INFRASTRUCTURE
    if kind not in ("growth", "drain", "stop", "controller_restart"):
        draft.faults = budgets.charge(
            draft.faults, Fault(at_s=turn.now_s, fault_class=fault_class), rules
        )
    progressed = draft.known[0] > draft.known_at_start[0]
    draft.num_stuck = 0 if progressed else draft.num_stuck + 1
    if draft.stepped and fault_class is not FaultClass.UNDECIDED:
        draft.num_undecided = 0
    elif fault_class is FaultClass.UNDECIDED:
        draft.num_undecided = 1 if progressed else draft.num_undecided + 1
    problem = budgets.overspent(
        draft.faults,
        num_stuck=draft.num_stuck,
        num_undecided=draft.num_undecided,
        rules=rules,
    )
    if not problem or draft.cause is None:
        return problem
    lines = (f"the last failure: {draft.cause.kind}: {draft.cause.evidence}", problem)
    shown = [error.traceback.rstrip() for error in draft.raised[:1]]
    return "\n".join((*shown, *lines))


def note_raised(turn: Turn, error: UserError) -> None:
    """Keep an exception of the current attempt for the verdict at its end."""
    draft = turn.draft
    if error not in draft.raised:
        draft.raised = (*draft.raised, error)


def phase_bound(turn: Turn) -> None:
    """Handle the bound of a phase in which an attempt should have gone on."""
    draft = turn.draft
    workers = (draft.workers.get(number) for number in draft.members)
    if draft.phase is Phase.FORMING:
        late = [w.name for w in workers if w is not None and w.inside and not w.formed]
        bound_s = turn.rules.bounds.form_bound_s(turn.draft.num_stuck)
        what = "had not formed"
    else:
        late = [w.name for w in workers if w is not None and w.inside]
        bound_s = turn.rules.bounds.yield_s
        what = "had not yielded"
    evidence = f"after {bound_s:g} s {', '.join(late[:8])} {what}"
    draft.deadline_s = inf
    fault(turn, "undecided", (), evidence)
    proceed(turn)
