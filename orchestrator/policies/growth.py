"""Decide when new workers, or another layout, are worth a pause of training.

Pure. Each change costs all workers one re-formation. It pays off by shorter steps until the run
ends or a fault changes the layout anyway. Newcomers that come close together share one pause.
"""

from dataclasses import dataclass

from orchestrator.policies.saving import FaultsSeen, rate_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthRules:
    """Limits of planned growth."""

    interval_s_min: float = 5.0  #: Shortest time between two planned changes.
    #: Longest time that the first newcomer waits for others that are starting.
    gather_s: float = 2.0
    pause_guess_s: float = 1.0  #: Cost of a re-formation before one was measured.
    #: The time saved must exceed the pause by this factor: both estimates are rough, and without it
    #: layouts would flap. Peers use 2 to 3 %.
    gain_min: float = 1.05
    #: Time between faults of one node before any occurred; it weighs as much as one fault. In
    #: traces of the spot market (``tests/fixtures/spot``) a node was lost every 1.6 to 10 hours, in
    #: the training of Llama 3 (arXiv 2407.21783) every 6,300. One a day lies between them, and a
    #: run soon has its own numbers.
    node_fault_s: float = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthFacts:
    """The inputs of the decision."""

    now_s: float
    num_members: int  #: Workers in the attempt.
    num_after: int  #: Workers that the other layout would use.
    step_ratio: float  #: Step time of the other layout divided by that of the current one.
    #: Workers that are starting on granted reservations and may join the same change.
    num_coming: int
    waiting_since_s: float  #: When the first newcomer became ready.
    last_change_s: float  #: When the current attempt began to train.
    step_s: float  #: Smoothed duration of a step now; 0.0 if unknown.
    num_steps_left: int  #: Steps until the end of the run.
    pause_s: float  #: Measured duration of the last re-formation; 0.0 if there was none.
    next_fault_s: float  #: How long the layout is expected to stay.


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthDecision:
    """Grow now, or decide again at ``retry_at_s`` (infinity: only when something changes)."""

    grow: bool
    retry_at_s: float
    reason: str


def next_fault_s(seen: FaultsSeen, observed_s: float, num_nodes: int, rules: GrowthRules) -> float:
    """Return the expected time to the next fault that takes a worker or a node.

    ``seen`` are the faults since the run began, ``observed_s`` ago. ``num_nodes`` train.
    """
    prior_s = rules.node_fault_s / num_nodes
    num_faults = seen.num_process + seen.num_node
    return 1 / rate_per_s(num_faults, observed_s, prior_rate=1 / prior_s, prior_s=prior_s)


def decide(facts: GrowthFacts, rules: GrowthRules) -> GrowthDecision:
    """Return whether to pause training for the other layout now."""
    never = float("inf")
    pause_s = facts.pause_s or rules.pause_guess_s
    left_s = min(facts.num_steps_left * facts.step_s, facts.next_fault_s)
    won_s = left_s * (1 - facts.step_ratio)
    if won_s < pause_s * rules.gain_min:
        # Without a measured step nothing can be compared, so try again soon.
        retry_at_s = never if facts.step_s else facts.now_s + rules.interval_s_min
        reason = f"would win {won_s:.1f} s and cost {pause_s:.1f} s"
        return GrowthDecision(grow=False, retry_at_s=retry_at_s, reason=reason)
    earliest_s = facts.last_change_s + rules.interval_s_min
    if facts.num_coming:
        earliest_s = max(earliest_s, facts.waiting_since_s + rules.gather_s)
    if facts.now_s < earliest_s:
        return GrowthDecision(grow=False, retry_at_s=earliest_s, reason="gathering newcomers")
    reason = (
        f"grow from {facts.num_members} to {facts.num_after} workers: "
        f"wins {won_s:.1f} s for a pause of {pause_s:.1f} s"
    )
    return GrowthDecision(grow=True, retry_at_s=never, reason=reason)
