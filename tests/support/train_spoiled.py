"""A script whose numbers are not finite where it is told so: ``STEP:HOW`` or ``FIRST-LAST:HOW``.

``nan`` and ``inf`` spoil the loss of one micro-batch of the step, ``data`` what the model gets, and
``gradient`` the gradient of its loss.
``weights`` makes weights NaN in an update of finite numbers, as one that overflows does.
``flip`` flips a bit of a weight of rank 1 behind the update.
``scaler`` among the arguments has a ``GradScaler`` scale the loss.
``save`` spoils nothing: whole weights are saved behind the step.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

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
        last = nn.Sequential(nn.Linear(6, 2))
        last.register_buffer("scale", torch.tensor([2.0, 3.0]))
        self.layers = nn.ModuleDict({"0": nn.Linear(2, 6), "1": last})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return x


def keep_stage(model: Any, number: int, num_stages: int) -> None:
    """Keep one layer of two, if there are two stages."""
    for layer in ("0", "1"):
        if int(layer) * num_stages // 2 != number:
            del model.layers[layer]


PLAN = ModelPlan(
    tensor={"layers.0": ColwiseParallel(), "layers.1.0": RowwiseParallel()}, keep_stage=keep_stage
)


def spoiled() -> dict[int, str]:
    """Return by step what is spoiled."""
    found: dict[int, str] = {}
    for steps, how in (each.split(":") for each in sys.argv[1:] if ":" in each):
        first, _, last = steps.partition("-")
        found |= dict.fromkeys(range(int(first), int(last or first) + 1), how)
    return found


def spoil_weights(optimizer: torch.optim.Optimizer, how: str, rank: int) -> None:
    """Change weights as it is told."""
    weights = [one.data for one in optimizer.param_groups[0]["params"]]
    if how == "weights":
        for one in weights:
            one.fill_(math.nan)
    elif how == "flip" and rank == 1:
        weights[1].view(torch.int32).view(-1)[0] ^= 1 << 12


def spoil(loss: Tensor, how: str) -> Tensor:
    """Return a loss as it is told."""
    if how == "gradient":
        spoiled: Tensor = BadGradient.apply(loss)
        return spoiled
    return loss * float(how) if how in ("nan", "inf") else loss


def train(session: Session) -> None:
    """Train; the third sample of a step is in the micro-batch that is spoiled."""
    settings, bad = session.settings, spoiled()
    model = session.model(Layers, plan=PLAN)
    optimizer = session.optimizer(lambda named: torch.optim.AdamW(named.values()))
    if "scaler" in sys.argv:
        session.register("scaler", GradScaler("cpu", init_scale=4.0))
    batch = settings.train.global_batch
    order = DataOrder(seed=settings.data.seed, num_samples=len(INPUTS), global_batch=batch)

    @optimizer.register_step_post_hook
    def break_weights(*_: object) -> None:
        spoil_weights(optimizer, bad.get(session.step + 1, ""), session.rank)

    def loss_of(samples: Any) -> Tensor:
        how = bad.get(session.step + 1, "")
        if order.step(session.step + 1)[2] not in samples:
            how = ""
        inputs = INPUTS[samples] * (math.nan if how == "data" else 1.0)
        loss: Tensor = (model(inputs) - 0.5).square().mean()
        return spoil(loss, how)

    for step in session.steps(len(INPUTS)):
        session.train_step(loss_of)
        if bad.get(step.number) == "save":
            session.save("best")
        if session.rank == 0 and step.is_skipped:
            print(f"skipped {step.number}")


if __name__ == "__main__":
    run(train, directory="runs/spoiled", steps=12, global_batch=8, micro_batch=2)
