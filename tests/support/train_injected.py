"""A script in which one rank does something wrong when it is told so, at a phase of a micro-batch.

It is told by a file ``ORDERS/KIND-PHASE-RANK`` in the folder that is its argument: the rank takes
it away and does it, within the step that it is in. Phases are data, forward, backward and update.
"""

import ctypes
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from everstep import ModelPlan, Session, run

PHASES = ("data", "forward", "backward", "update")
#: How long a rank stands still, if it is not ended, and for how many calls it is slow.
STILL_S, SLOW_CALLS = 25, 60
_PACE_S = 0.01
#: Length of a forward pass: half of it more is beyond what a busy machine adds.
_FORWARD_S = 0.05
_NUM_SAMPLES = 4096


class Injector:
    """Does what the files in a folder order of this rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._slow: dict[str, tuple[float, int]] = {}
        #: Numbers that are to be spoiled in the next micro-batch or update.
        self.spoils = ""

    def at(self, phase: str) -> None:
        """Do what is ordered for a phase, if something is."""
        times, left = self._slow.get(phase, (1.0, 0))
        time.sleep((_FORWARD_S if phase == "forward" else _PACE_S) * (times if left else 1.0))
        if left:
            self._slow[phase] = times, left - 1
        for path in self._folder.glob(f"[!d]*-{phase}-{self._rank}"):
            kind = path.name.partition("-")[0]
            path.rename(path.with_name(f"done {time.time():.6f} {path.name}"))
            self._do(kind, phase)

    def _do(self, kind: str, phase: str) -> None:
        deeds: dict[str, Callable[[], object]] = {
            "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
            "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
            # PyDLL keeps the interpreter's lock over the call.
            "gil": lambda: ctypes.PyDLL(None).sleep(STILL_S),
            "idle": lambda: time.sleep(STILL_S),
            "slow1.5": lambda: self._slow.update({phase: (1.5, SLOW_CALLS)}),
            "slow3": lambda: self._slow.update({phase: (3.0, SLOW_CALLS)}),
            # A kernel that never ends; only a GPU has those.
            "kernel": lambda: torch.cuda._sleep(1 << 60),
        }
        if kind in deeds:
            deeds[kind]()
        else:
            self.spoils = kind

    def takes(self, kind: str) -> bool:
        """Return whether this is to be spoiled now; once."""
        found = self.spoils == kind
        if found:
            self.spoils = ""
        return found


class Ordered(torch.autograd.Function):
    """Passes a loss on; in the backward pass an order is looked for."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, injector: Injector) -> Tensor:
        ctx.injector = injector
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.injector.at("backward")
        return (gradient * math.nan if ctx.injector.takes("nan") else gradient), None


class Layers(nn.Module):
    """Two layers, which may be two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"0": nn.Linear(64, 128), "1": nn.Linear(128, 64)})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return x


def keep_stage(model: Any, number: int, num_stages: int) -> None:
    for layer in ("0", "1"):
        if int(layer) * num_stages // 2 != number:
            del model.layers[layer]


PLAN = ModelPlan(
    tensor={"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()}, keep_stage=keep_stage
)


def train(session: Session) -> None:
    """Fit random numbers, with a collective of the script's own in each step."""
    injector = Injector(Path(sys.argv[1]), session.rank)
    numbers = torch.Generator().manual_seed(5)
    inputs = torch.randn(_NUM_SAMPLES, 64, generator=numbers).to(session.device)
    model = session.model(Layers, plan=PLAN)
    optimizer = session.optimizer(lambda named: torch.optim.AdamW(named.values()))

    @optimizer.register_step_post_hook
    def flip(*_: object) -> None:
        if injector.takes("flip"):
            weight = optimizer.param_groups[0]["params"][1].data
            weight.view(torch.int32).view(-1)[0] ^= 1 << 12

    def loss_of(samples: Any) -> Tensor:
        # Before the order: the host waits for the device to take the samples' numbers.
        x = inputs[samples]
        target = x.flip(-1)
        injector.at("forward")
        x = x * (math.nan if injector.takes("nan") else 1.0)
        loss: Tensor = Ordered.apply((model(x) - target).square().mean(), injector)
        return loss

    for _ in session.steps(_NUM_SAMPLES):
        injector.at("data")
        session.train_step(loss_of)
        injector.at("update")
        size = 5 if injector.takes("size") else 4
        if not injector.takes("skip"):
            dist.all_reduce(torch.ones(size, device=session.device))


if __name__ == "__main__":
    run(train)
