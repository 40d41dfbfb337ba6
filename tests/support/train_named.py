"""Trains a module that has just the tensors of a checkpoint, whose path is its argument."""

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import ucp_core
from everstep import Session, run

NUM_SAMPLES, BATCH, MICRO_BATCH, LR = 64, 8, 2, 1e-2


class Named(nn.Module):
    """Parameters by name; each is drawn to a number that depends on the samples."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            *path, last = name.split(".")
            module: nn.Module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(last, nn.Parameter(torch.zeros(shape)))

    def forward(self, samples: Tensor) -> Tensor:
        """Return the loss: of a tensor with other values it has another gradient."""
        target = samples.float().mean() / NUM_SAMPLES
        losses = [(each - target).square().mean() for each in self.parameters()]
        return torch.stack(losses).sum()


def shapes_in(path: str) -> dict[str, tuple[int, ...]]:
    entries = ucp_core.open(path).state_map.entries
    return {key.fqn: entry.shape for key, entry in entries.items() if key.slot == "weight"}


def build_optimizer(named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named.values(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)


def train(session: Session) -> None:
    shapes = shapes_in(sys.argv[1])
    model: Any = session.model(lambda: Named(shapes))
    session.optimizer(build_optimizer)
    for _ in session.steps(NUM_SAMPLES):
        session.train_step(lambda samples: model(torch.from_numpy(samples)))


if __name__ == "__main__":
    run(train, steps=5, global_batch=BATCH, micro_batch=MICRO_BATCH)
