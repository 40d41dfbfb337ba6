"""Fills an attempt's state: from a version of the run, another checkpoint, or with new values."""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
    from workers.train.loading.filling import Initialise, fill, set_optimizer, start_from
    from workers.train.loading.init_from import INITIAL, Initial
    from workers.train.loading.restore import (
        LIVE_STATE,
        Restored,
        Target,
        UnloadableSignal,
        restore_state,
    )

__all__ = [
    "INITIAL",
    "LIVE_STATE",
    "Initial",
    "Initialise",
    "Restored",
    "Target",
    "UnloadableSignal",
    "fill",
    "restore_state",
    "set_optimizer",
    "start_from",
]

__getattr__ = lazy_door(__name__)
