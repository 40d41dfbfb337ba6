"""What a step works on: the sharded model with its optimizers."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from workers.parallel import LocalShard, Mesh
from workers.state import Optimizers, PersistentBuffers, Registered, TrainingState
from workers.train.executor.pipeline import Pipeline
from workers.train.executor.rank_calls import RankCalls
from workers.train.executor.reduction import Reduction

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
    rank_calls: RankCalls
    pipeline: Pipeline | None = None

    def try_unknown(self) -> None:
        """Raise ``StateError`` if optimizers of other libraries have state that cannot be saved.

        They would say so after the first step. Weights have no values yet, and the optimizers are
        as before.
        """
        if self.optimizers.are_known:
            return
        with torch.compiler.set_stance("force_eager"):
            self.prime()

    def prime(self) -> None:
        """Make the optimizers allocate their state, all zero; weights stay as they are.

        Raises:
            StateError: They keep a value that cannot be saved in shards.
        """
        for parameter in self.parameters.values():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        for optimizer in self.optimizers.every:
            # A kind of one's own may count its steps, there or in its groups.
            attributes = dict(vars(optimizer))
            groups = [dict(group) for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                own = {key: value for key, value in group.items() if key != "params"}
                group.update(copy.deepcopy(own), lr=0.0 * group["lr"])
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                group.clear()
                group.update(values)
            vars(optimizer).clear()
            vars(optimizer).update(attributes)
        self.state.entries()
        for optimizer in self.optimizers.every:
            for state in optimizer.state.values():
                for value in state.values():
                    if isinstance(value, torch.Tensor):
                        value.zero_()
