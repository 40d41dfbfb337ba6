"""Intervals against published numbers and against the budget."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.policies import (
    CadenceFacts,
    CadenceRules,
    Redundancy,
    Tier,
    cost_share,
    over_budget,
    taken_steps,
)
from orchestrator.policies.saving.intervals import (
    decide,
    interval_s,
    rate_per_s,
    settled,
    uncovered_rate_per_s,
)

HOUR_S = 3600.0

FACTS = CadenceFacts(
    step_s=1.0,
    snapshot=Tier(stall_s=0.005, busy_s=0.2),
    persist=Tier(stall_s=0.1, busy_s=20.0),
    observed_s=0.0,
    num_process_faults=0,
    num_node_faults=0,
    num_uncovered=0,
    redundancy=Redundancy(num_nodes=128, group_nodes=8, tolerance=1, reprotect_s=60.0),
)


def overhead_share(stall_s: float, rate: float, every_s: float) -> float:
    """Return the share of time that saving every ``every_s`` and redoing work cost together."""
    return stall_s / every_s + rate * every_s / 2


@pytest.mark.parametrize(
    ("stall_s", "every_s", "share"),
    [(0.01, 20.8, 0.00096), (0.1, 65.7, 0.0030), (1.0, 207.8, 0.0096), (30.0, 1138.4, 0.0527)],
)
def test_young_interval_of_a_cluster_that_fails_every_six_hours(
    stall_s: float, every_s: float, share: float
) -> None:
    """The numbers computed once by hand; a factor of two is lost easily."""
    rate = 1 / (6 * HOUR_S)
    assert interval_s(stall_s, rate) == pytest.approx(every_s, rel=1e-3)
    assert overhead_share(stall_s, rate, every_s) == pytest.approx(share, rel=0.02)


@given(st.floats(1e-4, 100), st.floats(1e-7, 1e-2), st.floats(0.2, 5.0))
def test_no_other_interval_costs_less_than_youngs(
    stall_s: float, rate: float, factor: float
) -> None:
    """It is a minimum, not merely where two curves cross."""
    best = interval_s(stall_s, rate)
    least = overhead_share(stall_s, rate, best)
    assert least <= overhead_share(stall_s, rate, best * factor) * (1 + 1e-12)


def test_a_rate_is_never_zero_and_the_prior_fades() -> None:
    """No failure in the first hour does not mean that there will be none."""
    day_s = 24 * HOUR_S
    prior = {"prior_rate": 1 / day_s, "prior_s": day_s}
    assert rate_per_s(0, 0.0, **prior) == pytest.approx(1 / day_s)
    assert rate_per_s(0, day_s, **prior) == pytest.approx(0.5 / day_s)
    assert rate_per_s(2400, 100 * day_s, **prior) == pytest.approx(24 / day_s, rel=0.02)


def test_losses_beyond_memory_follow_group_size_and_window() -> None:
    """N (n - 1) rate^2 w for one parity; the form for two must agree with it at one."""
    rate, window_s = 1e-7, 60.0
    one = Redundancy(num_nodes=128, group_nodes=8, tolerance=1, reprotect_s=window_s)
    two = replace(one, tolerance=2)
    none = replace(one, tolerance=0)
    assert uncovered_rate_per_s(one, rate) == pytest.approx(128 * 7 * rate**2 * window_s)
    # 8 * 7 * 6 / 2 ordered ways in each of 16 groups.
    assert uncovered_rate_per_s(two, rate) == pytest.approx(16 * 168 * rate**3 * window_s**2)
    assert uncovered_rate_per_s(none, rate) == pytest.approx(128 * rate)
    # A window as long as the time between failures is no protection, and no worse than none.
    assert uncovered_rate_per_s(replace(one, reprotect_s=1e9), rate) == pytest.approx(128 * rate)


def test_a_nearly_free_snapshot_is_taken_after_every_step() -> None:
    """Young alone would take one in minutes: failures are rare before any was seen."""
    cadence = decide(FACTS, CadenceRules())
    assert cadence.snapshot_steps == 1
    assert interval_s(0.005, 128 * 4 / (25_000 * HOUR_S)) > 40.0
    assert decide(FACTS, CadenceRules(cost_share_free=0.0)).snapshot_steps == 42
    assert "snapshot every step (1 s: stalls 5 ms" in cadence.reason


def test_seen_failures_shorten_both_intervals() -> None:
    """A spot cluster is not Llama's."""
    facts = replace(FACTS, snapshot=Tier(stall_s=1.0, busy_s=1.0), observed_s=24 * HOUR_S)
    rules = CadenceRules(cost_share_free=0.0, persist_s_max=HOUR_S)
    quiet = decide(facts, rules)
    busy = decide(replace(facts, num_node_faults=40, num_process_faults=100), rules)
    assert busy.snapshot_steps < quiet.snapshot_steps
    lost = decide(replace(facts, num_uncovered=20), rules)
    assert lost.snapshot_steps == quiet.snapshot_steps
    assert lost.persist_steps < quiet.persist_steps


def test_a_better_protected_run_persists_less_often() -> None:
    """Two parities make storage the exception, so it need not be written as often."""
    facts = replace(FACTS, num_node_faults=500, observed_s=24 * HOUR_S)
    rules = CadenceRules(persist_s_max=1e9)
    steps = [
        decide(
            replace(facts, redundancy=replace(facts.redundancy, tolerance=tolerance)), rules
        ).persist_steps
        for tolerance in (0, 1, 2)
    ]
    assert steps == sorted(steps)
    assert steps[0] < steps[1] < steps[2]


@given(
    step_s=st.floats(0.001, 100),
    snapshot=st.tuples(st.floats(0, 50), st.floats(0, 100)),
    persist=st.tuples(st.floats(0, 500), st.floats(0, 5000)),
    counts=st.tuples(*[st.integers(0, 1000)] * 3),
    observed_s=st.floats(0, 1e7),
    tolerance=st.integers(0, 2),
)
def test_the_budget_is_kept_and_no_save_begins_before_the_last_has_ended(
    *,
    step_s: float,
    snapshot: tuple[float, float],
    persist: tuple[float, float],
    counts: tuple[int, int, int],
    observed_s: float,
    tolerance: int,
) -> None:
    """Whatever was measured: a tiny step, a store that stalls for minutes, failures all day."""
    facts = CadenceFacts(
        step_s=step_s,
        snapshot=Tier(stall_s=snapshot[0], busy_s=snapshot[1]),
        persist=Tier(stall_s=persist[0], busy_s=persist[1]),
        observed_s=observed_s,
        num_process_faults=counts[0],
        num_node_faults=counts[1],
        num_uncovered=counts[2],
        redundancy=replace(FACTS.redundancy, tolerance=tolerance),
    )
    rules = CadenceRules()
    cadence = decide(facts, rules)
    is_longest = cadence.snapshot_steps * step_s >= rules.snapshot_s_max * (1 - 1e-6)
    is_longest |= cadence.persist_steps * step_s >= rules.persist_s_max * (1 - 1e-6)
    assert is_longest or cadence.cost_share <= rules.cost_share_max * (1 + 1e-6)
    spent = snapshot[0] / cadence.snapshot_steps
    spent += facts.persist.stall_s / cadence.persist_steps
    assert spent / step_s == pytest.approx(cadence.cost_share)
    assert cadence.snapshot_steps * step_s >= snapshot[1] * (1 - 1e-6)
    assert cadence.persist_steps * step_s >= persist[1] * (1 - 1e-6)
    assert cadence.persist_steps % cadence.snapshot_steps == 0
    longest_s = max(rules.snapshot_s_max, snapshot[1]) + step_s
    assert cadence.snapshot_steps * step_s <= longest_s * (1 + 1e-6), "more work is staked"


def test_the_line_says_when_the_budget_decides() -> None:
    """Otherwise an interval of many steps looks like a mistake."""
    facts = replace(FACTS, snapshot=Tier(stall_s=0.5, busy_s=0.5), num_process_faults=10_000)
    cadence = decide(facts, CadenceRules())
    assert cadence.reason.endswith("of step time of 2.00% allowed, which stretches both")
    assert cadence.snapshot_steps >= 25


@pytest.mark.parametrize("asked", ["snapshot_steps", "persist_steps"])
def test_what_an_interval_that_was_asked_for_costs_is_not_spent_twice(asked: str) -> None:
    """The other one was chosen beside what this one would best have been, and cost too much."""
    facts = replace(
        FACTS,
        snapshot=Tier(stall_s=0.018, busy_s=0.1),
        persist=Tier(stall_s=1.0, busy_s=1.0),
        num_uncovered=1000,
        num_process_faults=1000,
    )
    free = decide(facts, CadenceRules())
    steps = {"snapshot_steps": 1, "persist_steps": 60}[asked]
    assert getattr(free, asked) > steps, "nothing is asked for that is not done as it is"

    told: dict[str, Any] = {asked: steps}
    cadence = decide(replace(facts, **told), CadenceRules())

    assert getattr(cadence, asked) == steps
    assert 0.015 < cadence.cost_share <= 0.02 + 1e-9
    assert cadence.reason.endswith("which stretches the chosen one")


def test_an_interval_that_was_asked_for_is_kept_though_it_costs_too_much() -> None:
    """The other is stretched as far as it may be, and no further."""
    facts = replace(FACTS, snapshot=Tier(stall_s=0.5, busy_s=0.5), num_uncovered=1000)
    cadence = decide(replace(facts, snapshot_steps=1), CadenceRules())

    assert (cadence.snapshot_steps, cadence.persist_steps) == (1, 600)


def test_a_chosen_checkpoint_is_of_a_snapshot_that_was_asked_for() -> None:
    """At other steps the state would be copied once more, only to be stored."""
    facts = replace(FACTS, num_uncovered=1000, snapshot_steps=50)

    assert decide(facts, CadenceRules()).persist_steps % 50 == 0


def test_without_snapshots_storage_serves_every_failure() -> None:
    """Its interval must not be chosen as if only what memory cannot serve were lost back to it."""
    facts = replace(FACTS, num_process_faults=200, observed_s=24 * HOUR_S)
    both, stored = (
        decide(facts, CadenceRules()),
        decide(replace(facts, snapshot=None), CadenceRules()),
    )

    assert stored.persist_steps < both.persist_steps
    assert stored.reason.startswith("checkpoint every")


def test_a_store_that_stalls_no_step_is_not_kept_busy_all_the_time() -> None:
    """Keepers write it, which costs training nothing that could be measured."""
    facts = replace(FACTS, persist=Tier(stall_s=0.0, busy_s=0.05))

    assert decide(facts, CadenceRules()).persist_steps * facts.step_s > 60 * facts.persist.busy_s


@pytest.mark.parametrize(
    ("kept", "found", "then"),
    [(10, 11, 10), (10, 14, 10), (10, 15, 15), (10, 7, 10), (10, 5, 5), (1, 2, 2)],
)
def test_an_interval_changes_only_if_that_is_worth_it(kept: int, found: int, then: int) -> None:
    """Measured costs vary; a line in the log for each would hide the changes that matter."""
    assert settled(kept, found) == then


@pytest.mark.parametrize(
    ("busy_s", "every", "then"),
    [
        (0.0, 1, 1),
        (0.6, 1, 1),
        (1.1, 1, 2),
        (2.6, 1, 5),
        (2.6, 4, 8),
        (1.6, 4, 4),
        (2.6, 0, 0),
    ],
)
def test_a_snapshot_is_taken_once_the_one_before_is_copied(
    busy_s: float, every: int, then: int
) -> None:
    """Steps of 0.5 s: that of step 1, which peers had in step 6, was in the way of four."""
    assert taken_steps(0.5, Tier(stall_s=0.1, busy_s=busy_s), every=every) == then


def test_before_a_step_was_measured_snapshots_are_taken_as_they_are_due() -> None:
    """Nothing is known to be in their way."""
    assert taken_steps(0.0, Tier(stall_s=0.0, busy_s=0.0), every=3) == 3


def test_intervals_that_were_asked_for_are_measured_against_the_budget() -> None:
    """They are kept as they are: only a line says that a user pays more than is meant to be."""
    rules = CadenceRules()
    share = cost_share(0.5, 0.004, 0.1, steps=(1, 10))
    assert share == pytest.approx(0.004 / 0.5 + 0.1 / 5.0)
    assert "2.8% of step time, above the budget of 2%" in over_budget(share, rules, steps=(1, 10))
    assert over_budget(0.02, rules, steps=(1, 10)) == ""

    assert cost_share(0.5, 0.004, 0.1, steps=(0, 10)) == pytest.approx(0.02), "without snapshots"
    assert cost_share(0.0, 0.004, 0.1, steps=(1, 10)) == 0.0, "nothing was measured yet"
