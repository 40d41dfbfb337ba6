"""What happens between two steps: report, save, load, leave."""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
    from workers.train.boundary.boundary import Boundary, YieldSignal
    from workers.train.boundary.cadence import Signals
    from workers.train.boundary.restore import Restored, UnloadableSignal, restore_state
    from workers.train.boundary.store import CHECKPOINTS, Storing

__all__ = [
    "CHECKPOINTS",
    "Boundary",
    "Restored",
    "Signals",
    "Storing",
    "UnloadableSignal",
    "YieldSignal",
    "restore_state",
]

__getattr__ = lazy_door(
    __name__,
    {
        "workers.train.boundary.boundary": ("Boundary", "YieldSignal"),
        "workers.train.boundary.cadence": ("Signals",),
        "workers.train.boundary.restore": ("Restored", "UnloadableSignal", "restore_state"),
        "workers.train.boundary.store": ("CHECKPOINTS", "Storing"),
    },
)
