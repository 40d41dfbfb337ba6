"""Slow workers: the run leaves the node of a convicted worker as if the provider took it.

It requests a replacement elsewhere while it trains. The members leave once that is ready, or
without it if fewer workers are faster. No step is lost, and the node is used again later. The run
keeps the node if its workers recover before that.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf

from orchestrator.core.consequences import CapacityChanged
from orchestrator.core.handlers import demand, fleet
from orchestrator.core.network import reach
from orchestrator.core.state import Node, Slow
from orchestrator.core.transition import Transition
from orchestrator.diagnosis import Suspicion, is_agreed
from orchestrator.policies import growth, slow, step_ratio

#: How many steps without a slow worker must be seen to know how long a step usually takes.
_NUM_STEPS_KNOWN = 10


@dataclass(frozen=True, slots=True)
class Found:
    """Why the members are to leave because of a slow worker."""

    guilty: tuple[str, ...]
    verdict: str
    evidence: str


def consider(transition: Transition) -> Found | None:
    """Convict workers that were slow for long enough; return why members must leave, or None."""
    run = transition.run
    for one in run.attempt.suspects:
        if one.times and not one.may_be_work:
            _judge(transition, one)
    left = _nodes(transition)
    return _leave(transition, left) if left else None


def keep_well(transition: Transition, before: Iterable[Suspicion]) -> None:
    """Keep a convicted node whose workers were suspected ``before`` and are not any longer.

    Do so once within the window: a worker that is slow again and again costs as much as one that
    stays slow.
    """
    run = transition.run
    well = _suspected(transition, before) - _suspected(transition, run.attempt.suspects)
    for number in sorted(well):
        name = run.fleet.nodes[number].name
        convicted = [left for _, left, _, _ in _recent(transition)]
        if run.fleet.nodes[number].is_slow and convicted.count(name) == 1:
            _acquit(transition, number)
            # Without ranks, this conviction is not counted and is not compared with later ones.
            run.convicted = tuple(
                (at_s, left, () if left == name else ranks, layout)
                for at_s, left, ranks, layout in run.convicted
            )


def is_awaited(transition: Transition) -> bool:
    """Return whether members are on a slow node that the run will leave."""
    return bool(_nodes(transition))


def look(transition: Transition, number: int) -> bool:
    """Use a slow node again once its time is over; return whether it was over."""
    node = transition.run.fleet.nodes[number]
    if not node.is_slow:
        return False
    if transition.now_s < node.leave_by_s:
        transition.wake_by(node.leave_by_s)
        return False
    fleet.put_node(transition, number, node._replace(leave_by_s=inf, slow=Slow()))
    transition.follow(CapacityChanged())
    return True


def _nodes(transition: Transition) -> list[Node]:
    """Return the slow nodes that have members."""
    run = transition.run
    if not run.fleet.leaving or not run.fleet.nodes.where(_is_slow):
        return []
    nodes = (run.fleet.nodes[number] for number, _ in run.attempt.placed)
    return [node for node in nodes if node.is_slow and node.alive]


def _is_slow(node: Node) -> bool:
    return node.is_slow


def _suspected(transition: Transition, suspects: Iterable[Suspicion]) -> set[int]:
    """Return the nodes with workers that seem slow."""
    found = (fleet.find_worker(transition, one.worker) for one in suspects if one.times)
    return {each[1].node for each in found if each is not None}


def _recent(transition: Transition) -> list[tuple[float, str, tuple[int, ...], str]]:
    """Return the convictions within the window, also those that were withdrawn."""
    oldest_s = transition.now_s - transition.rules.slow.window_s
    return [each for each in transition.run.convicted if each[0] > oldest_s]


def _judge(transition: Transition, one: Suspicion) -> None:
    run, rules = transition.run, transition.rules
    found = fleet.find_worker(transition, one.worker)
    if found is None or found[0] not in run.attempt.inside:
        return
    number = found[1].node
    node = run.fleet.nodes[number]
    if node.draining:
        return
    for _, left, ranks, then in _recent(transition):
        is_same = (ranks, then) == (one.guilty.ranks, str(run.attempt.layout))
        if is_same and left != node.name:
            _withdraw(transition, one, left)
            return
    facts = _facts(transition, one, node, len(dict(run.attempt.placed)[number]))
    decision = slow.decide(facts, rules.slow, rules.growth)
    if not decision.convict:
        run.deadline_s = min(run.deadline_s, decision.retry_at_s)
        return
    avoid_s = min(2 * node.avoided_s or rules.avoid.avoid_s, rules.avoid.avoid_s_max)
    until_s = transition.now_s + avoid_s
    run.convicted = (
        *_recent(transition),
        (transition.now_s, node.name, one.guilty.ranks, str(run.attempt.layout)),
    )
    evidence = f"{one.evidence} To do without it {decision.reason}."
    fleet.strike(transition, number)
    fleet.put_node(
        transition,
        number,
        run.fleet.nodes[number]._replace(
            leave_by_s=until_s, avoided_s=avoid_s, slow=Slow(one.worker, one.kind.value, evidence)
        ),
    )
    transition.wake_by(until_s)
    layout = run.attempt.layout
    assert layout is not None
    # The slow steps do not show how long a step usually takes. ``healthy_step_s`` may be too short:
    # a member at work would be killed too soon when it is fenced.
    steps = dict(run.steps)
    was_healthy = one.since_s > run.attempt.trained_since_s
    known_s = min(steps.get(layout, 0.0), run.attempt.usual_step_s) if was_healthy else 0.0
    steps[layout] = max(facts.healthy_step_s, known_s)
    run.steps = tuple(steps.items())
    run.attempt.slow_since_s = transition.now_s


def _withdraw(transition: Transition, one: Suspicion, left: str) -> None:
    """Clear a node whose rank is as slow on another node: that rank has more work."""
    run = transition.run
    evidence = (
        f"{one.evidence} It was as slow on node {left[:8]}: its work takes longer, and both nodes "
        "are healthy."
    )
    told = replace(one, may_be_work=True, evidence=evidence)
    run.attempt.suspects = tuple(told if each == one else each for each in run.attempt.suspects)
    for number, node in run.fleet.nodes.items():
        if node.name == left and node.is_slow:
            _acquit(transition, number)


def _acquit(transition: Transition, number: int) -> None:
    """Use a convicted node again as if it had not been convicted, and request no replacement."""
    node = transition.run.fleet.nodes[number]
    well = node._replace(leave_by_s=inf, avoided_s=0.0, slow=Slow(), strikes=node.strikes[:-1])
    fleet.put_node(transition, number, well)
    demand.release_surplus(transition)
    demand.renew_pending(transition)
    transition.follow(CapacityChanged())


def _facts(transition: Transition, one: Suspicion, node: Node, num_ranks: int) -> slow.SlowFacts:
    run, rules = transition.run, transition.rules
    num_before = (one.since_s - run.attempt.trained_since_s) / (run.attempt.usual_step_s or inf)
    return slow.SlowFacts(
        now_s=transition.now_s,
        node=node.name,
        since_s=max(one.since_s, run.attempt.trained_since_s),
        is_steady=one.is_steady,
        times=one.times,
        step_s=run.step_s,
        usual_step_s=run.attempt.usual_step_s if num_before >= _NUM_STEPS_KNOWN else 0.0,
        num_steps_left=rules.total_steps - run.attempt.step,
        pause_s=run.pause_s,
        next_fault_s=growth.next_fault_s(
            run.faults_seen, transition.now_s, run.attempt.num_nodes, rules.growth
        ),
        convicted=tuple((at_s, left) for at_s, left, ranks, _ in run.convicted if ranks),
        is_agreed=is_agreed(one, run.attempt.suspects, num_ranks),
    )


def _leave(transition: Transition, left: list[Node]) -> Found | None:
    """Return why members must leave now; None while the run waits or gains nothing."""
    run, rules = transition.run, transition.rules
    now, then = run.attempt.layout, reach.layout(transition)
    assert now is not None
    guilty = tuple(node.slow.worker for node in left)
    verdict = left[0].slow.verdict
    evidence = " ".join(node.slow.evidence for node in left)
    if then is not None and then.world_size >= now.world_size:
        return Found(guilty, verdict, evidence)
    replace_by_s = run.attempt.slow_since_s + rules.slow.replace_s
    if transition.now_s < replace_by_s:
        run.deadline_s = min(run.deadline_s, replace_by_s)
        return None
    if then is None:
        return None
    healthy_s = dict(run.steps).get(now, 0.0)
    then_s = healthy_s * step_ratio(then, now, transition.layout_rules)
    if then_s * rules.growth.gain_min >= run.step_s:
        return None
    return Found(
        guilty, verdict, f"{evidence} Nothing replaces it, and {then} is faster without it."
    )
