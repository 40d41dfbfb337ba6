"""Planned changes: growth, drains and stops. Nothing is lost, because everybody leaves together.

Members are asked to leave at a step boundary; they agree on it among themselves, commit that
step, and report it. It is then the step to resume from, without a read. What goes on at once is
committed in memory; what ends here is committed in storage.
"""

from __future__ import annotations

from math import inf

from orchestrator.core.actions import YieldAttempt
from orchestrator.core.handlers import recovery
from orchestrator.core.handlers.ending import finish, report_incident
from orchestrator.core.handlers.formation import wait
from orchestrator.core.state import Cause, Phase
from orchestrator.core.transition import Turn
from orchestrator.policies import growth
from orchestrator.policies import layout as layout_policy

#: ``yielded_step`` when members left at different steps; no step is negative.
_DIFFER = -2


def consider(turn: Turn) -> None:
    """Begin a planned change if one is due."""
    draft = turn.draft
    if draft.phase is not Phase.RUNNING or draft.surveying_until_s != inf:
        return
    if draft.stop_reason:
        yield_attempt(turn, "stop", draft.stop_reason)
        return
    if not draft.stepped:
        return
    num_after = layout_policy.usable(
        min(draft.num_usable, turn.rules.max_workers), turn.rules.layout
    )
    may_leave = draft.num_leaving > 0 and num_after >= turn.rules.min_workers
    if may_leave and _leaves_draining_nodes(turn, num_after):
        return
    if num_after > len(draft.members):
        _consider_growth(turn, num_after)


def _leaves_draining_nodes(turn: Turn, num_after: int) -> bool:
    """Leave draining nodes when replacements are ready, in any case before the deadline.

    Returns whether the members were asked to leave.
    """
    draft = turn.draft
    used = dict.fromkeys(draft.workers[member].node for member in draft.members)
    draining = [node for node in (draft.nodes[number] for number in used) if node.draining]
    if not draining:
        return False
    leave_at_s = min(node.leave_by_s for node in draining) - turn.rules.bounds.drain_lead_s
    if num_after >= len(draft.members) or turn.now_s >= leave_at_s:
        names = ", ".join(sorted(node.name for node in draining))
        yield_attempt(turn, "drain", f"leaving {names} before the provider takes it")
        return True
    draft.deadline_s = min(draft.deadline_s, leave_at_s)
    return False


def _consider_growth(turn: Turn, num_after: int) -> None:
    draft = turn.draft
    draft.newcomer_since_s = min(draft.newcomer_since_s, turn.now_s)
    decision = growth.decide(
        growth.GrowthFacts(
            now_s=turn.now_s,
            num_members=len(draft.members),
            num_after=num_after,
            num_coming=min(draft.num_starting, turn.rules.max_workers - num_after),
            waiting_since_s=draft.newcomer_since_s,
            last_change_s=draft.trained_since_s,
            step_s=draft.step_s,
            num_steps_left=turn.rules.total_steps - draft.step,
            pause_s=draft.pause_s,
        ),
        turn.rules.growth,
    )
    if decision.grow:
        yield_attempt(turn, "growth", decision.reason)
    else:
        draft.deadline_s = min(draft.deadline_s, decision.retry_at_s)


def yield_attempt(turn: Turn, kind: str, reason: str) -> None:
    """Ask the members to leave at the next step boundary."""
    draft = turn.draft
    draft.cause = Cause(kind, (), reason, turn.now_s)
    draft.phase = Phase.YIELDING
    draft.yield_asked = True
    draft.deadline_s = yield_deadline_s(turn)
    turn.actions.append(yield_order(turn))


def yield_order(turn: Turn) -> YieldAttempt:
    """Return the order to leave, as the cause asks for it."""
    draft = turn.draft
    assert draft.cause is not None, "a planned change has a cause"
    return YieldAttempt(
        attempt=draft.attempt,
        workers=recovery.members_inside(turn),
        reason=draft.cause.evidence,
        durable=draft.cause.kind == "stop",
    )


def yield_deadline_s(turn: Turn) -> float:
    """Return by when members that are asked now must have left.

    A step may just have begun and the flag travels with the next one: two, and two in reserve.
    """
    return turn.now_s + turn.rules.bounds.yield_s + 4 * turn.draft.step_s


def member_yielded(turn: Turn, step: int) -> None:
    """Note that a member left as asked, with ``step`` committed."""
    draft = turn.draft
    if draft.yielded_step in (-1, step):
        draft.yielded_step = step
    else:
        draft.yielded_step = _DIFFER
    draft.down_since_s = min(draft.down_since_s, turn.now_s)
    all_left(turn)


def member_completed(turn: Turn, step: int) -> None:
    """Note that a member reached the last step; the others are given time to do so too."""
    draft = turn.draft
    draft.completed = True
    if draft.phase is not Phase.YIELDING:
        draft.phase = Phase.YIELDING
        draft.cause = Cause("completed", (), f"step {step} is committed", turn.now_s)
        draft.deadline_s = yield_deadline_s(turn)
    all_left(turn)


def all_left(turn: Turn) -> None:
    """Go on once the last member has left in a planned way."""
    draft = turn.draft
    if draft.phase is not Phase.YIELDING or draft.num_inside:
        return
    draft.fenced_s = turn.now_s
    if draft.completed:
        finish(turn, "completed", f"step {draft.known[0]} is committed")
        return
    if draft.yielded_step == _DIFFER:
        # They did not agree, so what is committed must be read.
        recovery.fault(turn, "undecided", (), "members yielded at different steps")
        recovery.proceed(turn)
        return
    draft.known = (draft.yielded_step, draft.attempt)
    report_incident(turn)
    if draft.known[0] >= turn.rules.total_steps:
        finish(turn, "completed", f"step {draft.known[0]} is committed")
    elif draft.stop_reason:
        finish(turn, "stopped", draft.stop_reason)
    else:
        wait(turn)
