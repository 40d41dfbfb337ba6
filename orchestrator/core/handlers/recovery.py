"""Recover from a fault: fence the attempt, read what was committed, decide what comes next.

This order keeps the promises. No attempt starts before every member has left or is gone. The
version to resume from is read from keepers and storage where reports may be outdated. Only workers
that are proven guilty are blamed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Final

from orchestrator.core.actions import CollectEvidence, FenceAttempt, ReadCommitted
from orchestrator.core.consequences import (
    AttemptFailed,
    BoundReached,
    IdleLoss,
    MemoryLost,
    RecoveryAdvanced,
)
from orchestrator.core.events import CommittedRead, WorkerFormed, WorkerLeft
from orchestrator.core.handlers import fleet
from orchestrator.core.handlers.formation import capacity, wait
from orchestrator.core.network import reach, search
from orchestrator.core.state import (
    Cause,
    MutableRunState,
    Phase,
    RunOutcome,
    Worker,
    WorkerStatus,
    is_dying,
    worker_name,
)
from orchestrator.core.transition import Transition
from orchestrator.fault_kinds import FaultClass, FaultKind
from orchestrator.policies import (
    MEMORY,
    WHOLE,
    Fault,
    Refused,
    UserError,
    bad_sources,
    budgets,
    num_workers,
    versions,
)
from workers.protocol import Source

_TWICE = "; seen twice, so it is taken for a bug"
#: Share of ``read_s`` after which keepers are read again, at first, while one of them restarts.
_READ_AGAIN = 0.1
#: Kinds of fault whose reason only the processes themselves can show.
_UNEXPLAINED = frozenset({FaultKind.HANG, FaultKind.UNDECIDED})
#: Rule and verdict that follow from the kind of a fault. A lost node has none: it may be cut off.
_FOUND: Final[Mapping[FaultKind, tuple[str, str]]] = {
    FaultKind.CRASH: ("exited", FaultKind.DEAD.value),
    FaultKind.OUT_OF_MEMORY: ("exited", FaultKind.DEAD.value),
    FaultKind.NOT_FINITE: ("checked", FaultKind.NOT_FINITE.value),
    FaultKind.DIVERGED: ("compared", FaultKind.DIVERGED.value),
    FaultKind.CORRUPT: ("computed_again", FaultKind.CORRUPT.value),
    FaultKind.UNDECIDED: ("", FaultKind.UNDECIDED.value),
    FaultKind.PEER_LOST: ("", FaultKind.UNDECIDED.value),
}


def begin_fence(transition: Transition, failed: AttemptFailed) -> None:
    """Make a fault the cause of the attempt's end, and fence the members."""
    run = transition.run
    run.cause, run.also = cause_of(failed, transition.now_s), ()
    _fence(transition)
    if not failed.kind.is_planned:
        _collect_evidence(transition, is_awaited=failed.kind in _UNEXPLAINED)
    if failed.kind is FaultKind.UNDECIDED or run.network.suspects:
        search.begin_if_nameless(transition)
    advance(transition)


def add_to_cause(transition: Transition, failed: AttemptFailed) -> None:
    """Make a fault the cause of the attempt's end if it explains more than the known cause."""
    run = transition.run
    kind, guilty, evidence = failed.kind, failed.guilty, failed.evidence
    cause = run.cause
    if cause is None or kind.weight > cause.kind.weight:
        # The fault counts as found when its first sign came.
        at_s = cause.at_s if cause else transition.now_s
        run.cause = cause_of(failed, at_s)
    elif kind is cause.kind:
        new = tuple(name for name in guilty if name not in cause.guilty)
        if new:
            run.cause = replace(cause, guilty=(*cause.guilty, *new))
        elif failed.says_why:
            run.cause = replace(cause, evidence=evidence)
    elif kind.weight == cause.kind.weight and (guilty or failed.places):
        known = {name for one in (cause, *run.also) for name in one.guilty}
        new = tuple(name for name in guilty if name not in known)
        # All ranks may raise the same.
        if new or all(one.kind is not kind for one in run.also):
            run.also += (replace(cause_of(failed, transition.now_s), guilty=new),)
    advance(transition)


def cause_of(failed: AttemptFailed, at_s: float) -> Cause:
    """Return a fault as a cause that was found at ``at_s``."""
    kind, guilty, evidence, _, rule, verdict, places = failed
    if not verdict:
        rule, verdict = _FOUND.get(kind, ("", ""))
    return Cause(kind, guilty, evidence, at_s, rule, verdict, places)


def _collect_evidence(transition: Transition, *, is_awaited: bool) -> None:
    """Collect evidence of the attempt; if ``is_awaited``, before anything is killed."""
    run = transition.run
    nodes = (run.fleet.nodes[number] for number, _ in run.attempt.placed)
    order = CollectEvidence(
        attempt=run.attempt.number,
        nodes=tuple(node.name for node in nodes if node.alive),
        is_awaited=is_awaited,
    )
    if is_awaited:
        transition.actions.insert(0, order)
    else:
        transition.actions.append(order)


def add_loss(transition: Transition, loss: IdleLoss) -> None:
    """Record a loss together with the fault that the run recovers from."""
    transition.run.also += (Cause(loss.kind, (), loss.evidence, transition.now_s),)


def report_loss(transition: Transition, loss: IdleLoss) -> None:
    """Record a loss that happened while the run waited."""
    fault = Cause(loss.kind, (), loss.evidence, transition.now_s)
    transition.report(fault, fenced_s=transition.now_s)


def _fence(transition: Transition) -> None:
    run = transition.run
    assert run.cause is not None
    transition.enter(Phase.FENCING, inf)
    expect_leaving(transition)
    run.down_since_s = min(run.down_since_s, transition.now_s)
    inside = members_inside(transition)
    if inside:
        transition.actions.append(
            FenceAttempt(
                attempt=run.attempt.number,
                workers=inside,
                reason=run.cause.evidence or run.cause.kind,
            )
        )
    run.reads.pending = 0
    if run.attempt.num_inside:
        # Read while the members leave: often the answer is final.
        read(transition)


def _inside(transition: Transition) -> list[Worker]:
    """Return the members that are still in the attempt, in rank order."""
    run = transition.run
    workers = run.fleet.workers
    return [workers[number] for number in _numbers_inside(transition)]


def _numbers_inside(transition: Transition) -> Sequence[int]:
    attempt = transition.run.attempt
    if attempt.num_inside == len(attempt.members):
        return attempt.members
    inside = attempt.inside.to_dict()
    return [number for number in attempt.members if number in inside]


def members_inside(transition: Transition) -> tuple[str, ...]:
    """Return the members that are still in the attempt and not killed, in rank order."""
    numbers = _numbers_inside(transition)
    dying = dict(transition.run.fleet.workers.where(is_dying))
    return tuple(map(worker_name, (n for n in numbers if n not in dying) if dying else numbers))


def read(transition: Transition) -> None:
    """Ask keepers and storage for the version to resume from."""
    run = transition.run
    run.reads.num += 1
    run.reads.pending += 1
    run.reads.seen = False
    unread = reach.unreached(transition)
    if unread != run.network.unread:
        # Pending answers exclude other nodes than those that are unreached now.
        run.reads.bad_from = run.reads.num
        run.network = run.network._replace(unread=unread)
    transition.actions.append(
        ReadCommitted(
            attempt=run.attempt.number,
            lineage=run.lineage,
            number=run.reads.num,
            bad=run.bad,
            unreached=run.network.unread,
        )
    )


def memory_lost(transition: Transition, _: MemoryLost) -> None:
    """Distrust answers from memory to reads that began before the loss."""
    run = transition.run
    run.reads.memory_from = run.reads.num + 1
    if run.committed_in_memory:
        run.reads.seen = False
    if run.attempt.num_inside:
        # Read early, as in ``_fence``.
        read(transition)


def memory_lost_waiting(transition: Transition, lost: MemoryLost) -> None:
    """Read again if the version to resume from was only in memory: nothing has started yet."""
    run = transition.run
    memory_lost(transition, lost)
    if run.committed_in_memory and run.committed[0] in bad_sources.in_storage(run.bad, run.lineage):
        _read_again(transition)


def _read_again(transition: Transition) -> None:
    transition.enter(Phase.READING, transition.now_s + transition.rules.bounds.read_s)


def leave_out(
    transition: Transition, damaged: tuple[Source, ...], unread: tuple[Source, ...] = ()
) -> bool:
    """Exclude sources that are damaged or failed in two attempts; return whether any is new."""
    if not damaged and not unread:
        return False
    run = transition.run
    run.attempt.unread += tuple(source for source in unread if source not in run.attempt.unread)
    again = (source for source in unread if source in run.unread_before)
    new = tuple(source for source in dict.fromkeys((*damaged, *again)) if source not in run.bad)
    if new:
        run.bad += new
        # Pending reads do not exclude these.
        run.reads.bad_from = run.reads.num + 1
        run.reads.seen = False
    return bool(new)


def heard_late(transition: Transition, event: WorkerFormed | WorkerLeft) -> None:
    """Exclude the sources that a worker found bad, although it has already left the attempt."""
    if event.attempt == transition.run.attempt.number:
        _leave_out_of(transition, event)
        advance(transition)


def heard_late_waiting(transition: Transition, event: WorkerFormed | WorkerLeft) -> None:
    """Exclude them and read again: the version that was read may be one of them.

    Read again, too, if a member that was given up finished a newer step before it left.
    """
    run = transition.run
    if event.attempt != run.attempt.number:
        return
    is_newer = isinstance(event, WorkerLeft) and event.step > run.committed[0]
    if _leave_out_of(transition, event) or is_newer:
        _read_again(transition)
        run.reads.final_from = run.reads.num + 1
        advance(transition)


def _leave_out_of(transition: Transition, event: WorkerFormed | WorkerLeft) -> bool:
    unread = event.unread if isinstance(event, WorkerLeft) else ()
    return leave_out(transition, event.damaged, unread)


def advance(transition: Transition) -> None:
    """Continue a recovery once all members are out and the version to resume from is known."""
    transition.follow(RecoveryAdvanced())


def read_once_all_left(transition: Transition, advanced: RecoveryAdvanced) -> None:
    """Begin the final read when the last member has left."""
    run = transition.run
    if run.attempt.num_inside:
        return
    _read_again(transition)
    run.attempt.fenced_s = transition.now_s
    run.reads.final_from = run.reads.num + 1
    if not run.attempt.killed:
        search.begin_if_nameless(transition)
    decide_once_read(transition, advanced)


def decide_once_read(transition: Transition, _: RecoveryAdvanced) -> None:
    """Decide once the newest commit and the fault are known."""
    run = transition.run
    if _known_is_final(transition):
        if search.is_awaited(transition):
            run.deadline_s = run.network.until_s
        else:
            decide(transition)
    elif run.reads.pending == 0 or run.reads.num < max(run.reads.memory_from, run.reads.bad_from):
        read(transition)


def _known_is_final(transition: Transition) -> bool:
    """Return whether no commit of the fenced attempt can be newer than the known one.

    A commit of step s needs every rank to have completed s. So the least step that a member had
    completed when it left is an upper bound. If the known commit is older than that bound, or no
    member reported a step, only a read that was sent after the fence is final. After an attempt
    that never trained the run always reads, because what it failed to load may be damaged. A
    version in memory can still be lost later: then loading it fails and the next attempt reads
    again.
    """
    run = transition.run
    if run.reads.seen and run.reads.num - run.reads.pending >= run.reads.final_from:
        return True
    # If a link is lost, an earlier answer may rely on a node behind it.
    reported = run.attempt.stepped and not run.committed_in_memory and not run.network.found
    if not (run.reads.seen or reported) or run.attempt.left_step < 0:
        return False
    every = transition.rules.checkpoint_every
    if (
        run.attempt.yield_asked
        or run.committed[0] % every
        or run.attempt.left_step >= transition.rules.total_steps
    ):
        # A yield commits at any step, and the last step is always committed.
        every = 1
    return run.committed[0] >= run.attempt.left_step - run.attempt.left_step % every


def late_read(transition: Transition, event: CommittedRead) -> None:
    """Take an answer that comes while the run waits, if its version is newer than the known one.

    The keeper was back late, and nothing has started yet.
    """
    run = transition.run
    number = event.number or run.reads.num
    knows_all = number >= max(run.reads.bad_from, run.reads.memory_from)
    is_newer = knows_all and (event.step, event.committed_by) > run.committed
    if is_newer and _is_awaited(transition, event):
        _read_again(transition)
        committed_read(transition, event)


def committed_read(transition: Transition, event: CommittedRead) -> None:
    """Take the answer to a read, unless the answer to a newer read was taken."""
    run = transition.run
    number = event.number or run.reads.num
    if not _is_awaited(transition, event):
        return
    run.reads.pending = run.reads.num - number
    is_older = (event.step, event.committed_by) < run.committed or event.step < run.stored
    if is_older and number < run.reads.stored_from:
        # The known commit was reported after this read was sent, so the answer may miss it.
        run.reads.seen = False
        advance(transition)
        return
    # Take it even if it is older than the known one: a damaged version is skipped, and memory can
    # be lost.
    run.committed = (event.step, event.committed_by)
    run.committed_in_memory = event.source == MEMORY
    read_from = run.reads.bad_from
    if run.committed_in_memory:
        read_from = max(read_from, run.reads.memory_from)
    run.reads.seen = number >= read_from
    run.lost = event.lost
    if event.stored >= 0:
        damaged = {*event.damaged, *bad_sources.in_storage(run.bad, run.lineage)}
        stored = versions.newest_stored(run.stored, event.stored, damaged)
        if stored > run.stored:
            # Pending reads may have looked before it was written.
            run.reads.stored_from = run.reads.num + 1
        run.stored = stored
    if _may_come_back(transition, event) or _is_behind_storage(transition, event):
        run.reads.seen = False
        if not run.attempt.num_inside and not run.reads.pending:
            read_s = transition.rules.bounds.read_s
            is_early = transition.now_s < run.attempt.fenced_s + read_s
            run.deadline_s = transition.now_s + (_READ_AGAIN if is_early else 1.0) * read_s
            return
    advance(transition)


def _is_awaited(transition: Transition, event: CommittedRead) -> bool:
    reads = transition.run.reads
    number = event.number or reads.num
    is_newest = reads.num - reads.pending < number <= reads.num
    return is_newest and event.attempt == transition.run.attempt.number


def _may_come_back(transition: Transition, event: CommittedRead) -> bool:
    """Return whether to wait for a keeper that may hold a newer version.

    It restarts in about a second and takes over the memory that living workers kept. Waiting pays
    if the answer is older than the version that the attempt started from, or if it is in storage
    and older than the last step. If the keeper stays away, the run resumes from the answer.
    """
    run = transition.run
    is_stored = event.source != "memory" and event.step < run.attempt.step
    is_older = is_stored or event.step < run.attempt.committed_at_start[0]
    patience_end_s = run.attempt.fenced_s + transition.rules.bounds.read_s
    is_early = run.attempt.num_inside or transition.now_s < patience_end_s
    return bool(event.returning and is_older and is_early)


def _is_behind_storage(transition: Transition, event: CommittedRead) -> bool:
    """Return whether to wait for storage: only memory answered, with an older step."""
    run = transition.run
    patience_end_s = run.attempt.fenced_s + transition.rules.bounds.capacity_s
    is_early = run.attempt.num_inside or transition.now_s < patience_end_s
    return bool(event.stored < 0 and event.step < run.stored and is_early)


def expect_leaving(transition: Transition) -> None:
    """Set the time by which the members that are fenced now must have left."""
    run = transition.run
    run.attempt.leave_by_s = transition.now_s + transition.rules.bounds.fence_s
    run.deadline_s = run.attempt.leave_by_s


def fence_bound(transition: Transition, _: BoundReached) -> None:
    """Kill the members that did not leave in time; stop waiting for those that cannot be killed.

    A member that still computes gets one more usual step to leave, which is longer than a
    micro-batch. Killing it would cost more: a new process takes seconds to start and has to repeat
    the work.
    """
    run = transition.run
    at_work_until_s = run.attempt.leave_by_s + run.step_s
    run.deadline_s = transition.now_s + transition.rules.bounds.kill_s
    for rank, number in enumerate(run.attempt.members):
        if number not in run.attempt.inside:
            continue
        worker = run.fleet.workers[number]
        is_at_work = number in run.attempt.at_work and transition.now_s < at_work_until_s
        if worker.status is WorkerStatus.READY and is_at_work:
            run.deadline_s = min(run.deadline_s, at_work_until_s)
        elif worker.status is WorkerStatus.READY:
            node = run.fleet.nodes[worker.node].name
            run.attempt.killed += ((rank, worker.name, node),)
            fleet.kill_worker(
                transition, number, f"did not leave attempt {run.attempt.number} when fenced"
            )
        elif worker.deadline_s <= transition.now_s:
            give_up(transition, number)
        else:
            run.deadline_s = min(run.deadline_s, worker.deadline_s)
    advance(transition)


def give_up(transition: Transition, number: int) -> None:
    """Forget a killed process that was not reported as gone.

    If it still finishes a version and leaves, ``heard_late_waiting`` reads again. Its node gets no
    strike: the order or its answer may only be late.
    """
    fleet.drop_worker(transition, number)


def read_bound(transition: Transition, _: BoundReached) -> None:
    """Read again, or give up on storage."""
    run = transition.run
    if run.network.until_s <= transition.now_s:
        search.give_up(transition)
        if _known_is_final(transition):
            decide(transition)
            return
    waited_s = run.reads.pending * transition.rules.bounds.read_s
    if waited_s >= transition.rules.bounds.capacity_s:
        transition.finish(
            RunOutcome.FAILED,
            f"storage has not answered for {waited_s:.0f} s: check checkpoints/",
        )
        return
    read(transition)
    run.deadline_s = transition.now_s + transition.rules.bounds.read_s


def decide(transition: Transition) -> None:
    """End the run or start the next attempt, once the last one is fenced and read."""
    run = transition.run
    is_first_time = not run.attempt.judged
    run.attempt.judged = True
    if is_first_time:
        search.explain(transition)
        _refuse_layout(transition)
        transition.report_incident()
    transition.report_others()
    # The code after the last step raised. A run succeeds only if that code runs, too.
    if run.committed[0] >= transition.rules.total_steps and not run.attempt.raised:
        transition.finish(RunOutcome.COMPLETED, f"step {run.committed[0]} is committed")
        return
    if run.stop_reason:
        transition.finish(RunOutcome.STOPPED, run.stop_reason)
        return
    if is_first_time:
        problem = _dead_end(transition) or _charge(transition)
        if problem:
            transition.finish(RunOutcome.FAILED, problem)
            return
    if run.committed[0] < run.stored or (run.lost and not run.committed[0]):
        transition.finish(RunOutcome.FAILED, _lost(run.lost) if run.lost else _gone(run))
        return
    if is_first_time and run.attempt.refused is None:
        # Another layout need not wait: time does not change why this one was refused.
        run.hold_until_s = transition.now_s + budgets.pause_s(run.num_stuck)
    wait(transition)


def _lost(steps: tuple[int, ...]) -> str:
    names = ", ".join(f"step-{step:08d}" for step in steps)
    return (
        f"none of the committed checkpoints can be loaded ({names}), and memory holds nothing. "
        "Nothing was deleted: `everstep report` and `ucp verify` say what is wrong with them; put "
        "a sound copy of one back and run again, or name another run.directory to start from "
        "step 0"
    )


def _gone(run: MutableRunState) -> str:
    what = f"step {run.stored} was" if run.stored > 1 else "steps were"
    left = f"step {run.committed[0]} is the newest left" if run.committed[0] else "nothing is left"
    return (
        f"{what} committed to checkpoints/, and nothing as new can be loaded; {left}. A run "
        "never resumes from an older step than it committed: put the newest checkpoint back and "
        "run again, or name another run.directory to start from step 0"
    )


def _refuse_layout(transition: Transition) -> None:
    """Treat an exception in the first step of a layout that never trained as its refusal.

    Other layouts have trained in this run, so the script works. If one of those raised the same at
    the same step, the script is at fault. So it is if all workers are there and cannot train in
    another layout: the run would wait for nothing.
    """
    run = transition.run
    layout, cause = run.attempt.layout, run.cause
    bug = budgets.user_bug(run.attempt.raised, run.raised_before)
    if layout is None or cause is None or not run.fits or bug is None or bug.is_of_all:
        return
    raised_by = [layout, *(one.layout for one in run.raised_before if bug.is_same(one))]
    if any(Refused(one, WHOLE, "").rules_out(each) for one in raised_by for each in run.fits):
        return
    refused = Refused(layout, WHOLE, f"its first step raised {bug.error}")
    before, run.refused = run.refused, (*run.refused, refused)
    num_there = num_workers(reach.offered(transition, leaving=True))
    if num_there >= transition.rules.max_workers and not capacity(transition):
        run.refused = before
        return
    run.attempt.refused, run.attempt.raised = refused, ()
    found = Cause(FaultKind.LAYOUT, (), f"{layout}: {refused.why}", cause.at_s)
    if cause.kind is FaultKind.EXCEPTION:
        run.cause = found
    else:
        # Another fault ended the attempt meanwhile.
        run.also += (found,)


def _charge(transition: Transition) -> str:
    """Charge the attempt to its budget; return why the run must fail, "" if it need not."""
    run, rules = transition.run, transition.rules.budgets
    bug = budgets.user_bug(run.attempt.raised, run.raised_before)
    if bug is not None and bug.is_of_all:
        return bug.message
    if bug is not None:
        return (
            f"{bug.traceback.rstrip()}\n\nrank {bug.rank} raised at step {bug.step}: {bug.error} "
            f"(attempt {run.attempt.number}{'' if bug.is_proven else _TWICE})"
        )
    # The last 64 are enough: an error that repeats comes back at the same step in the next
    # attempts.
    run.raised_before = (*run.raised_before, *run.attempt.raised)[-64:]
    kind = run.cause.kind if run.cause else FaultKind.PEER_LOST
    if _is_free(run, kind):
        return ""
    fault_class = _class_of(run, kind)
    if kind.budget is not None:
        run.faults = budgets.charge(
            run.faults, Fault(at_s=transition.now_s, fault_class=fault_class), rules
        )
    progressed = run.committed[0] > run.attempt.committed_at_start[0]
    run.num_stuck = 0 if progressed else run.num_stuck + 1
    # If no step was ever completed, the program is more likely at fault than the network.
    has_trained = run.step_s > 0 or run.committed[0] > 0
    is_unexplained = kind is FaultKind.PEER_LOST and has_trained
    run.num_unexplained = 0 if progressed else run.num_unexplained + is_unexplained
    if run.attempt.stepped and fault_class is not FaultClass.UNDECIDED:
        run.num_undecided = 0
    elif fault_class is FaultClass.UNDECIDED and search.is_program(transition):
        # A program hangs at the same step again; an unstable network may fail at any step.
        step = max(run.attempt.step, run.attempt.left_step)
        is_again = step == run.undecided_step and not progressed
        run.num_undecided = run.num_undecided + 1 if is_again else 1
        run.undecided_step = step
    problem = budgets.overspent(
        run.faults,
        num_stuck=run.num_stuck,
        num_unexplained=run.num_unexplained,
        num_undecided=run.num_undecided,
        rules=rules,
    )
    if not problem or run.cause is None:
        return problem
    lines = (f"the last failure: {run.cause.kind}: {run.cause.evidence}", problem)
    shown = [error.traceback.rstrip() for error in run.attempt.raised[:1]]
    return "\n".join((*shown, *lines))


def _is_free(run: MutableRunState, kind: FaultKind) -> bool:
    """Return whether a failed attempt is charged to no budget."""
    if kind in (FaultKind.RESUME, FaultKind.LINK):
        # A resumed run was charged when it failed. For a lost link the run waits, however often.
        return True
    # No worker failed. This cannot repeat for ever: the next attempt has fewer sources or layouts.
    if kind is FaultKind.UNLOADABLE:
        return len(run.bad) > run.attempt.num_bad_at_start
    is_refusal = kind in (FaultKind.LAYOUT, FaultKind.DEVICE_MEMORY)
    is_short = any(number == run.attempt.number for number, _ in run.short)
    return is_refusal and (run.attempt.refused is not None or is_short)


def _dead_end(transition: Transition) -> str:
    """Return why the run must fail after a refusal; "" if another layout is worth an attempt.

    A run that has not trained yet fails at once if the configuration demands the refused layout.
    """
    run, rules = transition.run, transition.rules
    refused = run.attempt.refused
    if refused is None:
        return ""
    full, left = rules.full_layout(), rules.full_layout(run.refused)
    assert full is not None
    if refused.axis == WHOLE:
        is_asked_for = False
    elif refused.axis:
        wish = getattr(rules.layout, refused.axis)
        is_asked_for = getattr(refused.layout, refused.axis) == wish
    else:
        is_asked_for = refused.layout.world_size >= full.world_size
    if left is not None and (run.fits or not is_asked_for):
        return ""
    nearest = f"; the nearest layout that was not is {left}" if left else ""
    return f"{refused.layout} was refused: {refused.why}{nearest}"


def _class_of(run: MutableRunState, kind: FaultKind) -> FaultClass:
    """Return the budget that a failed attempt is charged to."""
    if kind is FaultKind.UNDECIDED and run.attempt.is_program:
        return FaultClass.PROGRAM
    if kind is FaultKind.EXCEPTION and all(error.is_of_data for error in run.attempt.raised):
        return FaultClass.INFRASTRUCTURE
    return kind.budget or FaultClass.INFRASTRUCTURE


def note_raised(transition: Transition, error: UserError) -> None:
    """Keep an exception of the current attempt for the decision at its end."""
    run = transition.run
    if error not in run.attempt.raised:
        run.attempt.raised = (*run.attempt.raised, error)


def form_bound(transition: Transition, _: BoundReached) -> None:
    """Probe the network, or fence the members because some do not form."""
    look_s = search.form_deadline_s(transition)
    if look_s > transition.now_s:
        search.begin(transition)
        transition.run.deadline_s = look_s
        return
    bound_s = transition.rules.bounds.form_bound_s(transition.run.num_stuck)
    run = transition.run
    unformed = (n for n in run.attempt.members if run.attempt.inside.get(n) is False)
    late = [run.fleet.workers[number].name for number in unformed]
    _fail_late(transition, bound_s, late, "had not formed")


def yield_bound(transition: Transition, _: BoundReached) -> None:
    """Fence the members because some do not leave as asked."""
    late = [w.name for w in _inside(transition)]
    _fail_late(transition, transition.rules.bounds.yield_s, late, "had not yielded")


def _fail_late(transition: Transition, bound_s: float, late: list[str], what: str) -> None:
    evidence = f"after {bound_s:g} s {', '.join(late[:8])} {what}"
    transition.follow(AttemptFailed(FaultKind.UNDECIDED, (), evidence))
