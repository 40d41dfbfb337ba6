"""A script that does on some ranks what it is told to; the arguments are ``STEP:WHAT[:RANK]``."""

from __future__ import annotations

import copy
import io
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from everstep import Session, run

INPUTS = torch.linspace(-1, 1, 128).reshape(64, 2)


class Layers(nn.Module):
    """Two layers with a buffer."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 5), nn.Linear(5, 2)])
        self.register_buffer("scale", torch.tensor([2.0]))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale
        return x


def train(session: Session) -> None:
    """Train, evaluate as nanoGPT does, and do what the arguments say."""
    told = [argument.split(":") for argument in sys.argv[1:]]
    model = session.model(Layers)
    optimizer = session.optimizer(lambda named: torch.optim.AdamW(named.values()))

    def loss_of(samples: Any) -> Tensor:
        loss: Tensor = (model(INPUTS[samples]) - 0.5).square().mean()
        return loss

    for step in session.steps(len(INPUTS)):
        session.train_step(loss_of)
        with torch.no_grad():
            # It leaves the weights gathered on every rank.
            model(INPUTS)
        mine = [
            what
            for number, what, *ranks in told
            if int(number) == step.number and (not ranks or session.rank == int(ranks[0]))
        ]
        for what in mine:
            if do(what, session, model, optimizer):
                return


#: Things that look like whole weights and are not.
PICKLED: dict[str, Callable[[Any, Any], Any]] = {
    "state_dict": lambda model, _: model.state_dict(),
    "layer": lambda model, _: model.layers[0].state_dict(),
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
        model.layers[0].state_dict()["weight"].full_tensor()
        copy.deepcopy(model.state_dict())
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        torch.save(whole, io.BytesIO())
        folder = Path(session.save("best")).parent
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "dcp")
    elif what == "norm":
        # The sum over a shard needs the other ranks.
        print(next(model.parameters()).norm().full_tensor())
    elif what in ("freeze", "thaw"):
        model.layers[0].requires_grad_(what == "thaw")
    elif what == "save":
        session.save("best")
    elif what == "stop":
        session.stop("enough")
    elif what == "sleep":
        time.sleep(1.5)
    return what == "break"


if __name__ == "__main__":
    run(train, directory="runs/alone", steps=8, global_batch=8, micro_batch=2)
