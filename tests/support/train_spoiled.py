"""A script whose numbers are not finite where it is told so: ``STEP:HOW`` or ``FIRST-LAST:HOW``.

``nan`` and ``inf`` spoil the loss of one micro-batch of the step, ``gradient`` its gradient.
``weights`` makes weights NaN in an update of finite numbers, as one that overflows does.
``save`` spoils nothing: whole weights are saved behind the step.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch import Tensor, nn

from everstep import ModelPlan, Session, run
from workers.data import DataOrder

INPUTS = torch.linspace(-1, 1, 128).reshape(64, 2)


class BadGradient(torch.autograd.Function):
    """Returns its input; the gradient is NaN."""

    @staticmethod
    def forward(_ctx: Any, loss: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * math.nan


class Layers(nn.Module):
    """Two layers, which may be two stages of a pipeline, and a buffer on the last."""

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


def spoiled() -> dict[int, str]:
    """Return by step what is spoiled."""
    found: dict[int, str] = {}
    for steps, how in (argument.split(":") for argument in sys.argv[1:]):
        first, _, last = steps.partition("-")
        found |= dict.fromkeys(range(int(first), int(last or first) + 1), how)
    return found


def train(session: Session) -> None:
    """Train; the third sample of a step is in the micro-batch that is spoiled."""
    settings, bad = session.settings, spoiled()
    model = session.model(Layers, plan=ModelPlan(keep_stage=keep_stage))
    optimizer = session.optimizer(lambda named: torch.optim.AdamW(named.values()))
    batch = settings.train.global_batch
    order = DataOrder(seed=settings.data.seed, num_samples=len(INPUTS), global_batch=batch)

    @optimizer.register_step_post_hook
    def break_weights(*_: object) -> None:
        if bad.get(session.step + 1) == "weights":
            for one in optimizer.param_groups[0]["params"]:
                one.data.fill_(math.nan)

    def loss_of(samples: Any) -> Tensor:
        loss: Tensor = (model(INPUTS[samples]) - 0.5).square().mean()
        how = bad.get(session.step + 1, "")
        if order.step(session.step + 1)[2] not in samples or how in ("", "weights", "save"):
            return loss
        return BadGradient.apply(loss) if how == "gradient" else loss * float(how)

    for step in session.steps(len(INPUTS)):
        session.train_step(loss_of)
        if bad.get(step.number) == "save":
            session.save("best")
        if session.rank == 0 and step.is_skipped:
            print(f"skipped {step.number}")


if __name__ == "__main__":
    run(train, directory="runs/spoiled", steps=12, global_batch=8, micro_batch=2)
