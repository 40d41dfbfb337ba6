"""Train parameters of odd shapes: a scale as CLIP's, gates of layers, a frozen one, an empty one.

With the argument ``all`` each micro-batch has all samples, so that plain torch does the same steps.
With ``own`` the optimizer is one that keeps values of its own.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from everstep import ModelPlan, Session, run

INPUTS = torch.linspace(-1, 1, 192).reshape(64, 3).sin()
TRAIN: dict[str, Any] = {"steps": 6, "global_batch": 8, "micro_batch": 2, "lr": 0.02}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 10), nn.Linear(10, 3)
        self.gate = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        moved: Tensor = x + self.gate.tanh() * self.down(self.up(x).tanh())
        return moved


class Scaled(nn.Module):
    """``empty`` and ``unused`` change nothing, but only the first is in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): Layer() for number in range(2)})
        self.head = nn.Module()
        self.head.logit_scale = nn.Parameter(torch.tensor(0.1))
        self.head.temperature = nn.Parameter(torch.tensor(2.0), requires_grad=False)
        self.head.empty = nn.Parameter(torch.zeros(0, 3))
        self.head.unused = nn.Parameter(torch.tensor(-1.0))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        if not hasattr(self, "head"):
            return x
        head: Any = self.head
        scaled: Tensor = x * head.logit_scale.exp() / head.temperature + head.empty.sum()
        return scaled


def keep_stage(model: Any, number: int, num_stages: int) -> None:
    """Keep a layer; the last stage has the head."""
    for layer in range(2):
        if layer * num_stages // 2 != number:
            del model.layers[str(layer)]
    if number < num_stages - 1:
        del model.head


PLAN = ModelPlan(
    tensor={"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()},
    keep_stage=keep_stage,
)


class Own(torch.optim.Optimizer):
    """As AdamW, by angles, with a decaying rate. Its state is in three places."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.counts: dict[str, Any] = {"steps": 0, "rates": [1.0, 1.0]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        self.counts["steps"] += 1
        state: Any = self.state
        decay = state["global"].setdefault("decay", torch.tensor(1.0)).mul_(0.9)
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    held = self.state[one]
                    mean = held.setdefault("mean", torch.zeros_like(one)).lerp_(one.grad, 0.1)
                    size = held.setdefault("size", torch.zeros_like(one))
                    size.mul_(0.9).add_(one.grad.abs().pow(0.75), alpha=0.1)
                    rate = float(group["lr"] * decay) * self.counts["steps"] ** 0.5
                    one.sub_(torch.atan2(mean, size), alpha=rate)


def loss_of(model: Any, indices: Any) -> Tensor:
    x = INPUTS if "all" in sys.argv else INPUTS[indices]
    loss: Tensor = (model(x) - x.exp()).square().mean()
    return loss


def train(session: Session) -> None:
    model = session.model(Scaled, plan=PLAN)
    if "own" in sys.argv:
        session.optimizer(lambda named: Own(named.values()), elementwise=True)
    else:
        session.optimizer(lambda named: torch.optim.AdamW(named.values(), fused=True))
    for _ in session.steps(len(INPUTS)):
        session.train_step(lambda indices: loss_of(model, indices))


if __name__ == "__main__":
    run(train, **TRAIN)
