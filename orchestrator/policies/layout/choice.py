"""Which layout the workers that are left take. Pure arithmetic."""

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


def choose(num_workers: int, rules: LayoutRules) -> ParallelLayout | None:
    """Return the layout that uses the most of ``num_workers``; None if they are too few for any.

    Every degree of sharding is legal (quotas of micro-batches may be uneven), so only the fixed
    axes can leave a worker out. Those stay standbys.
    """
    dp_shard = num_workers // rules.dp_replicate
    return ParallelLayout(dp_replicate=rules.dp_replicate, dp_shard=dp_shard) if dp_shard else None


def usable(num_workers: int, rules: LayoutRules) -> int:
    """Return how many of ``num_workers`` the chosen layout would use, 0 if there is none."""
    return num_workers - num_workers % rules.dp_replicate
