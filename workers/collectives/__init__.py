"""Recorded, abortable process groups over gloo and NCCL.

``form`` an attempt's groups, use ``torch.distributed`` as usual, ``leave``. ``abort`` ends
every wait of an attempt from outside. What the groups did is in the record ring, which
``read_ring`` reads from any process.
"""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
    from workers import collectives
    from workers.collectives.errors import AbortedError, CollectiveError, GroupError
    from workers.collectives.forming import abort, check, form, leave, set_timeout

__all__ = [
    "AbortedError",
    "CollectiveError",
    "GroupError",
    "abort",
    "check",
    "collectives",
    "form",
    "leave",
    "set_timeout",
]

__getattr__ = lazy_door(
    __name__,
    {
        "workers": ("collectives",),
        "workers.collectives.forming": ("abort", "check", "form", "leave", "set_timeout"),
        "workers.collectives.errors": ("AbortedError", "CollectiveError", "GroupError"),
    },
)
