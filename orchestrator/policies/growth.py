"""When new workers are worth a pause of the training ones.

Pure. Growing costs everybody one re-formation and pays by a shorter step from then on, so it
pays when enough of the run is left; several newcomers that come close together share one pause.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthRules:
    """Limits of planned growth.

    Attributes:
        interval_s_min: Least time between two planned changes.
        gather_s: How long the first newcomer waits at most for others that are nearly ready.
        pause_guess_s: Cost of a re-formation before one was measured.
        gain_min: The time won must exceed the pause by this factor (a flap guard: estimates of
            both are rough, peers use 2 to 3 %; a planned pause also costs peace of mind).
    """

    interval_s_min: float = 5.0
    gather_s: float = 2.0
    pause_guess_s: float = 1.0
    gain_min: float = 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthFacts:
    """What the decision is made from.

    Attributes:
        num_members: Workers in the attempt.
        num_after: Workers that the layout would use with the newcomers.
        step_ratio: Duration of a step then over that of one now, by the work of each worker.
        num_coming: Workers that are starting on reserved reservations and may join the same change.
        waiting_since_s: When the first newcomer became ready.
        last_change_s: When the present attempt began to train.
        step_s: Smoothed duration of a step now; 0.0 if none was seen.
        num_steps_left: Steps until the end of the run.
        pause_s: Measured duration of the last re-formation; 0.0 if there was none.
    """

    now_s: float
    num_members: int
    num_after: int
    step_ratio: float
    num_coming: int
    waiting_since_s: float
    last_change_s: float
    step_s: float
    num_steps_left: int
    pause_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthDecision:
    """Grow now, or look again at ``retry_at_s`` (infinity: only when something changes)."""

    grow: bool
    retry_at_s: float
    reason: str


def decide(facts: GrowthFacts, rules: GrowthRules) -> GrowthDecision:
    """Return whether to pause training for the new workers now."""
    never = float("inf")
    if facts.num_after <= facts.num_members:
        return GrowthDecision(grow=False, retry_at_s=never, reason="the layout has no use for more")
    pause_s = facts.pause_s or rules.pause_guess_s
    won_s = facts.num_steps_left * facts.step_s * (1 - facts.step_ratio)
    if won_s < pause_s * rules.gain_min:
        # With a step that was not measured yet there is nothing to weigh: look again soon.
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
