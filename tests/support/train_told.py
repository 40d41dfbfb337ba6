"""Train a small model; arguments ``STEP:ACTION`` or ``FIRST-LAST:ACTION[:RANK]`` disturb it.

Actions in the micro-batch that has the third sample of the step:

- ``nan`` and ``inf`` spoil the loss, ``data`` the inputs, ``gradient`` the gradient of the loss.
- ``weights`` makes weights NaN in the update, as an update of finite numbers that overflows does.
  ``flip`` flips a bit of a weight after the update.
- ``wait=FILE`` waits in the first micro-batch until the file exists.

``do`` performs all other actions, after the step. Without RANK every rank acts, or the one that has
the sample.

The argument ``scaler`` scales the loss by a ``GradScaler``, ``width=N`` sets the width of the
model, and ``evaluate`` runs the model over all samples after each step.
"""

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
    """The actions that the arguments give this rank."""

    def __init__(self, rank: int) -> None:
        self._of_step: dict[int, list[str]] = {}
        for steps, what, *ranks in (each.split(":") for each in sys.argv[1:] if ":" in each):
            first, _, last = steps.partition("-")
            for step in range(int(first), int(last or first) + 1):
                if not ranks or int(ranks[0]) == rank:
                    self._of_step.setdefault(step, []).append(what)

    def of(self, step: int) -> list[str]:
        """Return the actions in a step and after it."""
        return self._of_step.get(step, [])


def spoil(loss: Tensor, actions: list[str]) -> Tensor:
    """Return the loss, spoiled by the actions that spoil a loss."""
    for how in actions:
        if how == "gradient":
            loss = BadGradient.apply(loss)
        elif how in ("nan", "inf"):
            loss = loss * float(how)
    return loss


def evaluate(model: Any) -> None:
    """Run the model over all samples, if requested; every rank then has gathered weights."""
    if "evaluate" in sys.argv:
        with torch.no_grad():
            model(INPUTS)


def wait(actions: list[str]) -> None:
    """Wait until the files of all ``wait`` actions exist."""
    for path in (Path(what.removeprefix("wait=")) for what in actions if what.startswith("wait=")):
        while not path.exists():
            time.sleep(0.02)


def spoil_weights(optimizer: torch.optim.Optimizer, actions: list[str]) -> None:
    """Make weights NaN, or flip a bit of one, if an action says so."""
    weights = [one.data for one in optimizer.param_groups[0]["params"]]
    if "weights" in actions:
        for one in weights:
            one.fill_(math.nan)
    if "flip" in actions:
        weights[1].view(torch.int32).view(-1)[0] ^= 1 << 12


def train(session: Session) -> None:
    """Train, and perform the actions of the arguments."""
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
        actions = orders.of(session.step + 1)
        wait(actions)
        if order.step(session.step + 1)[2] not in samples:
            actions = []
        inputs = INPUTS[samples] * (math.nan if "data" in actions else 1.0)
        loss: Tensor = (model(inputs) - 0.5).square().mean()
        return spoil(loss, actions)

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
    """Perform an action; return whether to leave the loop."""
    if what in PICKLED:
        torch.save(PICKLED[what](model, optimizer), io.BytesIO())
    elif what in WRAPPERS:
        WRAPPERS[what](model)
    elif what == "number":
        model.reshard()
        print(float(next(model.parameters()).norm()))
    elif what == "whole":
        # With FSDP, every rank must call these.
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
