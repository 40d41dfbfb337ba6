"""Recorded, abortable process groups over gloo and NCCL.

``form`` an attempt's groups, use ``torch.distributed`` as usual, ``leave``. ``abort`` ends every
wait of an attempt from outside. The record ring shows to any process what the groups do.
"""

from workers.collectives.errors import AbortedError, CollectiveError, GroupError, unreached
from workers.collectives.forming import abort, check, form, leave, set_timeout
from workers.collectives.nccl import share_device

__all__ = [
    "AbortedError",
    "CollectiveError",
    "GroupError",
    "abort",
    "check",
    "form",
    "leave",
    "set_timeout",
    "share_device",
    "unreached",
]
