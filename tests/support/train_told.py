"""A small model whose script does what it is told: ``STEP:WHAT`` or ``FIRST-LAST:WHAT[:RANK]``.

Within the step, of the micro-batch that has the third of its samples:

- ``nan`` and ``inf`` spoil the loss, ``data`` what the model gets, ``gradient`` the gradient of the
  loss.
- ``weights`` makes weights NaN in the update, as one of finite numbers does that overflows.
  ``flip`` flips a bit of a weight behind it.
- ``wait=FILE`` waits in the first micro-batch until there is such a file.

Behind the step: ``do`` has what else there is. Without a rank all do it, or who has the samples.

``scaler`` among the arguments has a ``GradScaler`` scale the loss, and ``width=N`` sets the width
of the model. With ``evaluate`` each rank looks at all samples behind each step.
"""

from __future__ import annotations

import copy
import io
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.parallel import DistributedDataParallel

from everstep import ModelPlan, Session, run
from workers.data import DataOrder

INPUTS = torch.linspace(-1, 1, 128).reshape(64, 2)
OPTIONS: dict[str, str] = dict(
    one.split("=", 1) for one in sys.argv[1:] if "=" in one and ":" not in one
)


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
        width = int(OPTIONS.get("width", 6))
        last = nn.Sequential(nn.Linear(width, 2))
        last.register_buffer("scale", torch.tensor([2.0, 3.0]))
        self.layers = nn.ModuleDict({"0": nn.Linear(2, width), "1": last})

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


class Orders:
    """Orders of the arguments to this rank."""

    def __init__(self, rank: int) -> None:
        self._of_step: dict[int, list[str]] = {}
        for steps, what, *ranks in (each.split(":") for each in sys.argv[1:] if ":" in each):
            first, _, last = steps.partition("-")
            for step in range(int(first), int(last or first) + 1):
                if not ranks or int(ranks[0]) == rank:
                    self._of_step.setdefault(step, []).append(what)

    def of(self, step: int) -> list[str]:
        """Return what is to be done in a step, and behind it."""
        return self._of_step.get(step, [])


def spoil(loss: Tensor, told: list[str]) -> Tensor:
    """Return a loss as it is told."""
    for how in told:
        if how == "gradient":
            loss = BadGradient.apply(loss)
        elif how in ("nan", "inf"):
            loss = loss * float(how)
    return loss


def evaluate(model: Any) -> None:
    """Look at all samples, if that is told; it leaves the weights gathered on every rank."""
    if "evaluate" in sys.argv:
        with torch.no_grad():
            model(INPUTS)


def wait(told: list[str]) -> None:
    """Wait for files as it is told."""
    for path in (Path(what.removeprefix("wait=")) for what in told if what.startswith("wait=")):
        while not path.exists():
            time.sleep(0.02)


def spoil_weights(optimizer: torch.optim.Optimizer, told: list[str]) -> None:
    """Change weights as it is told."""
    weights = [one.data for one in optimizer.param_groups[0]["params"]]
    if "weights" in told:
        for one in weights:
            one.fill_(math.nan)
    if "flip" in told:
        weights[1].view(torch.int32).view(-1)[0] ^= 1 << 12


def train(session: Session) -> None:
    """Train, and do what the arguments say."""
    settings, orders = session.settings, Orders(session.rank)
    model = session.model(Layers, plan=PLAN)
    optimizer = session.optimizer(lambda named: torch.optim.AdamW(named.values()))
    if "scaler" in sys.argv:
        session.register("scaler", GradScaler("cpu", init_scale=4.0))
    batch = settings.train.global_batch
    order = DataOrder(seed=settings.data.seed, num_samples=len(INPUTS), global_batch=batch)

    @optimizer.register_step_post_hook
    def break_weights(*_: object) -> None:
        spoil_weights(optimizer, orders.of(session.step + 1))

    def loss_of(samples: Any) -> Tensor:
        told = orders.of(session.step + 1)
        wait(told)
        if order.step(session.step + 1)[2] not in samples:
            told = []
        inputs = INPUTS[samples] * (math.nan if "data" in told else 1.0)
        loss: Tensor = (model(inputs) - 0.5).square().mean()
        return spoil(loss, told)

    for step in session.steps(len(INPUTS)):
        session.train_step(loss_of)
        if session.rank == 0 and step.is_skipped:
            print(f"skipped {step.number}")
        evaluate(model)
        for what in orders.of(step.number):
            if do(what, session, model, optimizer):
                return


#: Things that look like whole weights and are not.
PICKLED: dict[str, Callable[[Any, Any], Any]] = {
    "state_dict": lambda model, _: model.state_dict(),
    "layer": lambda model, _: model.layers["0"].state_dict(),
    "parameters": lambda model, _: model.reshard() or dict(model.named_parameters()),
    "copies": lambda model, _: model.reshard() or [one.clone() for one in model.parameters()],
    "optimizer": lambda _, optimizer: optimizer.state_dict(),
}
WRAPPERS = {"ddp": DistributedDataParallel, "fsdp": FullyShardedDataParallel}


def do(what: str, session: Session, model: Any, optimizer: Any) -> bool:
    """Do one thing; return whether to leave the loop."""
    if what in PICKLED:
        torch.save(PICKLED[what](model, optimizer), io.BytesIO())
    elif what in WRAPPERS:
        WRAPPERS[what](model)
    elif what == "number":
        model.reshard()
        print(float(next(model.parameters()).norm()))
    elif what == "whole":
        # Those who know FSDP do it on all ranks.
        model.layers["0"].state_dict()["weight"].full_tensor()
        copy.deepcopy(model.state_dict())
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        torch.save(whole, io.BytesIO())
        folder = Path(session.save("best")).parent
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "dcp")
    elif what in ("freeze", "thaw"):
        model.layers["0"].requires_grad_(what == "thaw")
    elif what == "save":
        session.save("best")
    elif what == "stop":
        session.stop("enough")
    elif what == "sleep":
        time.sleep(1.5)
    elif what == "divide":
        print(1.0 / 0.0)
    return what == "break"


if __name__ == "__main__":
    run(train, directory="runs/told", steps=8, global_batch=8, micro_batch=2)
