"""Decide whether to replace a slow worker: waiting for it costs time, and so does a change.

Pure. The cost of the wait so far is known; how long the worker will stay slow is not. So the run
waits until the wait has cost as much as the change would, which is at most twice the optimum (ski
rental, Karlin et al., "Competitive snoopy caching", Algorithmica 3, 1988). A change costs more than
its pause, so the wait must have cost some steps as well. And the change must pay off within the
remaining time.
"""

from dataclasses import dataclass
from math import inf

from orchestrator.policies.growth import GrowthRules


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRules:
    """When the run acts on slow workers."""

    #: A worker must have been slow for this long: other load on a machine comes and goes within
    #: seconds.
    lasts_s: float = 10.0
    #: The same for a worker that was equally slow in several steps in a row.
    steady_s: float = 3.0
    #: The wait must have cost the time of this many healthy steps: 3 steps that take 3 times as
    #: long, or 30 that take 1.2 times as long.
    lost_steps: float = 6.0
    #: The same if all workers of a node agree: each was measured separately.
    agreed_lost_steps: float = 4.0
    #: How long to wait for a replacement before the run continues with fewer workers.
    replace_s: float = 10.0
    convictions_max: int = 3  #: Largest number of convictions within the window.
    window_s: float = 3600.0  #: Length of the window.


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowFacts:
    """The inputs of the decision."""

    now_s: float
    node: str  #: Where the worker is.
    since_s: float  #: When it became slow.
    is_steady: bool  #: Whether it was about equally slow in each of the last steps.
    times: float  #: How many times as long as normal its micro-batches take.
    step_s: float  #: Duration of a step now.
    usual_step_s: float  #: Duration of a step before it was slow; 0.0 if unknown.
    num_steps_left: int  #: Steps until the end of the run.
    pause_s: float  #: Measured duration of the last re-formation; 0.0 if there was none.
    next_fault_s: float  #: How long the layout is expected to stay.
    convicted: tuple[tuple[float, str], ...] = ()  #: ``(when, node)`` of each conviction so far.
    is_agreed: bool = False  #: Whether its node has several workers and all are slow.

    @property
    def healthy_step_s(self) -> float:
        """Return how long a step would take with a healthy worker in its place.

        A step contains more than the work of this rank, so it is not ``times`` as long.
        """
        return min(max(self.step_s / self.times, self.usual_step_s), self.step_s)

    @property
    def lost_share(self) -> float:
        """Return the share of a step that is lost to waiting for it."""
        return 1.0 - self.healthy_step_s / self.step_s if self.step_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowDecision:
    """Replace the worker's node, or decide again at ``retry_at_s`` (infinity: on new facts)."""

    convict: bool
    retry_at_s: float
    reason: str


def decide(facts: SlowFacts, rules: SlowRules, growth: GrowthRules) -> SlowDecision:
    """Return whether waiting for the worker has cost, and will cost, more than a change."""
    pause_s = (facts.pause_s or growth.pause_guess_s) * growth.gain_min
    recent = [each for each in facts.convicted if each[0] > facts.now_s - rules.window_s]
    left_s = min(facts.num_steps_left * facts.step_s, facts.next_fault_s)
    won_s = left_s * facts.lost_share
    if won_s < pause_s:
        return _wait(inf, f"would win {won_s:.1f} s and cost {pause_s:.1f} s")
    if len(recent) >= rules.convictions_max:
        return _wait(inf, f"{len(recent)} nodes were left recently for slow workers")
    if recent and recent[-1][1] == facts.node and recent[-1][0] > facts.since_s:
        return _wait(inf, f"node {facts.node[:8]} was left for it already, with no new facts")
    lost_steps = rules.agreed_lost_steps if facts.is_agreed else rules.lost_steps
    price_s = max(pause_s, lost_steps * facts.healthy_step_s)
    lasts_s = rules.steady_s if facts.is_steady else rules.lasts_s
    ripe_s = facts.since_s + max(lasts_s, price_s / facts.lost_share)
    if facts.now_s < ripe_s:
        return _wait(ripe_s, "it may soon be healthy again")
    reason = f"wins {won_s:.1f} s for a pause of {pause_s:.1f} s"
    return SlowDecision(convict=True, retry_at_s=inf, reason=reason)


def _wait(until_s: float, why: str) -> SlowDecision:
    return SlowDecision(convict=False, retry_at_s=until_s, reason=why)
