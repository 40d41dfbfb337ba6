"""The sharded model of an attempt, with and without its optimizers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ucp_core.native import AVERAGE
from workers.parallel import LocalShard, Mesh, Pipeline, SequenceParts, Units, Used
from workers.state import (
    Optimizers,
    PersistentBuffers,
    Registered,
    TrainingState,
    refuse_unsavable,
)
from workers.train.executor.average import Average
from workers.train.executor.rank_calls import RankCalls
from workers.train.executor.reduction import Reduction
from workers.train.executor.tensor_replicas import TensorReplicas
from workers.train.executor.trained import Trained
from workers.train.executor.whole_gradients import WholeGradients


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BuiltModel:
    """A sharded model without values."""

    model: nn.Module  #: The whole model, or this rank's pipeline stage of it, sharded.
    #: The object that the script calls: ``model``, or a stage that stands for the whole model.
    called: nn.Module
    shapes: Mapping[str, tuple[int, ...]]  #: Shapes of all parameters of the whole model, by name.
    shards: Sequence[LocalShard]  #: This rank's shards of parameters.
    buffers: PersistentBuffers  #: Persistent buffers of ``model``.
    keeps_gathered: bool  #: Whether parameters stay gathered until the last pass of a step.
    sequence: SequenceParts  #: This rank's parts of sequences.
    pipeline: Pipeline | None  #: Runs micro-batches through the stages; None if the model is whole.
    reduction: Reduction  #: State of the deterministic reduction.
    #: Gathers and reduces units as one, by the number of this rank's stage.
    units: Mapping[int, Units]
    used: Used  #: The parameters that the step used.
    mesh: Mesh  #: The ranks over which the model is sharded.
    device: torch.device
    #: Files that Hugging Face keeps next to the weights of such a model.
    documents: Mapping[str, bytes]
    #: Persistent buffers of the whole model by name, and its parameters' other names.
    relations: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardedModel(BuiltModel):
    """A sharded model with its optimizers, as this rank holds them."""

    #: The shards as plain parameters by name, in the same memory.
    parameters: Mapping[str, nn.Parameter]
    optimizers: Optimizers  #: The optimizers over ``parameters``.
    state: TrainingState  #: The tensors of the training state.
    registered: Registered  #: Registered state of the script.
    whole: WholeGradients  #: Gradients of the parameters that are not sharded.
    rank_calls: RankCalls  #: Records the model's calls about ranks.
    tensor_replicas: TensorReplicas  #: Compares gradients that must be equal.
    trained: Trained  #: Knows which parameters train.
    average: Average  #: Average of the weights, if the script has one.

    def try_unknown(self) -> None:
        """Raise ``StateError`` if optimizers of other libraries have state that cannot be saved.

        Otherwise this would show after the first step, or the state would be lost. They and the
        weights stay unchanged.
        """
        with torch.compiler.set_stance("force_eager"):
            for optimizer in self.optimizers.unknown:
                refuse_unsavable(optimizer, self.shards, self.parameters)

    def all_relations(self) -> dict[str, Any]:
        """Return the names that are frozen, buffers or tied, in the form of a version."""
        averages = [f"{AVERAGE}{name}" for name in self.average.names]
        beside = {**self.relations, "extra": averages}
        beside = {name: one for name, one in beside.items() if one}
        # An empty list says that all parameters train; older versions say nothing.
        return {"frozen": list(self.trained.frozen), **beside}

    def prime(self) -> None:
        """Make the optimizers allocate their state, all zero; weights stay unchanged."""
        self.optimizers.prime()
        self.state.entries()
