"""Recorded, abortable process groups over gloo and NCCL.

``form`` an attempt's groups, use ``torch.distributed`` as usual, ``leave``. ``abort`` ends
every wait of an attempt from outside. What the groups did is in the record ring, which
``read_ring`` reads from any process.
"""

from workers.collectives.attempt import abort, form, leave
from workers.collectives.errors import AbortedError, CollectiveError, GroupError
from workers.collectives.ring import read_ring

__all__ = ["AbortedError", "CollectiveError", "GroupError", "abort", "form", "leave", "read_ring"]
