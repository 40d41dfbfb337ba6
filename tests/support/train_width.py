"""A script whose model has the width of its first argument."""

from __future__ import annotations

import sys

import torch
from torch import nn

from everstep import Session, run

INPUTS = torch.linspace(-1, 1, 96).reshape(48, 2)


def train(session: Session) -> None:
    """Train to the last step."""
    width = int(sys.argv[1])
    model = session.model(
        lambda: nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 2))
    )
    session.optimizer(lambda named: torch.optim.AdamW(named.values()))
    for _ in session.steps(len(INPUTS)):
        session.train_step(lambda samples: (model(INPUTS[samples]) - 0.5).square().mean())


if __name__ == "__main__":
    run(train, steps=12, global_batch=8, micro_batch=2)
