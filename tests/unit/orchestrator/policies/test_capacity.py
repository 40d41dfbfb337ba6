"""How long a run waits for capacity before it requests the next alternative."""

from orchestrator.policies import CapacityRules
from orchestrator.policies.capacity import grant_bound_s, took_s

RULES = CapacityRules()


def test_a_machine_counts_as_refused_after_three_times_what_one_took() -> None:
    """Before one has come it is not known how long they take."""
    assert grant_bound_s(0.0, RULES) == RULES.guess_s
    assert grant_bound_s(60.0, RULES) == 180.0
    assert grant_bound_s(2.0, RULES) == RULES.wait_s_min


def test_only_a_machine_that_comes_because_it_was_asked_for_says_how_long_one_takes() -> None:
    """One that was there is granted in milliseconds, and says nothing of the next."""
    assert took_s(0.0, RULES, since_s=10.0, joined_s=11.0, now_s=11.2) == 0.0
    assert took_s(0.0, RULES, since_s=10.0, joined_s=70.0, now_s=71.0) == 61.0
    # A single long time is gradually forgotten.
    assert took_s(100.0, RULES, since_s=10.0, joined_s=30.0, now_s=31.0) == 50.0
