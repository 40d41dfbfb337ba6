"""Work between two steps: report, save, leave."""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
    from workers.train.boundary.between_steps import UNWRITTEN, Boundary, YieldSignal
    from workers.train.boundary.live_state import Marks, few_values
    from workers.train.boundary.store import StorageWriter


__getattr__ = lazy_door(__name__)
