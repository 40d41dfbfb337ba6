"""A script whose ranks die one after the other, each at its place in a step of four workers.

``[directory, deaths]``: ``deaths`` is a list of ``[rank, phase]``, as JSON; each leaves a file in
``directory``. Phases are "forward" and "backward" of the second micro-batch, while a pipeline has
others open, and "update". The run is over soon after the last death, or after 40 steps without any.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from everstep import ModelPlan, Session, run

NUM_WORKERS = 4
#: Steps of an attempt before a rank may die, and of the run when none is to.
NUM_CALM, NUM_ALONE = 5, 40
WIDTH, NUM_LAYERS = 8, 4
INPUTS = torch.linspace(-1, 1, 64 * WIDTH).reshape(64, WIDTH)


class Death:
    """Ends this process at the place that is its turn, one in an attempt."""

    def __init__(self, session: Session, directory: str, deaths: list[tuple[int, str]]) -> None:
        self.session, self.directory, self.deaths = session, Path(directory), deaths
        self.num_steps = self.num_passes = 0
        self.num_before = self.num_died

    @property
    def num_died(self) -> int:
        """Return how many have died."""
        return len(list(self.directory.glob("died-*")))

    def begin(self) -> None:
        """Note that a step begins."""
        self.num_steps, self.num_passes = self.num_steps + 1, 0

    def come_to(self, phase: str) -> None:
        """Die here if it is this rank's turn."""
        is_ready = self.session.world_size == NUM_WORKERS and self.num_steps > NUM_CALM
        if not is_ready or (phase != "update" and self.num_passes < 2):
            return
        died = self.num_died
        is_first = died == self.num_before
        if is_first and self.deaths[died : died + 1] == [(self.session.rank, phase)]:
            (self.directory / f"died-{died}").touch()
            os.kill(os.getpid(), signal.SIGKILL)


class _Passed(torch.autograd.Function):
    death: Death

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        _Passed.death.come_to("backward")
        return gradient


class Layer(nn.Module):
    """A block whose backward pass is a place to die."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        passed: Tensor = _Passed.apply(x)
        added: Tensor = self.down(self.up(passed).tanh())
        return x + added


class Network(nn.Module):
    """Blocks that stages share."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): Layer() for number in range(NUM_LAYERS)})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x

    def keep_stage(self, number: int, num_stages: int) -> None:
        """Remove the layers of other stages."""
        for layer in range(NUM_LAYERS):
            if layer * num_stages // NUM_LAYERS != number:
                del self.layers[str(layer)]


PLAN = ModelPlan(
    tensor={"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()},
    keep_stage=Network.keep_stage,
)


def train(session: Session) -> None:
    """Fit a function, and die on the way."""
    directory, text = sys.argv[1:3]
    deaths = [(rank, phase) for rank, phase in json.loads(text)]
    death = _Passed.death = Death(session, directory, deaths)
    model = session.model(Network, plan=PLAN)

    def make(named: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(named.values())
        optimizer.register_step_pre_hook(lambda *_: death.come_to("update"))
        return optimizer

    session.optimizer(make)

    def loss_of(indices: Any) -> Tensor:
        death.num_passes += 1
        death.come_to("forward")
        outputs: Tensor = model(INPUTS[indices])
        return (outputs - INPUTS[indices].exp()).square().mean()

    for _ in session.steps(len(INPUTS)):
        death.begin()
        time.sleep(0.02)
        session.train_step(loss_of)
        if session.step >= NUM_ALONE and death.num_died == len(deaths):
            session.stop("all have died")


if __name__ == "__main__":
    run(train)
