"""What a step works on: the model as spread over the mesh, its optimizer, its pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from workers.parallel import Mesh, Piece
from workers.state import SteadyState
from workers.train.executor.reduction import Reduction

__all__ = ["Parts"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parts:
    """This rank's part of what is trained.

    Attributes:
        model: The whole model, sharded.
        optimizer: Over ``parameters``.
        pieces: This rank's part of every parameter.
        parameters: The same memory as plain parameters by name, which the optimizer updates.
        reduction: What the tree of the deterministic mode is told.
        mesh: Over which ranks the model is spread.
        device: Where it lies.
        keeps_gathered: Whether gathered parameters are dropped only after the last pass of a
            step.
        state: The tensors of the training state.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    pieces: Sequence[Piece]
    parameters: Mapping[str, nn.Parameter]
    reduction: Reduction
    mesh: Mesh
    device: torch.device
    keeps_gathered: bool
    state: SteadyState

    def prime(self) -> None:
        """Have the optimizer make its state, all zero, so that there is memory to load into.

        Weights are updated on the way: load or initialise them afterwards.
        """
        for parameter in self.parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for state in self.optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()
