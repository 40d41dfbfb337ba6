"""A script that saves whole weights behind its last step, on one or two pipeline stages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from everstep import ModelPlan, Session, run

INPUTS = torch.linspace(-1, 1, 128).reshape(64, 2)


class Layers(nn.Module):
    """Two layers that may be two stages, and a buffer on the last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"0": nn.Linear(2, 5), "1": nn.Linear(5, 2)})
        self.layers["1"].register_buffer("scale", torch.tensor([2.0, 3.0]))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return x


def keep_stage(model: Any, number: int, num_stages: int) -> None:
    """Keep one layer of two, if there are two stages."""
    for layer in ("0", "1"):
        if int(layer) * num_stages // 2 != number:
            del model.layers[layer]


def train(session: Session) -> None:
    """Train to the last step, and save."""
    model = session.model(Layers, plan=ModelPlan(keep_stage=keep_stage))
    session.optimizer(lambda named: torch.optim.AdamW(named.values()))

    def loss_of(samples: Any) -> Tensor:
        loss: Tensor = (model(INPUTS[samples]) - 0.5).square().mean()
        return loss

    for step in session.steps(len(INPUTS)):
        session.train_step(loss_of)
        if step.number in (2, session.settings.train.steps):
            session.save("best")


if __name__ == "__main__":
    run(train, directory="runs/saves", steps=8, global_batch=8, micro_batch=2)
