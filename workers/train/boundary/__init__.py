"""What happens between two steps: report, save, load, leave."""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
    from workers.train.boundary.between_steps import UNWRITTEN, Boundary, YieldSignal
    from workers.train.boundary.init_from import INITIAL, Initial, Needed, load_initial
    from workers.train.boundary.live_state import Marks
    from workers.train.boundary.restore import Restored, Target, UnloadableSignal, restore_state
    from workers.train.boundary.store import StorageWriter

__all__ = [
    "INITIAL",
    "UNWRITTEN",
    "Boundary",
    "Initial",
    "Marks",
    "Needed",
    "Restored",
    "StorageWriter",
    "Target",
    "UnloadableSignal",
    "YieldSignal",
    "load_initial",
    "restore_state",
]

__getattr__ = lazy_door(__name__)
