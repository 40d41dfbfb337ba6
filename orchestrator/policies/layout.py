"""Which layout the workers that are left take. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ucp_core.layout import ParallelLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRules:
    """What a layout must satisfy: the degrees of the axes that do not follow from the workers.

    Attributes:
        dp_replicate: Full copies of the model.
        tp: Tensor-parallel ways.
        pp: Pipeline stages.
    """

    dp_replicate: int = 1
    tp: int = 1
    pp: int = 1

    @property
    def multiple(self) -> int:
        """Return the number that workers come in multiples of."""
        return self.dp_replicate * self.tp * self.pp

    def __str__(self) -> str:
        """Return the degrees above 1, as the configuration names them."""
        degrees = ((field.name, getattr(self, field.name)) for field in fields(self))
        used = [f"parallel.{name}={degree}" for name, degree in degrees if degree > 1]
        return " x ".join(used) or "no fixed degree"


def choose(num_workers: int, rules: LayoutRules) -> ParallelLayout | None:
    """Return the layout that uses the most of ``num_workers``; None if they are too few for any.

    Every degree of sharding is legal (quotas of micro-batches may be uneven), so only the fixed
    axes can leave a worker out. Those stay standbys.
    """
    dp_shard = num_workers // rules.multiple
    if not dp_shard:
        return None
    return ParallelLayout(
        dp_replicate=rules.dp_replicate, dp_shard=dp_shard, tp=rules.tp, pp=rules.pp
    )


def usable(num_workers: int, rules: LayoutRules) -> int:
    """Return how many of ``num_workers`` the chosen layout would use, 0 if there is none."""
    return num_workers - num_workers % rules.multiple
