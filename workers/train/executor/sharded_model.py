"""What a step works on: the sharded model with its optimizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from workers.parallel import LocalShard, Mesh, Pipeline
from workers.state import (
    Optimizers,
    PersistentBuffers,
    Registered,
    TrainingState,
    refuse_unsavable,
)
from workers.train.executor.rank_calls import RankCalls
from workers.train.executor.reduction import Reduction
from workers.train.executor.whole_gradients import WholeGradients

__all__ = ["ShardedModel"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardedModel:
    """A sharded model with its optimizers, as this rank holds them.

    Attributes:
        model: The whole model, or this rank's pipeline stage of it, sharded.
        shapes: Shapes of all parameters of the whole model, by name.
        optimizers: The optimizers over ``parameters``.
        shards: This rank's shard of every parameter.
        parameters: The shards as plain parameters by name, in the same memory.
        reduction: State of the deterministic reduction.
        mesh: The ranks that the model is sharded over.
        device: The device that it is on.
        keeps_gathered: Whether parameters stay gathered until the last pass of a step.
        state: The tensors of the training state.
        registered: State of the script, beside them.
        buffers: Persistent buffers of the model.
        whole: Gradients of the parameters that are not sharded.
        rank_calls: Notes what the model asks about ranks.
        pipeline: Runs micro-batches through the stages; None if the model is whole.
    """

    model: nn.Module
    shapes: Mapping[str, tuple[int, ...]]
    optimizers: Optimizers
    shards: Sequence[LocalShard]
    parameters: Mapping[str, nn.Parameter]
    reduction: Reduction
    mesh: Mesh
    device: torch.device
    keeps_gathered: bool
    state: TrainingState
    registered: Registered
    buffers: PersistentBuffers
    whole: WholeGradients
    rank_calls: RankCalls
    pipeline: Pipeline | None = None

    def try_unknown(self) -> None:
        """Raise ``StateError`` if optimizers of other libraries have state that cannot be saved.

        They would say so after the first step, or lose it. They and the weights are as before.
        """
        with torch.compiler.set_stance("force_eager"):
            for optimizer in self.optimizers.unknown:
                refuse_unsavable(optimizer, self.shards, self.parameters)

    def prime(self) -> None:
        """Make the optimizers allocate their state, all zero; weights stay as they are.

        Raises:
            StateError: They keep a value that cannot be saved in shards.
        """
        self.optimizers.prime()
        self.state.entries()
