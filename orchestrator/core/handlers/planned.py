"""Planned changes: growth, drains, shares, stops. All members leave together, so no step is lost.

The run asks members to leave at a step boundary. They agree on the step, commit it and report it;
the next attempt resumes from it without a read. The commit goes to storage if the run stops or has
to wait for capacity, and otherwise to memory.
"""

from math import inf

from orchestrator.core.actions import YieldAttempt
from orchestrator.core.consequences import AttemptFailed, EventFolded
from orchestrator.core.handlers import demand, fleet, formation, recovery, slow
from orchestrator.core.network import reach
from orchestrator.core.state import Cause, Node, Phase, RunOutcome
from orchestrator.core.transition import Transition
from orchestrator.fault_kinds import FaultKind
from orchestrator.policies import expected_step_s, growth, node_order, step_ratio
from ucp_core.layout import ParallelLayout
from ucp_core.numerics import counted

#: ``yielded_step`` when members left at different steps; no step is negative.
_DIFFER = -2


def settle_and_consider(transition: Transition, folded: EventFolded) -> None:
    """Request missing reservations and workers, then start a planned change if one is due."""
    demand.settle_training(transition, folded)
    if transition.run.surveying_until_s == inf:
        _consider(transition)


def _consider(transition: Transition) -> None:
    run = transition.run
    if run.stop_reason:
        yield_attempt(transition, FaultKind.STOP, run.stop_reason)
        return
    if not run.attempt.stepped:
        return
    if run.store_by_s != inf and _stores_for_controller(transition):
        return
    if len(run.attempt.members) > transition.max_workers:
        if run.most_workers == transition.max_workers:
            reason = f"the user set {counted(run.most_workers, 'worker')}"
            yield_attempt(transition, FaultKind.RESIZE, reason)
            return
        num = len(run.attempt.members) - transition.max_workers
        runs = ", ".join(run.sharing.given or run.sharing.runs)
        yield_attempt(transition, FaultKind.SHARE, f"giving {num} of its workers to {runs}")
        return
    # Members that leave commit to memory, which the next attempt cannot read without a keeper.
    is_served = not run.fleet.nodes.where(_lacks_keeper)
    if is_served and _leaves_slow_node(transition):
        return
    layout = reach.layout(transition)
    num_after = 0 if layout is None else layout.world_size
    if run.fleet.leaving and (
        _leaves_draining_nodes(transition, num_after) or slow.is_awaited(transition)
    ):
        return
    if is_served:
        _consider_change(transition, layout)


def _lacks_keeper(node: Node) -> bool:
    return node.keeper_by_s != inf


def _consider_change(transition: Transition, layout: ParallelLayout | None) -> None:
    """Grow, move to better capacity or a faster layout, or reorder the nodes, if it pays."""
    run = transition.run
    num_after = 0 if layout is None else layout.world_size
    if layout is not None and num_after > len(run.attempt.members):
        _consider_layout(transition, layout)
    elif len(run.fleet.offers) > 1 and run.fleet.num_usable > len(run.attempt.members):
        _consider_move(transition)
    elif layout is not None and run.steps and layout != run.attempt.layout:
        _consider_layout(transition, layout)
    elif layout is not None and run.network.slow and layout == run.attempt.layout:
        _consider_order(transition, layout)


def _leaves_slow_node(transition: Transition) -> bool:
    """Leave a slow worker's node once that pays; return whether members were asked to leave."""
    found = slow.consider(transition)
    if found is not None:
        yield_attempt(transition, FaultKind.SLOW, found.evidence, found.guilty, found.verdict)
    return found is not None


def _stores_for_controller(transition: Transition) -> bool:
    """Store the state before the controller's machine is taken; the run then trains again.

    The head of the cluster may go with it, and the whole cluster a minute later. Return whether the
    members were asked to leave.
    """
    run = transition.run
    store_at_s = run.store_by_s - transition.rules.bounds.drain_lead_s
    if transition.now_s >= store_at_s:
        yield_attempt(
            transition, FaultKind.DRAIN, "the controller's machine is taken: storing the state"
        )
        return True
    run.deadline_s = min(run.deadline_s, store_at_s)
    return False


def _leaves_draining_nodes(transition: Transition, num_after: int) -> bool:
    """Leave draining nodes when replacements are ready, and in any case before the deadline.

    If too few workers are left, the state goes to storage and the run waits. Nodes that the
    provider did not take in time are used again. Return whether the members were asked to leave.
    """
    run, lead_s = transition.run, transition.rules.bounds.drain_lead_s
    is_inside = run.attempt.inside.__contains__
    taken = run.fleet.nodes.where(_is_taken)
    draining = [node for _, node in taken if any(map(is_inside, node.workers))]
    is_enough = bool(num_after)
    if not is_enough:
        draining = [node for node in draining if transition.now_s < node.leave_by_s + lead_s]
    if not draining:
        return False
    leave_at_s = min(node.leave_by_s for node in draining) - lead_s
    is_replaced = is_enough and num_after >= len(run.attempt.members)
    if is_replaced or transition.now_s >= leave_at_s:
        names = ", ".join(
            f"{node.name[:8]} ({node.notice or 'its provider takes it'})"
            for node in sorted(draining, key=lambda node: node.name)
        )
        rest = "" if is_enough else "; the rest are too few and wait, with the state in storage"
        yield_attempt(transition, FaultKind.DRAIN, f"leaving node {names}{rest}")
        return True
    run.deadline_s = min(run.deadline_s, leave_at_s)
    return False


def _is_taken(node: Node) -> bool:
    return node.is_taken


def _consider_layout(transition: Transition, layout: ParallelLayout) -> None:
    """Let newcomers join, or change to a layout that was measured to be faster, once it pays."""
    now, rules = transition.run.attempt.layout, transition.layout_rules
    assert now is not None
    sizes, ratio = (now.world_size, layout.world_size), step_ratio(layout, now, rules)
    if layout.world_size > now.world_size:
        _change_if_it_pays(transition, FaultKind.GROWTH, *sizes, ratio)
        return
    now_s, then_s = expected_step_s(now, rules), expected_step_s(layout, rules)
    reason = f"a step of {now} takes {now_s:.3g} s, and of {layout} about {then_s:.3g} s"
    _change_if_it_pays(transition, FaultKind.MOVE, *sizes, ratio, reason)


def _change_if_it_pays(
    transition: Transition,
    kind: FaultKind,
    num_before: int,
    num_after: int,
    step_ratio: float,
    reason: str = "",
    verdict: str = "",
) -> None:
    run = transition.run
    num_alike = num_after if kind is FaultKind.GROWTH else num_before
    run.attempt.newcomer_since_s = min(run.attempt.newcomer_since_s, transition.now_s)
    decision = growth.decide(
        growth.GrowthFacts(
            now_s=transition.now_s,
            num_members=num_before,
            num_after=num_after,
            step_ratio=step_ratio,
            num_coming=min(run.fleet.num_starting, transition.max_workers - num_alike),
            waiting_since_s=run.attempt.newcomer_since_s,
            last_change_s=run.attempt.trained_since_s,
            step_s=run.step_s,
            num_steps_left=transition.rules.total_steps - run.attempt.step,
            pause_s=run.pause_s,
            next_fault_s=growth.next_fault_s(
                run.faults_seen,
                transition.now_s,
                run.attempt.num_nodes,
                transition.rules.growth,
            ),
        ),
        transition.rules.growth,
    )
    if decision.grow:
        yield_attempt(transition, kind, reason or decision.reason, verdict=verdict)
    else:
        run.deadline_s = min(run.deadline_s, decision.retry_at_s)


def _consider_move(transition: Transition) -> None:
    """Move members to capacity that the user prefers, once it pays."""
    run = transition.run
    members = run.attempt.members
    leaving = not reach.num_together(transition)
    layout = reach.layout(transition, leaving=leaving)
    if layout is None:
        return
    best = formation.best_workers(transition, layout, leaving=leaving)
    chosen, known = set(best), set(members)
    newcomers = [worker for worker in best if worker not in known]
    left = [worker for worker in members if worker not in chosen]
    if not newcomers or not left or len(best) < len(members):
        return
    before, after = (
        max(fleet.alternative_of(transition, run.fleet.workers[each].node) for each in workers)
        for workers in (left, newcomers)
    )
    if after < before:
        # Rate the move as growth from the members that stay, as if those that leave did not train.
        num_staying = len(members) - len(left)
        names = ", ".join(run.fleet.workers[worker].name for worker in left)
        reason = f"capacity that is preferred to that of {names} is back"
        ratio = num_staying / len(members)
        _change_if_it_pays(transition, FaultKind.MOVE, num_staying, len(members), ratio, reason)


def _consider_order(transition: Transition, layout: ParallelLayout) -> None:
    """Reorder the nodes so that no neighbours have a slow link, once it pays."""
    run = transition.run
    best = formation.best_workers(transition, layout, leaving=False)
    nodes = [run.fleet.nodes[run.fleet.workers[worker].node].name for worker in best]
    names = [run.fleet.nodes[number].name for number in run.attempt.nodes]
    if sorted(best) != sorted(run.attempt.members):
        return
    slow_links = [(a, b) for a, b, _ in run.network.slow if a and b]
    now, then = (
        node_order.cost([(name, 1) for name in dict.fromkeys(each)], slow=slow_links)[0]
        for each in (names, nodes)
    )
    if then < now:
        num, ratio = len(best), run.network.without_slow
        links = ", ".join(f"{a[:8]} to {b[:8]}" for a, b in slow_links)
        reason = f"in another order no neighbours have a slow link ({links})"
        _change_if_it_pays(
            transition, FaultKind.MOVE, num, num, ratio, reason, FaultKind.SLOW_LINK.value
        )


def yield_attempt(
    transition: Transition,
    kind: FaultKind,
    reason: str,
    guilty: tuple[str, ...] = (),
    verdict: str = "",
) -> None:
    """Ask the members to leave at the next step boundary."""
    run = transition.run
    run.cause = Cause(kind, guilty, reason, transition.now_s, verdict=verdict)
    transition.enter(Phase.YIELDING, yield_deadline_s(transition))
    run.attempt.yield_asked = True
    transition.actions.append(yield_order(transition))


def yield_order(transition: Transition) -> YieldAttempt:
    """Return the order to leave; the cause decides whether the commit goes to storage."""
    run = transition.run
    assert run.cause is not None, "a planned change has a cause"
    # Commit to storage if memory may not survive: too few nodes stay, or the head may go.
    few = not reach.num_together(transition)
    is_needed = few or run.store_by_s != inf
    return YieldAttempt(
        attempt=run.attempt.number,
        workers=recovery.members_inside(transition),
        reason=run.cause.evidence,
        durable=run.cause.kind is FaultKind.STOP or is_needed,
    )


def yield_deadline_s(transition: Transition) -> float:
    """Return by when members that are asked to leave now must have left.

    A step may just have begun, and the request reaches all ranks with the next one. So allow two
    steps, and two in reserve.
    """
    return transition.now_s + transition.rules.bounds.yield_s + 4 * transition.run.step_s


def member_yielded(transition: Transition, step: int) -> None:
    """Note that a member left as asked, with ``step`` committed."""
    run = transition.run
    if run.attempt.yielded_step in (-1, step):
        run.attempt.yielded_step = step
    else:
        run.attempt.yielded_step = _DIFFER
    run.down_since_s = min(run.down_since_s, transition.now_s)
    all_left(transition)


def complete(transition: Transition, step: int, ended: str) -> None:
    """Let the others leave after the last step, which a member reports as committed."""
    evidence = f"step {step} is committed"
    transition.run.cause = Cause(FaultKind.COMPLETED, (), evidence, transition.now_s)
    transition.enter(Phase.YIELDING, yield_deadline_s(transition))
    member_completed(transition, ended)


def member_completed(transition: Transition, ended: str) -> None:
    """Note that a member completed; ``ended`` says why the script stopped early, else ""."""
    run = transition.run
    run.attempt.completed = True
    run.attempt.ended = run.attempt.ended or ended
    all_left(transition)


def all_left(transition: Transition) -> None:
    """Continue once the last member has left as planned."""
    run = transition.run
    if run.attempt.num_inside:
        return
    run.attempt.fenced_s = transition.now_s
    if run.attempt.completed:
        why = f"; the script stopped: {run.attempt.ended}" if run.attempt.ended else ""
        transition.finish(RunOutcome.COMPLETED, f"step {run.committed[0]} is committed{why}")
        return
    if run.attempt.yielded_step == _DIFFER:
        # The members left at different steps, so the committed step must be read.
        failed = AttemptFailed(FaultKind.UNDECIDED, (), "members yielded at different steps")
        transition.follow(failed)
        return
    run.committed = (run.attempt.yielded_step, run.attempt.number)
    run.store_by_s = inf
    # The members hold the step and reach each other, so it need not be read.
    run.network = run.network._replace(unread=reach.unreached(transition))
    transition.report_incident()
    if run.committed[0] >= transition.rules.total_steps:
        transition.finish(RunOutcome.COMPLETED, f"step {run.committed[0]} is committed")
    elif run.stop_reason:
        transition.finish(RunOutcome.STOPPED, run.stop_reason)
    else:
        formation.wait(transition)
