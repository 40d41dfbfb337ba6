"""Which layout the workers that are left should take.

Pure arithmetic. The machine asks at every formation; the answer says why, because an elastic
system whose choices cannot be read is not trusted.
"""

from __future__ import annotations

from dataclasses import dataclass

from ucp_core.layout import ParallelLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRules:
    """What a layout must satisfy.

    Attributes:
        dp_replicate: Full copies of the model; fixed, so the workers come in multiples of it.
    """

    dp_replicate: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutChoice:
    """A layout, and why it was taken. ``num_idle`` workers of those offered stay standbys."""

    layout: ParallelLayout
    num_idle: int
    reason: str


def choose(num_workers: int, rules: LayoutRules) -> LayoutChoice | None:
    """Return the layout that uses the most of ``num_workers``; None if they are too few for any.

    Every degree of sharding is legal (quotas of micro-batches may be uneven), so only the fixed
    axes can leave a worker out.
    """
    dp_shard, num_idle = divmod(num_workers, rules.dp_replicate)
    if dp_shard == 0:
        return None
    layout = ParallelLayout(dp_replicate=rules.dp_replicate, dp_shard=dp_shard)
    reason = f"all {num_workers} workers"
    if num_idle:
        reason = (
            f"{layout.world_size} of {num_workers} workers: dp_replicate={rules.dp_replicate} "
            f"takes multiples of {rules.dp_replicate}"
        )
    return LayoutChoice(layout=layout, num_idle=num_idle, reason=reason)


def usable(num_workers: int, rules: LayoutRules) -> int:
    """Return how many of ``num_workers`` the chosen layout would use, 0 if there is none."""
    return num_workers - num_workers % rules.dp_replicate
