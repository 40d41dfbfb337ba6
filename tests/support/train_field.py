"""A script that meets a NaN, saves its best weights, is killed in the middle, and stops early.

Its first argument is a file: the steps behind ``HALT`` wait until it is there. With a second one,
rank 0 alone calls ``state_dict``.
"""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from everstep import Session, run

#: One of the workers has a NaN in BAD; all save behind SAVE and wait behind HALT; rank 0 asks for
#: the end in the body of STOP.
BAD, SAVE, HALT, STOP = 3, 5, 6, 9
INPUTS = torch.linspace(-1, 1, 128).reshape(64, 2)


def train(session: Session) -> None:
    """Train to the step behind ``STOP``."""
    model = session.model(lambda: nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 2)))
    session.optimizer(lambda named: torch.optim.AdamW(named.values()))

    def loss_of(samples: Any) -> Tensor:
        while session.step == HALT and not Path(sys.argv[1]).exists():
            time.sleep(0.02)
        is_bad = session.step + 1 == BAD and session.rank == session.world_size - 1
        loss: Tensor = (model(INPUTS[samples]) - 0.5).square().mean()
        return loss * math.nan if is_bad else loss

    for step in session.steps(len(INPUTS)):
        session.train_step(loss_of)
        if step.number in (2, SAVE):
            session.save("best")
        if sys.argv[2:] and session.rank == 0:
            torch.save(model.state_dict(), "best.pt")
        if step.number >= STOP and session.rank == 0:
            session.stop("the target is reached")


if __name__ == "__main__":
    run(train, directory="runs/field", steps=40, global_batch=8, micro_batch=2)
