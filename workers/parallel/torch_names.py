"""torch's names that this room uses and torch does not promise. Checked on 2.11, 2.13 to 2.15."""

from __future__ import annotations

from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.utils._pytree import tree_map

__all__ = ["StridedShard", "tree_map"]
