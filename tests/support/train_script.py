"""Fit a small network to a known function with torch."""

import math

import torch
from torch import nn
from torch.nn import functional

from everstep import Session, run

STEPS = 60
NUM_MICRO_BATCHES = 4
MICRO_BATCH = 8


def build_model() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
    model[0].bias.requires_grad_(False)
    return model


def load_data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.rand(1000, 2, generator=generator) * 2 - 1
    targets = torch.sin(math.pi * inputs[:, :1]) * inputs[:, 1:]
    return inputs, targets


def train(session: Session) -> None:
    inputs, targets = load_data()
    torch.manual_seed(0)
    model = session.model(build_model)
    session.optimizer(lambda parameters: torch.optim.AdamW(parameters.values()))
    for step in session.steps(len(inputs)):
        for samples in step.micro_batches():
            loss = functional.mse_loss(model(inputs[samples]), targets[samples])
            step.backward(loss, tokens=len(samples))
        step.apply()
    with torch.no_grad():
        print(f"loss {functional.mse_loss(model(inputs), targets):.6f}")


if __name__ == "__main__":
    run(train, steps=STEPS, global_batch=NUM_MICRO_BATCHES * MICRO_BATCH, micro_batch=8, lr=0.02)
