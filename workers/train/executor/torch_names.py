"""torch's names that this room uses and torch does not promise. Checked on 2.11, 2.13 and 2.14."""

from typing import Final

from torch.distributed import distributed_c10d
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

__all__ = ["ABOUT_RANKS", "DefaultReduceScatter", "ReduceScatter", "distributed_c10d"]

#: In ``distributed_c10d``; every function of torch.distributed about ranks calls it first.
ABOUT_RANKS: Final = "_rank_not_in_group"
