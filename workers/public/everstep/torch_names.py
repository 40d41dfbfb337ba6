"""Names of torch that this package uses although they are private. Checked on 2.11, 2.13, 2.15."""

from torch import distributed as dist
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_flatten, tree_unflatten

__all__ = ["default_store", "tree_flatten", "tree_unflatten"]


def default_store() -> dist.Store:
    """Return the store through which the processes of this job found each other."""
    return distributed_c10d._get_default_store()  # noqa: SLF001
