"""Represent the training state of a rank as named local tensors and their boxes."""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
    from workers.state.buffers import PersistentBuffers
    from workers.state.entries import (
        DTYPES,
        TORCH_DTYPES,
        HoldsState,
        HostBuffer,
        StateEntry,
        TrainingState,
        local_parameters,
        set_scalars,
    )
    from workers.state.optimizers import (
        CHANGED,
        UNSTARTED,
        Optimizers,
        adopt,
        refuse_unfit,
        take_whole_vectors,
    )
    from workers.state.plain_torch import PlainState, make_optimizer_state
    from workers.state.registered import Registered, Stateful, decode, encode
    from workers.state.replica_shares import ReplicaShare, replicas_of
    from workers.state.twins import refuse_unsavable
    from workers.state.whole_shapes import saying_whole_shapes
    from workers.state.whole_vectors import fitted, in_whole_vectors, reserve


__getattr__ = lazy_door(__name__)
