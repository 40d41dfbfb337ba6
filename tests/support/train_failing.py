"""A training script with a bug: it divides by zero in step 3, on rank 1 only."""

import torch
from torch import nn

from everstep import Session, run


def faulty(step: int, rank: int) -> float:
    return 1.0 / (0 if (step, rank) == (3, 1) else 1)


def train(session: Session) -> None:
    model = session.model(lambda: nn.Linear(4, 4))
    session.optimizer(lambda parameters: torch.optim.SGD(parameters.values()))
    for step in session.steps(100):
        for samples in step.micro_batches():
            weight = faulty(step.number, session.rank)
            step.backward(model(torch.ones(len(samples), 4)).square().mean() * weight, tokens=1)
        step.apply()


if __name__ == "__main__":
    run(train)
