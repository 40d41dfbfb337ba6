"""When a run does without a slow worker."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from orchestrator.policies import GrowthRules, SlowRules
from orchestrator.policies.slow import SlowFacts, decide

FACTS = SlowFacts(
    now_s=130.0,
    node="n1",
    since_s=100.0,
    times=3.0,
    step_s=1.5,
    usual_step_s=0.5,
    num_steps_left=1000,
    pause_s=2.0,
    next_fault_s=86400.0,
)


def convicts(**changed: object) -> bool:
    return decide(replace(FACTS, **changed), SlowRules(), GrowthRules()).convict  # type: ignore[arg-type]


def test_a_worker_is_convicted_once_waiting_has_cost_more_than_a_change() -> None:
    assert convicts()
    decision = decide(replace(FACTS, now_s=105.0), SlowRules(), GrowthRules())
    assert not decision.convict
    assert decision.retry_at_s == 110.0, "what else runs there comes and goes within seconds"
    # Two thirds of the time are lost: after 60 s as much as a pause of 40 s costs.
    decision = decide(replace(FACTS, pause_s=40.0), SlowRules(), GrowthRules(gain_min=1.0))
    assert decision.retry_at_s == pytest.approx(160.0)


@pytest.mark.parametrize(
    "changed",
    [
        {"num_steps_left": 1},
        {"next_fault_s": 2.0},
        {"step_s": 0.5},
        {"times": 1.0001},
        {"convicted": ((99.0, "n2"), (99.0, "n3"), (99.0, "n4"))},
        {"convicted": ((110.0, "n1"),)},
        {"step_s": 0.0},
    ],
)
def test_one_is_waited_for_where_that_costs_less_or_the_budget_is_spent(
    changed: dict[str, object],
) -> None:
    assert not convicts(**changed)
    assert decide(replace(FACTS, **changed), SlowRules(), GrowthRules()).retry_at_s == inf  # type: ignore[arg-type]


def test_a_rank_whose_slowness_others_hide_costs_nothing() -> None:
    """A light stage of a pipeline computes three times as long, and steps are no longer."""
    assert not convicts(step_s=0.52, usual_step_s=0.5, num_steps_left=50)


def test_old_convictions_and_other_nodes_do_not_count() -> None:
    assert convicts(now_s=5000.0, since_s=4000.0, convicted=((99.0, "n1"),) * 3)
    assert convicts(convicted=((110.0, "n2"),))
