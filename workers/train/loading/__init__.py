"""Fill an attempt's state: from a version of the run, another checkpoint, or with new values."""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
    from workers.train.loading.filling import Initialise
    from workers.train.loading.init_from import (
        Needed,
        Start,
        aliases_of,
        load_initial,
        read_whole,
        refuse_uncounted,
    )
    from workers.train.loading.restore import LIVE_STATE, Restored, Target, UnloadableSignal
    from workers.train.loading.state_loader import StateLoader


__getattr__ = lazy_door(__name__)
