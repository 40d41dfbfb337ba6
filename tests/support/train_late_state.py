"""A training script whose optimizer keeps something new from step 4 on, once a file is there."""

import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from everstep import Session, run

LATE_STEP = 4


class LateSGD(torch.optim.SGD):
    """Plain SGD that begins late to remember what it did."""

    num_steps = 0

    def step(self, closure: Any = None) -> Any:
        """Update, and remember."""
        loss = super().step(closure)
        self.num_steps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if self.num_steps >= LATE_STEP:
                    self.state[parameter]["last"] = parameter.detach().clone()
        return loss


def train(session: Session) -> None:
    """Wait before the late step until it is allowed."""
    model = session.model(lambda: nn.Linear(4, 4))
    session.optimizer(lambda parameters: LateSGD(parameters.values()), elementwise=True)
    for step in session.steps(100):
        while step.number == LATE_STEP and not Path(session.settings.data.source).exists():
            time.sleep(0.005)
        for samples in step.micro_batches():
            step.backward(model(torch.ones(len(samples), 4)).square().mean(), tokens=1)
        step.apply()


if __name__ == "__main__":
    run(train)
