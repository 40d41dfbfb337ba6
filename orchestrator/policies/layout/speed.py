"""How long a step takes in a layout, as measured in this run or by the work of each rank.

Pure. A measured time includes everything: the model, the devices, the network. A layout without a
measurement is compared with the nearest measured layout by ``relative_step``, which ignores
communication.
"""

from math import log

from orchestrator.policies.layout.candidates import NAMED, LayoutRules
from ucp_core.layout import ParallelLayout


def relative_step(layout: ParallelLayout, rules: LayoutRules) -> float:
    """Return the time of a step, relative to one micro-batch on one worker.

    Each data-parallel rank runs as many passes as the one with the most micro-batches. Stages of a
    pipeline wait at its start and end, for a shorter time if each worker has several interleaved
    ones (1F1B: Narayanan et al., SC 2021). Communication is ignored.
    """
    if not rules.num_micro_batches:
        return 1 / layout.world_size
    num_passes = -(-rules.num_micro_batches // layout.dp)
    bubble = (layout.pp - 1) / rules.stages_per_worker
    return (num_passes + bubble) / (layout.tp * layout.pp * layout.cp)


def expected_step_s(layout: ParallelLayout, rules: LayoutRules) -> float:
    """Return the seconds of a step: measured, or scaled from the nearest measured layout.

    Return 0.0 if no step was measured.
    """
    if not rules.steps:
        return 0.0
    seen, step_s = min(rules.steps, key=lambda each: _distance(each[0], layout))
    return step_s * relative_step(layout, rules) / relative_step(seen, rules)


def step_ratio(then: ParallelLayout, now: ParallelLayout, rules: LayoutRules) -> float:
    """Return the step time of ``then`` divided by that of ``now``, to judge a change.

    If ``then`` has more workers, only the amount of work counts: the user wants more workers, and
    slower steps measured with them may have had a passing cause. Any other layout must be faster as
    measured.
    """
    if then.world_size > now.world_size or not rules.steps:
        return relative_step(then, rules) / relative_step(now, rules)
    return expected_step_s(then, rules) / expected_step_s(now, rules)


def was_seen(degrees: ParallelLayout, rules: LayoutRules) -> bool:
    """Return whether a step was measured with these degrees, for any ``dp_shard``."""
    return any(not _distance(seen, degrees)[0] for seen, _ in rules.steps)


def step_text(layout: ParallelLayout, rules: LayoutRules) -> str:
    """Return how long a step takes, as the end of a line for people; "" if none was measured."""
    if not rules.steps:
        return ""
    how = "took" if layout in dict(rules.steps) else "would take about"
    return f"; a step {how} {expected_step_s(layout, rules):.3g} s"


def _distance(one: ParallelLayout, other: ParallelLayout) -> tuple[float, float]:
    """Return how far apart the configured degrees are, and how far ``dp_shard`` is."""
    far = [abs(log(getattr(one, axis) / getattr(other, axis))) for axis in (*NAMED, "dp_shard")]
    return sum(far[:-1]), far[-1]
