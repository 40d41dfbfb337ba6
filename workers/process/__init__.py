"""A worker process: its Ray actor, its start, its end."""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
    from workers.process.actor import OPTIONS, Worker
    from workers.process.environment import TUNABLE, VARIABLE, copies_past_caches, tuned
    from workers.process.rest import Bell, Rest, hang_bell, ring

__all__ = [
    "OPTIONS",
    "TUNABLE",
    "VARIABLE",
    "Bell",
    "Rest",
    "Worker",
    "copies_past_caches",
    "hang_bell",
    "ring",
    "tuned",
]

__getattr__ = lazy_door(
    __name__,
    {
        "workers.process.actor": ("OPTIONS", "Worker"),
        "workers.process.environment": ("TUNABLE", "VARIABLE", "copies_past_caches", "tuned"),
        "workers.process.rest": ("Bell", "Rest", "hang_bell", "ring"),
    },
)
