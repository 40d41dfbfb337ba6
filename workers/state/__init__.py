"""The training state of a rank as named local tensors, and as a map of boxes."""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
    from workers.state.buffers import PersistentBuffers
    from workers.state.dtypes import DTYPES
    from workers.state.entries import (
        HostBuffer,
        StateEntry,
        TrainingState,
        local_parameters,
        set_scalars,
    )
    from workers.state.optimizers import (
        CHANGED,
        Optimizers,
        adopt,
        is_elementwise,
        refuse_unfit,
    )
    from workers.state.registered import Registered, Stateful
    from workers.state.replica_shares import ReplicaShare, replicas_of
    from workers.state.whole_vectors import fitted, in_whole_vectors

__all__ = [
    "CHANGED",
    "DTYPES",
    "HostBuffer",
    "Optimizers",
    "PersistentBuffers",
    "Registered",
    "ReplicaShare",
    "StateEntry",
    "Stateful",
    "TrainingState",
    "adopt",
    "fitted",
    "in_whole_vectors",
    "is_elementwise",
    "local_parameters",
    "refuse_unfit",
    "replicas_of",
    "set_scalars",
]

__getattr__ = lazy_door(__name__)
