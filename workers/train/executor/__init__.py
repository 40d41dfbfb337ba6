"""One optimizer step: micro-batches, reduction, gradient norm, learning rate."""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
    from workers.train.executor.parts import Parts
    from workers.train.executor.quotas import Schedule, schedule
    from workers.train.executor.reduction import Reduction, use_all_to_all, use_tree
    from workers.train.executor.step import Step

__all__ = [
    "Parts",
    "Reduction",
    "Schedule",
    "Step",
    "schedule",
    "use_all_to_all",
    "use_tree",
]

__getattr__ = lazy_door(
    __name__,
    {
        "workers.train.executor.parts": ("Parts",),
        "workers.train.executor.quotas": ("Schedule", "schedule"),
        "workers.train.executor.reduction": ("Reduction", "use_all_to_all", "use_tree"),
        "workers.train.executor.step": ("Step",),
    },
)
