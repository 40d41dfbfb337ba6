"""Events of the current attempt. Events of another attempt are stale and change nothing."""

from collections.abc import Collection
from math import inf

from orchestrator.core.consequences import AttemptFailed, KeepersOutdated
from orchestrator.core.events import (
    AttemptStalled,
    CheckpointCommitted,
    HangFound,
    Leaving,
    MembersAtWork,
    NotFiniteFound,
    StepCompleted,
    Suspected,
    WorkerFormed,
    WorkerLeft,
    WorkerRaised,
)
from orchestrator.core.handlers import fleet, planned, recovery, slow
from orchestrator.core.network import search
from orchestrator.core.state import MutableRunState, Phase, Worker, worker_name, worker_number
from orchestrator.core.transition import Transition
from orchestrator.fault_kinds import FaultKind
from orchestrator.policies import STORAGE, Refused, UserError
from ucp_core.layout import ParallelLayout
from ucp_core.lineage import counts
from workers.protocol import DEVICE_MEMORY

#: Weight of the newest step in the smoothed duration, an average over about ten steps.
_STEP_WEIGHT = 0.1
#: The weight while a worker is slow: its cost must show within a few steps.
_SLOWED_WEIGHT = 0.5
#: Smaller relative changes of a layout's step time are ignored: they change no decision.
_STEP_NEWS = 0.05


def worker_formed(transition: Transition, event: WorkerFormed) -> None:
    """Note that members have formed, and which sources they loaded from."""
    found = _members(transition, event)
    if not found:
        recovery.heard_late(transition, event)
        return
    run = transition.run
    formed = [number for number in found if not run.attempt.inside[number]]
    if not formed:
        return
    if recovery.leave_out(transition, event.damaged):
        transition.follow(KeepersOutdated())
    if not run.attempt.from_storage and any(kind == STORAGE for kind, _ in event.sources):
        run.attempt.from_storage = True
        run.faults_seen = run.faults_seen.and_load(run.cause.kind if run.cause else None)
    run.attempt.inside = run.attempt.inside.update(dict.fromkeys(formed, True))
    run.attempt.num_unformed -= len(formed)


def worker_formed_forming(transition: Transition, event: WorkerFormed) -> None:
    """Note that members have formed; once all have, training begins."""
    worker_formed(transition, event)
    if transition.run.attempt.num_unformed == 0:
        _run(transition)


def step_completed(transition: Transition, event: StepCompleted) -> None:
    """Note a completed step, and end keepers that only hold versions older than storage."""
    run = transition.run
    is_first, stored = not run.attempt.stepped, run.stored
    step_completed_fencing(transition, event)
    if run.stored > stored:
        fleet.end_needless_keepers(transition)
    if is_first and run.attempt.stepped and run.down_since_s != inf:
        run.pause_s = event.at_s - run.down_since_s
        run.down_since_s = inf


def step_completed_forming(transition: Transition, event: StepCompleted) -> None:
    """Note the step. It proves that every member has formed."""
    if _is_new_step(transition, event):
        _run(transition)
        step_completed(transition, event)


def step_completed_fencing(transition: Transition, event: StepCompleted) -> None:
    """Note a step that was completed before its members saw the fence."""
    run = transition.run
    if not _is_new_step(transition, event):
        return
    run.attempt.step = event.step
    if 0 < run.stop_at[0] <= event.step:
        run.stop_reason = run.stop_reason or run.stop_at[1]
    if event.stored > run.stored and _counts(run, event.stored):
        # The run must not resume from an older version, so it reads storage before it loads one.
        run.stored, run.reads.stored_from = event.stored, run.reads.num + 1
    if not run.attempt.stepped:
        run.attempt.stepped = True
        run.trained = max(run.trained, run.attempt.number)
        if transition.rules.standby_per_node:
            run.fleet.short = tuple(range(len(run.fleet.node_ids)))
        run.attempt.trained_since_s = event.at_s
        assert run.attempt.layout is not None
        run.fits = tuple(dict.fromkeys((*run.fits, run.attempt.layout)))
        run.step_s = dict(run.steps).get(run.attempt.layout, event.step_s)
    else:
        _learn(run, event.step_s)


def _learn(run: MutableRunState, step_s: float) -> None:
    """Note how long a step took in the attempt's layout; its first step is not typical."""
    layout = run.attempt.layout
    assert layout is not None
    steps = dict(run.steps)
    known_s = steps.get(layout, 0.0)
    is_slowed = any(one.times for one in run.attempt.suspects)
    weight = _SLOWED_WEIGHT if is_slowed else _STEP_WEIGHT
    run.step_s = run.step_s + weight * (step_s - run.step_s) if known_s else step_s
    if not is_slowed and abs(run.step_s - known_s) > _STEP_NEWS * known_s:
        steps[layout] = run.step_s
        run.steps = tuple(steps.items())


def _is_new_step(transition: Transition, event: StepCompleted) -> bool:
    attempt = transition.run.attempt
    return event.attempt == attempt.number and event.step > attempt.step


def _run(transition: Transition) -> None:
    run = transition.run
    transition.enter(Phase.TRAINING, inf)
    # Each forming halves the weight of an unusually long one.
    run.form_s = max(transition.now_s - run.attempt.started_s, run.form_s / 2)
    search.forget(transition)


def checkpoint_committed(transition: Transition, event: CheckpointCommitted) -> None:
    """Note a commit of the current attempt; keepers store even while no attempt trains."""
    if event.attempt == transition.run.attempt.number:
        _know(transition.run, event.step, in_memory=False)


def checkpoint_committed_training(transition: Transition, event: CheckpointCommitted) -> None:
    """Note the commit, and end keepers that only hold versions older than storage."""
    if event.attempt == transition.run.attempt.number:
        checkpoint_committed(transition, event)
        fleet.end_needless_keepers(transition)


def worker_left(transition: Transition, event: WorkerLeft) -> None:
    """Fence the others if a member left unrequested; let them finish if the script has ended."""
    if not _leaves(transition, event):
        return
    if event.how is Leaving.COMPLETED:
        planned.complete(transition, event.step, event.detail)
    elif event.how is Leaving.YIELDED:
        evidence = f"{event.worker} left because no controller had called it for too long"
        transition.follow(AttemptFailed(FaultKind.CONTROLLER_RESTART, (), evidence))
    else:
        _lost_a_peer(transition, event)


def worker_left_yielding(transition: Transition, event: WorkerLeft) -> None:
    """Wait for the others: all were asked to leave at the same step."""
    if not _leaves(transition, event):
        return
    if event.how is Leaving.COMPLETED:
        planned.member_completed(transition, event.detail)
    elif event.how is Leaving.YIELDED:
        planned.member_yielded(transition, event.step)
    else:
        _lost_a_peer(transition, event)


def worker_left_fencing(transition: Transition, event: WorkerLeft) -> None:
    """Continue the recovery once the last member is out."""
    if _leaves(transition, event):
        recovery.advance(transition)


def _leaves(transition: Transition, event: WorkerLeft) -> bool:
    """Note that members left and what they report; return whether the caller must act on it."""
    numbers = _members(transition, event)
    if not numbers:
        recovery.heard_late(transition, event)
        return False
    run = transition.run
    number, *_ = numbers
    worker = run.fleet.workers[number]
    _leave(transition, numbers, event.step)
    if event.unreached:
        search.suspect(transition, (run.fleet.nodes[worker.node].name, event.unreached))
    if event.how is Leaving.UNLOADABLE:
        recovery.leave_out(transition, event.damaged, event.unread)
        why = event.detail or "another rank could not"
        evidence = f"{event.worker} could not load step {event.step}: {why}"
        # A rank that found nothing bad may leave first.
        failed = AttemptFailed(FaultKind.UNLOADABLE, (), evidence, says_why=bool(event.detail))
        transition.follow(failed)
        return False
    if event.how in (Leaving.YIELDED, Leaving.COMPLETED):
        # A member yields or completes only after it has seen the commit.
        _know(run, event.step, in_memory=event.how is Leaving.YIELDED)
    if event.told:
        # Something outside the run ordered its process to end. It has committed, so nothing is
        # lost.
        fleet.kill_worker(transition, number, event.told)
        transition.follow(AttemptFailed(FaultKind.PREEMPTION, (event.worker,), event.told))
        return False
    return True


def _lost_a_peer(transition: Transition, event: WorkerLeft) -> None:
    # A failed collective shows that a peer is gone, but not which one.
    evidence = f"{event.worker} left: {event.detail}"
    transition.follow(AttemptFailed(FaultKind.PEER_LOST, (), evidence))


def worker_raised(transition: Transition, event: WorkerRaised) -> None:
    """Keep the error for the decision, and fence the others."""
    found = _member(transition, event.attempt, event.worker)
    if found is None:
        return
    number, worker = found
    attempt = transition.run.attempt
    assert attempt.layout is not None
    rank = attempt.members.index(number)
    _leave(transition, [number], event.step - 1)
    if event.refuses and _refuse(transition, event):
        return
    error = UserError(rank, event.step, event.error, event.traceback, attempt.layout)
    if error.is_of_copies:
        if event.sound_step < 0:
            _end_diverged(transition, error, event.ranks)
        else:
            _end_corrupt(transition, error, event)
        return
    recovery.note_raised(transition, error)
    if error.is_not_finite:
        transition.follow(_of_ranks(transition, FaultKind.NOT_FINITE, error.message, event.ranks))
    else:
        kind = FaultKind.DEVICE_MEMORY if event.refuses == DEVICE_MEMORY else FaultKind.EXCEPTION
        guilty = () if error.is_of_all else (worker.name,)
        transition.follow(AttemptFailed(kind, guilty, event.error))


def _refuse(transition: Transition, event: WorkerRaised) -> bool:
    """Note that the layout cannot train; return False if a layout that trained disproves it."""
    run = transition.run
    layout = run.attempt.layout
    assert layout is not None
    out_of_memory = event.refuses == DEVICE_MEMORY
    why = event.error.partition(": ")[2] or event.error
    refused = Refused(layout, "" if out_of_memory else event.refuses, why)
    if any(refused.rules_out(each) for each in run.fits):
        return False
    if out_of_memory and _is_short_first(run, layout):
        why = f"{why}; it is tried once more"
    elif run.attempt.refused is None:
        run.attempt.refused = refused
        run.refused = (*run.refused, refused)
    kind = FaultKind.DEVICE_MEMORY if out_of_memory else FaultKind.LAYOUT
    transition.follow(AttemptFailed(kind, (), f"{layout}: {why}"))
    return True


def _is_short_first(run: MutableRunState, layout: ParallelLayout) -> bool:
    """Return whether this is the first attempt in the layout that ran out of device memory.

    Connections of the previous attempt may have filled the device.
    """
    if layout not in (one for _, one in run.short):
        run.short = (*run.short, (run.attempt.number, layout))
    return (run.attempt.number, layout) in run.short


def _leave(transition: Transition, numbers: Collection[int], step: int) -> None:
    run = transition.run
    fleet.leave(transition, numbers)
    step = max(step, 0)
    run.attempt.left_step = step if run.attempt.left_step < 0 else min(run.attempt.left_step, step)


def not_finite_found(transition: Transition, event: NotFiniteFound) -> None:
    """Record a number that is not finite, once: a restarted controller gets the report again."""
    attempt = transition.run.attempt
    if event.attempt == attempt.number and event.number > attempt.num_noted:
        attempt.num_noted = event.number
        failed = _of_ranks(transition, FaultKind.NOT_FINITE, event.evidence, event.ranks)
        transition.report(recovery.cause_of(failed, transition.now_s), fenced_s=transition.now_s)


def _end_diverged(transition: Transition, error: UserError, ranks: tuple[int, ...]) -> None:
    """Return to the last version with equal copies; with only two copies, blame no rank."""
    run = transition.run
    failed = _of_ranks(transition, FaultKind.DIVERGED, error.message, ranks)
    layout = run.attempt.layout
    if layout is not None and layout.dp_replicate > 2:  # noqa: PLR2004  a majority exists
        failed = failed._replace(guilty=tuple(worker for _, worker, _ in failed.places))
        if _is_news(run, FaultKind.DIVERGED):
            for rank in ranks:
                fleet.strike(transition, run.attempt.nodes[rank])
    transition.follow(failed)


def _end_corrupt(transition: Transition, error: UserError, event: WorkerRaised) -> None:
    """Return to the last version that was checked, and leave the machine that computed wrong.

    If all ranks are named, it is not known which of them did, and the run leaves no node.
    """
    run = transition.run
    failed = _of_ranks(transition, FaultKind.CORRUPT, error.message, event.ranks)
    is_known = len(event.ranks) < len(run.attempt.members)
    if is_known:
        failed = failed._replace(guilty=tuple(worker for _, worker, _ in failed.places))
    if _is_news(run, FaultKind.CORRUPT):
        _go_back(run, event.sound_step)
        for rank in event.ranks if is_known else ():
            _leave_node(transition, run.attempt.members[rank], failed.evidence)
    transition.follow(failed)


def _leave_node(transition: Transition, guilty: int, why: str) -> None:
    """Avoid a node and kill its workers, or only the guilty one if the run needs the others."""
    run = transition.run
    number = run.attempt.nodes[run.attempt.members.index(guilty)]
    node = run.fleet.nodes[number]
    fleet.strike(transition, number, is_certain=True)
    can_leave = run.fleet.num_usable - node.usable >= transition.rules.min_workers
    for worker in node.workers:
        if can_leave or worker == guilty:
            fleet.kill_worker(transition, worker, why)


def _is_news(run: MutableRunState, kind: FaultKind) -> bool:
    """Return whether no other rank reported it yet: all of them raise the same error."""
    known = (run.cause, *run.also) if run.phase is Phase.FENCING else ()
    return all(one is None or one.kind is not kind for one in known)


def _go_back(run: MutableRunState, step: int) -> None:
    """Discard versions after ``step``, as if an attempt had resumed there."""
    following = run.attempt.number + 1
    run.lineage, run.trained = (*run.lineage, (following, step)), following
    run.stored = run.stored if run.stored <= step else 0
    # Only a read that begins now shows what is left.
    run.committed, run.committed_in_memory = (0, 0), True
    run.reads.pending, run.reads.seen = 0, False


def _of_ranks(
    transition: Transition, kind: FaultKind, text: str, ranks: tuple[int, ...]
) -> AttemptFailed:
    """Return a fault that names the workers and nodes of the ranks that it comes from."""
    attempt, nodes = transition.run.attempt, transition.run.fleet.nodes
    # A worker is named by its number, because its process may be gone.
    places = tuple(
        (rank, worker_name(attempt.members[rank]), nodes[attempt.nodes[rank]].name)
        for rank in ranks
        if rank < len(attempt.members)
    )
    named = ", ".join(f"rank {rank} is {worker} on {node}" for rank, worker, node in places[:8])
    evidence = f"{text} ({named})" if named else text
    return AttemptFailed(kind, (), evidence, places=places)


def hang_found(transition: Transition, event: HangFound) -> None:
    """Kill the workers that are proven guilty and fence the others; if none is, blame none."""
    if event.attempt == transition.run.attempt.number:
        _end_hang(transition, event, _kill_guilty(transition, event))


def hang_found_fencing(transition: Transition, event: HangFound) -> None:
    """Kill the workers that are proven guilty: the hang may explain why the attempt ended."""
    if event.attempt == transition.run.attempt.number:
        guilty = _kill_guilty(transition, event)
        if guilty:
            _end_hang(transition, event, guilty)


def _kill_guilty(transition: Transition, event: HangFound) -> tuple[str, ...]:
    guilty: list[str] = []
    for name in event.guilty:
        found = _member(transition, event.attempt, name)
        if found is not None:
            number, worker = found
            guilty.append(name)
            fleet.kill_worker(transition, number, f"hang: {event.evidence}")
            if name not in event.maybe_well:
                fleet.strike(transition, worker.node)
    return tuple(guilty)


def _end_hang(transition: Transition, event: HangFound, guilty: tuple[str, ...]) -> None:
    transition.run.attempt.is_program |= event.is_program
    kind = FaultKind.HANG if guilty else FaultKind.UNDECIDED
    failed = AttemptFailed(kind, guilty, event.evidence, rule=event.rule, verdict=event.verdict)
    transition.follow(failed)


def suspected(transition: Transition, event: Suspected) -> None:
    """Note the suspicions; ``planned`` decides whether to continue without a slow worker."""
    attempt = transition.run.attempt
    if event.attempt == attempt.number:
        before, attempt.suspects = attempt.suspects, event.suspects
        attempt.usual_step_s = event.usual_step_s
        if transition.run.phase is Phase.TRAINING:
            slow.keep_well(transition, before)


def attempt_stalled(transition: Transition, event: AttemptStalled) -> None:
    """Probe the network, which does not disturb training."""
    if event.attempt == transition.run.attempt.number:
        search.begin(transition)


def members_at_work(transition: Transition, event: MembersAtWork) -> None:
    """Note the members that compute and will leave late; one that stopped gets no more time."""
    run = transition.run
    found = (_member(transition, event.attempt, name) for name in event.workers)
    before, run.attempt.at_work = run.attempt.at_work, tuple(one[0] for one in found if one)
    if not set(before) <= set(run.attempt.at_work):
        run.deadline_s = min(run.deadline_s, run.attempt.leave_by_s)


def _know(run: MutableRunState, step: int, *, in_memory: bool) -> None:
    """Note a version of the current attempt if it is newer than the known one."""
    if not _counts(run, step):
        return
    version = (step, run.attempt.number)
    if not in_memory:
        run.stored = max(run.stored, step)
        if version >= run.committed:
            run.reads.stored_from = run.reads.num + 1
    if version > run.committed:
        run.committed = version
        run.committed_in_memory = in_memory


def _counts(run: MutableRunState, step: int) -> bool:
    """Return whether a version of the current attempt counts: the run may have gone back."""
    return counts(step=step, attempt=run.attempt.number, lineage=run.lineage)


def _members(transition: Transition, event: WorkerFormed | WorkerLeft) -> list[int]:
    """Return the event's members that are inside its attempt; none if it is not the current one."""
    attempt = transition.run.attempt
    if event.attempt != attempt.number:
        return []
    numbers = dict.fromkeys(map(worker_number, (event.worker, *event.others)))
    return attempt.inside.those_in(numbers)


def _member(transition: Transition, attempt: int, name: str) -> tuple[int, Worker] | None:
    """Return a worker that is inside ``attempt``; None if it is not, or the attempt is old."""
    if attempt != transition.run.attempt.number:
        return None
    found = fleet.find_worker(transition, name)
    return found if found is not None and found[0] in transition.run.attempt.inside else None
