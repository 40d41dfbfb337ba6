from dataclasses import replace
from math import inf

import pytest

from orchestrator.policies import FaultsSeen, GrowthRules
from orchestrator.policies.growth import GrowthFacts, decide, next_fault_s

RULES = GrowthRules(interval_s_min=5.0, gather_s=2.0, pause_guess_s=1.0, gain_min=1.05)
FACTS = GrowthFacts(
    now_s=100.0,
    num_members=2,
    num_after=4,
    step_ratio=0.5,
    num_coming=0,
    waiting_since_s=99.0,
    last_change_s=50.0,
    step_s=0.5,
    num_steps_left=1000,
    pause_s=0.8,
    next_fault_s=inf,
)


def test_growth_pays_with_much_left_to_do() -> None:
    """1000 steps of 0.5 s at half the time win 250 s for a pause of 0.8 s."""
    decision = decide(FACTS, RULES)

    assert decision.grow
    assert "2 to 4" in decision.reason
    assert "250.0 s" in decision.reason


def test_growth_does_not_pay_near_the_end() -> None:
    """Three steps are sooner done than everybody has paused; no later look can change that."""
    decision = decide(replace(FACTS, num_steps_left=3), RULES)

    assert not decision.grow
    assert decision.retry_at_s == inf


def test_a_measured_pause_counts_more_than_the_guess() -> None:
    """Loading a large state may take minutes, which no default can know."""
    assert not decide(replace(FACTS, pause_s=400.0), RULES).grow


def test_newcomers_that_are_nearly_ready_share_one_pause() -> None:
    """Two pauses for two newcomers a second apart would cost everybody twice."""
    gathering = decide(replace(FACTS, num_coming=1), RULES)
    assert not gathering.grow
    assert gathering.retry_at_s == FACTS.waiting_since_s + RULES.gather_s

    late = replace(FACTS, num_coming=1, now_s=gathering.retry_at_s)
    assert decide(late, RULES).grow


def test_changes_keep_their_distance() -> None:
    """Capacity that comes and goes must not keep the run in re-formation."""
    soon = decide(replace(FACTS, last_change_s=98.0), RULES)

    assert not soon.grow
    assert soon.retry_at_s == 98.0 + RULES.interval_s_min


def test_without_a_measured_step_there_is_another_look() -> None:
    """Before the first step nothing can be weighed; a final no would lose the newcomer for good."""
    decision = decide(replace(FACTS, step_s=0.0), RULES)

    assert not decision.grow
    assert decision.retry_at_s < inf


def test_a_worker_that_shortens_no_step_costs_no_pause() -> None:
    """Five workers have two of eight micro-batches at most, and six have, too."""
    decision = decide(replace(FACTS, num_members=5, num_after=6, step_ratio=1.0), RULES)

    assert not decision.grow
    assert decision.retry_at_s == inf
    assert decision.reason == "would win 0.0 s and cost 0.8 s"


def test_a_change_has_to_pay_before_the_next_fault() -> None:
    """In 1.5 s half of the steps are won, which is less than the pause; in 2 s it is more."""
    assert not decide(replace(FACTS, next_fault_s=1.5), RULES).grow
    assert decide(replace(FACTS, next_fault_s=2.0), RULES).grow


def test_a_layout_of_fewer_workers_is_taken_if_its_steps_are_shorter() -> None:
    assert decide(replace(FACTS, num_members=5, num_after=4), RULES).grow


def test_faults_come_once_a_day_on_each_node_until_the_run_knows_better() -> None:
    """The prior is worth one fault: 32 nodes expect one in 45 minutes."""
    none, nine = FaultsSeen(), FaultsSeen(num_process=4, num_node=5)
    assert next_fault_s(none, 0.0, 1, RULES) == pytest.approx(86_400)
    assert next_fault_s(none, 0.0, 32, RULES) == pytest.approx(2700)
    # An hour of the spot market with nine losses, and a month without any.
    assert next_fault_s(nine, 3600.0, 32, RULES) == pytest.approx((3600 + 2700) / 10)
    assert next_fault_s(none, 30 * 86_400.0, 32, RULES) > 30 * 86_400
