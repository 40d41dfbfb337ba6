"""Choose how often the run saves, given what saves cost and how often faults occur."""

from orchestrator.core.actions import SetCadence
from orchestrator.core.events import SavesMeasured
from orchestrator.core.transition import Transition
from orchestrator.policies import Redundancy, next_pace


def saves_measured(transition: Transition, event: SavesMeasured) -> None:
    """Choose the intervals again; send them to rank 0 if they change."""
    run = transition.run
    attempt = run.attempt
    rank_0 = run.fleet.workers.get(attempt.members[0]) if attempt.members else None
    if event.attempt != attempt.number or rank_0 is None:
        return
    rules = transition.rules.cadence
    plan = attempt.plan
    redundancy = Redundancy(
        num_nodes=attempt.num_nodes,
        group_nodes=max(map(len, plan.groups), default=1),
        tolerance=plan.tolerance if plan.groups else 0,
        reprotect_s=rules.reprotect_s,
    )
    found = next_pace(
        event.costs,
        run.pace,
        seen=run.faults_seen,
        now_s=transition.now_s,
        redundancy=redundancy,
        rules=rules,
    )
    if found is not None and found[0] != run.pace:
        run.pace, run.pace_reason = found
        transition.actions.append(
            SetCadence(attempt=attempt.number, worker=rank_0.name, pace=found[0], reason=found[1])
        )
