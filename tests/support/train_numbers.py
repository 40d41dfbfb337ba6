"""Train with losses that draw numbers, or by rules of shapes, which no layout may change.

Arguments: the loss, one of ``LOSSES``; and with ``die=FILE`` the last rank dies once, in the step
``DIE_STEP``.
"""

import functools
import os
import random
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.functional import cross_entropy, one_hot

from everstep import ModelPlan, Session, bidirectional_attention, causal_attention, run

DIE_STEP, SIZE, LENGTH, WIDTH = 4, 8, 8, 16
TRAIN: dict[str, Any] = {"steps": 8, "global_batch": 16, "micro_batch": 2, "lr": 0.02}
ROWS = torch.randint(SIZE, (64, LENGTH), generator=torch.Generator().manual_seed(0))
INPUTS = torch.randn(64, LENGTH, SIZE, generator=torch.Generator().manual_seed(1))
PLACES = torch.linspace(-1, 1, LENGTH).reshape(1, LENGTH, 1)
ARGUMENTS: dict[str, str] = dict(one.split("=", 1) for one in sys.argv[1:] if "=" in one)


class Layer(nn.Module):
    def __init__(self, *, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = (one(x).unflatten(-1, (-1, 4)).transpose(1, 2) for one in (self.q, self.k, self.v))
        attend = causal_attention if self.is_causal else bidirectional_attention
        x = x + self.o(attend(*heads).transpose(1, 2).flatten(-2))
        moved: Tensor = x + self.down(self.up(self.norm(x)).tanh())
        return moved


class Network(nn.Module):
    def __init__(self, *, is_causal: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(SIZE, WIDTH), nn.Linear(WIDTH, SIZE)
        self.layers = nn.ModuleDict({key: Layer(is_causal=is_causal) for key in "01"})

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) if hasattr(self, "first") else x
        for layer in self.layers.values():
            x = layer(x)
        if hasattr(self, "last"):
            x = self.last(x)
        return x


def keep_stage(network: Any, number: int, num_stages: int) -> None:
    """Keep one of two layers, and what is before or behind it."""
    if num_stages > 1:
        del network.layers["10"[number]]
        delattr(network, ("last", "first")[number])


PLAN = ModelPlan(
    tensor={
        **{f"layers.*.{key}": ColwiseParallel() for key in ("q", "k", "v", "up")},
        **{f"layers.*.{key}": RowwiseParallel() for key in ("o", "down")},
    },
    keep_stage=keep_stage,
    sequence=("inputs", "targets", "labels"),
)


def denoising(
    session: Session, model: Any, indices: Any, *, behind: bool = False
) -> tuple[Tensor, int]:
    """Return the loss of a prediction of the noise, at a time that is drawn.

    With ``behind`` a number is drawn behind the model, too.
    """
    rows = INPUTS[indices]
    noise, time = torch.randn_like(rows), random.random() * np.random.rand()  # noqa: NPY002
    mixed = (1 - time) * rows + time * noise + PLACES
    part = session.part({"inputs": mixed, "targets": noise})
    found = model(part["inputs"])
    scale = 1 + 0.1 * torch.rand(()) if behind else 1.0
    loss: Tensor = ((found - part["targets"] * scale) ** 2).mean()
    return loss, part["targets"].numel()


def masked(session: Session, model: Any, indices: Any) -> tuple[Tensor, int]:
    """Return the loss of the tokens that are hidden, about a third."""
    rows = ROWS[indices]
    is_hidden = torch.rand(rows.shape) < 0.3
    inputs = one_hot(rows, SIZE) * ~is_hidden.unsqueeze(-1) + PLACES
    part = session.part({"inputs": inputs, "targets": rows.where(is_hidden, -100)})
    return of_tokens(model(part["inputs"]), part["targets"])


def next_token(session: Session, model: Any, indices: Any) -> tuple[Tensor, int]:
    """Return the loss of the next tokens, with a multiplier of the outputs as in muP."""
    rows = ROWS[indices]
    part = session.part({"inputs": one_hot(rows, SIZE) + PLACES, "labels": rows})
    return of_tokens(model(part["inputs"]) * (8 / WIDTH), part["labels"])


def of_tokens(outputs: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    return cross_entropy(outputs.flatten(0, 1), labels.flatten()), int((labels >= 0).sum())


def by_shape(named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW with rates by fan-in, as muP's; small tensors do not decay."""
    groups = [
        {
            "params": [one],
            "lr_scale": 8 / one.shape[1] if one.dim() > 1 and "layers" in name else 1.0,
            "weight_decay": 0.1 if one.numel() > SIZE * WIDTH else 0.0,
        }
        for name, one in named.items()
    ]
    return torch.optim.AdamW(groups)


LOSSES: dict[str, Callable[[Session, nn.Module, Any], tuple[Tensor, int]]] = {
    "denoising": denoising,
    "masked": masked,
    "mup": next_token,
    "behind": functools.partial(denoising, behind=True),
}


def train(session: Session) -> None:
    name = sys.argv[1]

    def build() -> nn.Module:
        network = Network(is_causal=name == "mup")
        if name == "mup":
            nn.init.zeros_(network.last.weight)
        return network

    model = session.model(build, plan=PLAN)
    session.optimizer(by_shape)
    died = Path(ARGUMENTS.get("die", "/"))

    def loss_of(indices: Any) -> tuple[Tensor, int]:
        is_last = session.rank == session.world_size - 1
        if session.step + 1 == DIE_STEP and is_last and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return LOSSES[name](session, model, indices)

    for _ in session.steps(len(ROWS)):
        session.train_step(loss_of)


if __name__ == "__main__":
    run(train, **TRAIN)
