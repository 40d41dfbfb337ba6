"""How long a step takes in one layout beside another one, by the work of each rank. Arithmetic."""

from __future__ import annotations

from orchestrator.policies.layout.candidates import LayoutRules
from ucp_core.layout import ParallelLayout


def relative_step(layout: ParallelLayout, rules: LayoutRules) -> float:
    """Return the time of a step, in that of one micro-batch on one worker.

    Each data-parallel rank runs as many passes as the one with the most micro-batches. Stages of a
    pipeline wait for the first and the last ones (1F1B: Narayanan et al., SC 2021). Communication
    is left out.
    """
    if not rules.num_micro_batches:
        return 1 / layout.world_size
    num_passes = -(-rules.num_micro_batches // layout.dp)
    return (num_passes + layout.pp - 1) / (layout.tp * layout.pp)
