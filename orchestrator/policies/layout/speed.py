"""How long a step takes in a layout: as seen in this run, else by the work of each rank. Pure.

What was seen has everything in it: the model, the devices, the network. A layout that was not seen
is compared with the nearest one that was, by ``relative_step``, which leaves out communication.
"""

from __future__ import annotations

from math import log

from orchestrator.policies.layout.candidates import NAMED, LayoutRules
from ucp_core.layout import ParallelLayout


def relative_step(layout: ParallelLayout, rules: LayoutRules) -> float:
    """Return the time of a step, in that of one micro-batch on one worker.

    Each data-parallel rank runs as many passes as the one with the most micro-batches. Stages of a
    pipeline wait for the first and the last ones, less so if each worker has several, interleaved
    (1F1B: Narayanan et al., SC 2021). Communication is left out.
    """
    if not rules.num_micro_batches:
        return 1 / layout.world_size
    num_passes = -(-rules.num_micro_batches // layout.dp)
    bubble = (layout.pp - 1) / rules.stages_per_worker
    return (num_passes + bubble) / (layout.tp * layout.pp * layout.cp)


def expected_step_s(layout: ParallelLayout, rules: LayoutRules) -> float:
    """Return the seconds of a step: as seen, or scaled from the nearest layout that was.

    0.0 if no step was seen.
    """
    if not rules.steps:
        return 0.0
    seen, step_s = min(rules.steps, key=lambda each: _distance(each[0], layout))
    return step_s * relative_step(layout, rules) / relative_step(seen, rules)


def step_ratio(then: ParallelLayout, now: ParallelLayout, rules: LayoutRules) -> float:
    """Return the duration of a step ``then`` over that of one ``now``, to weigh a change.

    More workers are what the user asked for, so their work alone counts: that steps were slower
    with them may be the fault of that time. Any other layout has to be faster by what was seen.
    """
    if then.world_size > now.world_size or not rules.steps:
        return relative_step(then, rules) / relative_step(now, rules)
    return expected_step_s(then, rules) / expected_step_s(now, rules)


def was_seen(degrees: ParallelLayout, rules: LayoutRules) -> bool:
    """Return whether a step was seen with these degrees, whatever ``dp_shard`` was."""
    return any(not _distance(seen, degrees)[0] for seen, _ in rules.steps)


def step_text(layout: ParallelLayout, rules: LayoutRules) -> str:
    """Return how long a step takes, as the end of a line for people; "" if no step was seen."""
    if not rules.steps:
        return ""
    how = "took" if layout in dict(rules.steps) else "would take about"
    return f"; a step {how} {expected_step_s(layout, rules):.3g} s"


def _distance(one: ParallelLayout, other: ParallelLayout) -> tuple[float, float]:
    """Return how far the degrees are apart that are named, and how far ``dp_shard`` is."""
    far = [abs(log(getattr(one, axis) / getattr(other, axis))) for axis in (*NAMED, "dp_shard")]
    return sum(far[:-1]), far[-1]
