"""Choose how often to take a snapshot, and how often to persist one.

Pure. A failure costs half an interval of redone work on average, and a snapshot costs the time for
which it stalls training. Both are measured, so the interval that balances them is known (Young
1974, Daly 2006). The two tiers serve different failures: memory serves almost all, and only the
others need storage. Whatever the failure rates, both tiers together stay within a budget of step
time, but never risk more than ten minutes of work for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from orchestrator.fault_kinds import FaultKind, Loss
from workers.protocol import Pace, SaveCosts

#: Smaller changes do not pay: at half or twice Young's interval, the cost is a quarter more.
_WORTH: Final = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """The measured costs of one tier."""

    stall_s: float  #: How long one save stalls training; 0.0 if it could not be measured.
    busy_s: float  #: How long one save takes, from its start to its commit.


@dataclass(frozen=True, slots=True, kw_only=True)
class Redundancy:
    """How well memory protects against lost nodes, before storage is needed."""

    num_nodes: int
    group_nodes: int  #: Nodes that protect each other; 1 if nothing protects a node.
    tolerance: int  #: How many nodes of a group may be lost at once.
    reprotect_s: float  #: How long after a loss the group is whole again.


@dataclass(frozen=True, slots=True, kw_only=True)
class CadenceFacts:
    """The inputs of the decision."""

    step_s: float  #: Smoothed duration of a step, without saves.
    #: The tier in memory; None if there is none, and storage serves every failure.
    snapshot: Tier | None
    persist: Tier
    observed_s: float  #: How long failures have been counted.
    num_process_faults: int  #: Workers that died or hung on living nodes in that time.
    num_node_faults: int
    num_uncovered: int  #: Recoveries that memory could not serve.
    redundancy: Redundancy
    #: Steps between two snapshots, as configured; 0 to choose them.
    snapshot_steps: int = 0
    persist_steps: int = 0  #: The same for checkpoints.


@dataclass(frozen=True, slots=True, kw_only=True)
class CadenceRules:
    """The choices that the user leaves open, the limits, and the prior before any observation."""

    has_snapshots: bool = True  #: Whether snapshots are taken at all.
    chooses_snapshots: bool = False  #: Whether to choose their interval.
    chooses_checkpoints: bool = False  #: Whether to choose the interval of checkpoints.
    #: Largest share of step time for which both tiers together may stall training.
    cost_share_max: float = 0.02
    #: Snapshots that stall less than this share are taken even if failures are too rare to justify
    #: them: step times vary by more, and people notice a redone step.
    cost_share_free: float = 0.01
    #: How much observation the prior is worth: a day, so from the second day on the run's own
    #: failures weigh more.
    prior_s: float = 86_400.0
    #: Time between faults of one node before any occurred. Llama 3 (arXiv 2407.21783): 419
    #: interruptions of 2,048 nodes in 54 days, one in 6,300 h per node; a quarter of them cost the
    #: node.
    node_fault_s: float = 25_000 * 3600.0
    #: Faults that cost only a process, for each one that costs a node: three of four faults in
    #: DLRover's reports.
    process_share: float = 3.0
    snapshot_s_max: float = 600.0  #: Longest interval of snapshots, however rare failures seem.
    #: Longest interval on storage: an unforeseen failure costs at most this.
    persist_s_max: float = 600.0
    #: Cost of a second of storing in the background, in seconds of training: training does not wait
    #: for it, but it uses bandwidth and processors.
    busy_cost: float = 0.02
    #: How long snapshots are unprotected after a node is lost. In measurements the run completed a
    #: step after 1 to 5 s, and it copies the first step at once.
    reprotect_s: float = 10.0

    @property
    def chooses(self) -> bool:
        """Return whether there is an interval to choose."""
        return self.chooses_snapshots or self.chooses_checkpoints


class FaultsSeen(NamedTuple):
    """The faults of a run, by what they cost."""

    num_process: int = 0  #: Workers that died or hung on living nodes.
    num_node: int = 0
    num_uncovered: int = 0  #: Recoveries that memory could not serve.

    def and_incident(self, kind: FaultKind) -> FaultsSeen:
        """Return the counts with one more incident."""
        return self._replace(
            num_process=self.num_process + (kind.loss is Loss.PROCESS),
            num_node=self.num_node + (kind.loss is Loss.NODE),
        )

    def and_load(self, kind: FaultKind | None) -> FaultsSeen:
        """Return the counts with one more load from storage, if a fault of ``kind`` caused it."""
        is_fault = kind is not None and kind.loss is not Loss.NOTHING
        return self._replace(num_uncovered=self.num_uncovered + is_fault)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """The chosen intervals."""

    snapshot_steps: int  #: Steps between two snapshots.
    #: Steps between two checkpoints; a multiple of ``snapshot_steps`` if chosen.
    persist_steps: int
    cost_share: float  #: The expected share of step time for which both stall training.
    lost_share: float  #: The expected share of time that failures cost by redone work.
    reason: str  #: Both choices in a line for people.


def rate_per_s(num_faults: int, observed_s: float, *, prior_rate: float, prior_s: float) -> float:
    """Return the expected failure rate per second, from counts and a prior.

    This is the mean of a gamma distribution whose prior is ``prior_rate`` observed for ``prior_s``:
    it is never zero, and the prior loses weight as observation grows.
    """
    return (num_faults + prior_rate * prior_s) / (observed_s + prior_s)


def uncovered_rate_per_s(redundancy: Redundancy, node_rate_per_s: float) -> float:
    """Return how often a group loses more nodes than it survives, per second.

    There are N / n groups. The first of n nodes fails, and ``tolerance`` more of those left fail
    before the group is whole again: N / n * n! / (n - m - 1)! / m! * rate^(m + 1) * w^m. This holds
    for rates that are small against 1 / w, and is capped by the rate of any node's failure, which
    is the rate without redundancy.
    """
    n, m = redundancy.group_nodes, redundancy.tolerance
    every = redundancy.num_nodes * node_rate_per_s
    if n <= m or m == 0:
        return every
    ways = math.perm(n, m + 1) / math.factorial(m)
    groups = redundancy.num_nodes / n
    rate = groups * ways * node_rate_per_s ** (m + 1) * redundancy.reprotect_s**m
    return min(rate, every)


def interval_s(stall_s: float, rate: float) -> float:
    """Return Young's interval, at which saving costs as much as redone work."""
    return math.sqrt(2 * stall_s / rate) if rate > 0 else math.inf


def decide(facts: CadenceFacts, rules: CadenceRules) -> Cadence:
    """Return the intervals of both tiers, in steps.

    A failure that memory serves costs the work since the last snapshot, any other the work since
    the last checkpoint. Snapshots that are nearly free are taken anyway. Both intervals are
    stretched by one factor until they keep the budget, but not beyond their maximum. Each is at
    least as long as one save of its tier takes. A configured interval stays as it is, and the other
    one gets the rest of the budget.
    """
    asked_s = facts.snapshot_steps * facts.step_s, facts.persist_steps * facts.step_s
    node_rate, process_rate = _rates(facts, rules)
    every_rate = process_rate + node_rate * facts.redundancy.num_nodes
    lost_rate = uncovered_rate_per_s(facts.redundancy, node_rate)
    lost_rate += facts.num_uncovered / (facts.observed_s + rules.prior_s)
    if facts.snapshot is None:
        lost_rate, every_rate = every_rate, 0.0
    snapshot = facts.snapshot or Tier(stall_s=0.0, busy_s=0.0)

    snapshot_s = min(interval_s(snapshot.stall_s, every_rate), rules.snapshot_s_max)
    if rules.cost_share_free:
        snapshot_s = min(snapshot_s, snapshot.stall_s / rules.cost_share_free)
    persist_cost_s = facts.persist.stall_s + rules.busy_cost * facts.persist.busy_s
    persist_s = min(interval_s(persist_cost_s, lost_rate), rules.persist_s_max)
    snapshot_least_s = max(snapshot.busy_s, facts.step_s)
    snapshot_s = asked_s[0] or max(snapshot_s, snapshot_least_s)
    persist_s = asked_s[1] or max(persist_s, facts.persist.busy_s, snapshot_s)
    costs = snapshot.stall_s / snapshot_s, facts.persist.stall_s / persist_s
    stretch = _stretch(costs, asked_s, rules.cost_share_max)
    snapshot_s = asked_s[0] or max(
        min(snapshot_s * stretch, rules.snapshot_s_max), snapshot_least_s
    )
    persist_s = min(persist_s * stretch, rules.persist_s_max)
    persist_s = max(persist_s, facts.persist.busy_s, snapshot_s)

    snapshot_steps = facts.snapshot_steps or _steps(snapshot_s, facts.step_s)
    persist_steps = facts.persist_steps or (
        _steps(persist_s / snapshot_steps, facts.step_s) * snapshot_steps
    )
    snapshot_s, persist_s = snapshot_steps * facts.step_s, persist_steps * facts.step_s
    cost = snapshot.stall_s / snapshot_s + facts.persist.stall_s / persist_s
    in_memory = (
        f"snapshot every {_count(snapshot_steps)} ({snapshot_s:.3g} s: stalls "
        f"{snapshot.stall_s * 1e3:.3g} ms, a failure every {_span(every_rate)}), "
    )
    in_storage = (
        f"checkpoint every {_count(persist_steps)} ({persist_s:.3g} s: stalls "
        f"{facts.persist.stall_s * 1e3:.3g} ms, beyond memory every {_span(lost_rate)})"
    )
    stretched = "the chosen one" if any(asked_s) else "both"
    return Cadence(
        snapshot_steps=snapshot_steps,
        persist_steps=persist_steps,
        cost_share=cost,
        lost_share=every_rate * snapshot_s / 2 + lost_rate * persist_s / 2,
        reason=(
            f"{in_memory if facts.snapshot else ''}{in_storage}; "
            f"{cost:.2%} of step time of {rules.cost_share_max:.2%} allowed"
            + (f", which stretches {stretched}" if stretch > 1 else "")
        ),
    )


def cost_share(
    step_s: float, snapshot_stall_s: float, checkpoint_stall_s: float, *, steps: tuple[int, int]
) -> float:
    """Return the share of step time for which both tiers stall training.

    Args:
        step_s: Duration of a step without saves.
        steps: Steps between two snapshots, and between two checkpoints; 0 if there are none.
    """
    stalls = zip((snapshot_stall_s, checkpoint_stall_s), steps, strict=True)
    return sum(stall_s / (every * step_s) for stall_s, every in stalls if every and step_s)


def over_budget(share: float, rules: CadenceRules, *, steps: tuple[int, int]) -> str:
    """Return a line for people if saving exceeds its budget; "" if not.

    Configured intervals stay as they are: the line only reports their cost.
    """
    if share <= rules.cost_share_max:
        return ""
    return (
        f"saving stalls training for {share:.1%} of step time, above the budget of "
        f"{rules.cost_share_max:.0%}: raise snapshot.every_steps (now {steps[0]}) or "
        f"checkpoint.every_steps (now {steps[1]}), or set them to auto"
    )


def taken_steps(step_s: float, snapshot: Tier, *, every: int) -> int:
    """Return how many steps actually lie between two snapshots.

    If a snapshot is unfinished, or not yet copied by peers, when the next one is due, the next one
    is skipped: a slow link stretches the interval, and nothing queues.

    ``step_s`` is without saves. ``every`` is the configured interval in steps; 0 if there is none.
    """
    if not every or not step_s:
        return every
    # A snapshot is checked once a step, near the step's end.
    busy_steps = round((snapshot.busy_s - snapshot.stall_s) / step_s)
    return every * max(1, math.ceil(busy_steps / every))


def next_pace(
    costs: SaveCosts,
    told: Pace,
    *,
    seen: FaultsSeen,
    now_s: float,
    redundancy: Redundancy,
    rules: CadenceRules,
) -> tuple[Pace, str] | None:
    """Return the intervals to use from now on, and why; None if there is nothing to decide.

    Args:
        costs: Costs of steps and saves that rank 0 measured, and the intervals that it uses.
        told: The intervals that it last got from the controller; 0 for none.
        rules: The choices to make, and the limits.
    """
    # A cost that is not measured is unknown, not zero.
    is_known = costs.checkpoint_busy_s > 0 or not rules.chooses_checkpoints
    is_known &= costs.snapshot_stall_s > 0 or not rules.has_snapshots
    if not rules.chooses or not is_known or not costs.step_s:
        return None
    kept, memory = costs.pace, Tier(stall_s=costs.snapshot_stall_s, busy_s=costs.snapshot_busy_s)
    kept_snapshot_steps = kept.snapshot_steps if rules.has_snapshots else 0
    facts = CadenceFacts(
        step_s=costs.step_s,
        snapshot=memory if rules.has_snapshots else None,
        persist=Tier(stall_s=costs.checkpoint_stall_s, busy_s=costs.checkpoint_busy_s),
        observed_s=now_s,
        num_process_faults=seen.num_process,
        num_node_faults=seen.num_node,
        num_uncovered=seen.num_uncovered,
        redundancy=redundancy,
        snapshot_steps=0 if rules.chooses_snapshots else kept_snapshot_steps,
        persist_steps=0 if rules.chooses_checkpoints else kept.checkpoint_steps,
    )
    found = decide(facts, rules)
    snapshot_steps = checkpoint_steps = 0
    if rules.chooses_snapshots:
        snapshot_steps = settled(told.snapshot_steps or kept.snapshot_steps, found.snapshot_steps)
    if rules.chooses_checkpoints:
        checkpoint_steps = settled(
            told.checkpoint_steps or kept.checkpoint_steps, found.persist_steps
        )
    return Pace(snapshot_steps=snapshot_steps, checkpoint_steps=checkpoint_steps), found.reason


def settled(kept_steps: int, found_steps: int) -> int:
    """Return the interval to use: ignore a small change, because the optimum is flat."""
    least, most = sorted((kept_steps, found_steps))
    return found_steps if most >= _WORTH * least else kept_steps


def _rates(facts: CadenceFacts, rules: CadenceRules) -> tuple[float, float]:
    """Return the failures per second of one node, and of all processes on living nodes."""
    num_nodes = facts.redundancy.num_nodes
    prior = num_nodes / rules.node_fault_s
    nodes = rate_per_s(
        facts.num_node_faults, facts.observed_s, prior_rate=prior, prior_s=rules.prior_s
    )
    processes = rate_per_s(
        facts.num_process_faults,
        facts.observed_s,
        prior_rate=prior * rules.process_share,
        prior_s=rules.prior_s,
    )
    return nodes / num_nodes, processes


def _stretch(costs: Sequence[float], asked_s: Sequence[float], cost_share_max: float) -> float:
    """Return the factor that stretches the chosen intervals to keep the budget."""
    pairs = list(zip(costs, asked_s, strict=True))
    cost = sum(cost for cost, every_s in pairs if not every_s)
    left = cost_share_max - sum(cost for cost, every_s in pairs if every_s)
    if cost <= left or not cost:
        return 1.0
    return cost / left if left > 0 else math.inf


def _steps(every_s: float, step_s: float) -> int:
    """Return an interval in whole steps, rounded up: the budget is a limit."""
    # Subtract a little, so that 3.0000000001 steps do not become 4.
    return max(1, math.ceil(every_s / step_s - 1e-9))


def _count(num_steps: int) -> str:
    return "step" if num_steps == 1 else f"{num_steps} steps"


def _span(rate: float) -> str:
    seconds = 1 / rate if rate else math.inf
    for unit, size_s in (("days", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size_s:
            return f"{seconds / size_s:.3g} {unit}"
    return f"{seconds:.3g} s"
