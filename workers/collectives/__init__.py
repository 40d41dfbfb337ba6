"""Recorded, abortable process groups over gloo and NCCL.

``form`` an attempt's groups, use ``torch.distributed`` as usual, ``leave``. ``abort`` ends
every wait of an attempt from outside. What the groups did is in the record ring, which
``read_ring`` reads from any process.
"""

from typing import TYPE_CHECKING, Any

from workers.collectives.errors import AbortedError, CollectiveError, GroupError
from workers.records.ring import read_ring

if TYPE_CHECKING:
    from workers.collectives.attempt import abort, check, form, leave, set_timeout

__all__ = [
    "AbortedError",
    "CollectiveError",
    "GroupError",
    "abort",
    "check",
    "form",
    "leave",
    "read_ring",
    "set_timeout",
]


def __getattr__(name: str) -> Any:
    # A keeper reads rings and never trains: it need not pay 2 s and 200 MB for torch.
    if name in {"abort", "check", "form", "leave", "set_timeout"}:
        from workers.collectives import attempt

        return getattr(attempt, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
