"""When a run does without a slow worker."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.policies import GrowthRules, SlowRules
from orchestrator.policies.slow import SlowFacts, decide

FACTS = SlowFacts(
    now_s=130.0,
    node="n1",
    since_s=100.0,
    is_steady=False,
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
    ("times", "is_agreed", "steps"),
    [(3.0, False, 4), (1.5, False, 13), (1.2, False, 31), (1.5, True, 9), (1.2, True, 21)],
    ids=str,
)
@pytest.mark.parametrize("usual_s", [0.6, 30.0])
def test_one_that_is_steadily_slow_is_left_after_steps_and_not_seconds(
    times: float, steps: int, usual_s: float, *, is_agreed: bool
) -> None:
    """The first of them is over when it is known to be slow."""
    slow_s = times * usual_s
    facts = replace(
        FACTS, now_s=100.0, is_steady=True, times=times, step_s=slow_s, usual_step_s=usual_s
    )
    decision = decide(replace(facts, is_agreed=is_agreed), SlowRules(), GrowthRules())
    assert not decision.convict
    assert decision.retry_at_s == pytest.approx(100.0 + slow_s * (steps - 1))


def test_steps_of_milliseconds_say_nothing_of_the_next_seconds() -> None:
    facts = replace(FACTS, is_steady=True, step_s=0.03, usual_step_s=0.01, num_steps_left=10**6)
    for is_agreed in (False, True):
        facts = replace(facts, now_s=102.5, pause_s=0.5, is_agreed=is_agreed)
        assert decide(facts, SlowRules(), GrowthRules()).retry_at_s == 103.0


@given(
    st.builds(
        SlowFacts,
        now_s=st.floats(100.0, 1000.0),
        node=st.just("n1"),
        since_s=st.just(100.0),
        is_steady=st.booleans(),
        times=st.floats(1.0, 10.0),
        step_s=st.floats(0.01, 60.0),
        usual_step_s=st.floats(0.0, 60.0),
        num_steps_left=st.integers(0, 1000),
        pause_s=st.floats(0.0, 50.0),
        next_fault_s=st.floats(1.0, 86400.0),
        is_agreed=st.booleans(),
    )
)
def test_no_worker_is_left_before_waiting_has_cost_as_much_as_the_change(facts: SlowFacts) -> None:
    rules, growth = SlowRules(), GrowthRules()
    decision = decide(facts, rules, growth)
    lost_s = (facts.now_s - facts.since_s) * facts.lost_share
    if decision.convict:
        lost_steps = rules.agreed_lost_steps if facts.is_agreed else rules.lost_steps
        price_s = max(facts.pause_s, lost_steps * facts.healthy_step_s)
        assert lost_s >= 0.999 * price_s
        steady = decide(replace(facts, is_steady=True), rules, growth)
        assert steady.convict, "one that is slow in every step is left no later"
        assert decide(replace(facts, now_s=facts.now_s + 1.0), rules, growth).convict
    elif decision.retry_at_s < inf:
        assert decision.retry_at_s > facts.now_s
        then = replace(facts, now_s=decision.retry_at_s)
        assert decide(then, rules, growth).convict, "it is left when it was told to be"


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
def test_the_run_waits_for_a_slow_worker_where_that_costs_less_or_the_budget_is_spent(
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
