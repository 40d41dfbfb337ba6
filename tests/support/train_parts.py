"""Train a model that uses some of its parts in some micro-batches only.

Each micro-batch goes through one of two towers of equal shape. Layers are dropped at random, one
part is for rare inputs, and one is used from step ``LATE_STEP`` on. One is not used at all.

Arguments: with ``taken=FILE`` a worker alone writes to it which samples it has taken. With
``die=FILE`` a worker dies once, behind the step in which the late part was used first. With
``by=data`` the inputs decide which layers are dropped, because stages have other random numbers,
and the late part is used from the beginning.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.functional import mse_loss

from everstep import ModelPlan, Session, run

LATE_STEP, DIE_STEP = 5, 8
INPUTS = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
TARGETS = INPUTS.sum(1, keepdim=True)
TRAIN: dict[str, Any] = {"steps": 10, "global_batch": 16, "micro_batch": 2, "lr": 0.01}
ARGUMENTS: dict[str, str] = dict(one.split("=", 1) for one in sys.argv[1:] if "=" in one)


def exceeds(x: Tensor, bound: float) -> bool:
    """Return whether a mean does; a run with stages computes shapes without values, too."""
    return x.is_meta or bool(x.mean() > bound)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 16), nn.Linear(16, 12)

    def forward(self, x: Tensor) -> Tensor:
        moved: Tensor = x + self.down(self.up(x).tanh())
        return moved


class Parts(nn.Module):
    """Parts in containers are units of their own in a large model; ``rare`` is in that of all."""

    step = 1

    def __init__(self) -> None:
        super().__init__()
        names = ("image", "sound")
        self.towers = nn.ModuleDict(
            {name: nn.ModuleList([nn.Linear(8, 12), nn.Linear(12, 12)]) for name in names}
        )
        self.layers = nn.ModuleDict({str(number): Layer() for number in range(4)})
        self.tail = nn.ModuleDict({"late": Layer(), "never": Layer()})
        self.rare, self.head = Layer(), nn.Linear(12, 1)

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "towers"):
            towers: Any = self.towers
            for layer in towers["image" if exceeds(x[:, 0], 0.0) else "sound"]:
                x = layer(x).tanh()
        for name, layer in self.layers.items():
            by_data = "by" in ARGUMENTS
            if exceeds(x[:, int(name)], -0.1) if by_data else torch.rand(()) < 0.6:
                x = layer(x)
        if not hasattr(self, "head"):
            return x
        if exceeds(x[:, 0], 0.0 if "by" in ARGUMENTS else 0.3):
            x = self.rare(x)
        if Parts.step >= LATE_STEP or "by" in ARGUMENTS:
            x = self.tail["late"](x)
        scored: Tensor = self.head(x)
        return scored


def keep_stage(model: Any, number: int, num_stages: int) -> None:
    """Keep some layers; the first stage has the towers, and the last one the rest."""
    for layer in range(4):
        if layer * num_stages // 4 != number:
            del model.layers[str(layer)]
    if number:
        del model.towers
    if number < num_stages - 1:
        del model.tail, model.rare, model.head


CUT = ("layers.*", "tail.*", "rare")
PLAN = ModelPlan(
    tensor={
        **{f"{name}.up": ColwiseParallel() for name in CUT},
        **{f"{name}.down": RowwiseParallel() for name in CUT},
    },
    keep_stage=keep_stage,
)


def loss_of(model: Any, indices: Any) -> Tensor:
    return mse_loss(model(INPUTS[indices]), TARGETS[indices])


def train(session: Session) -> None:
    model = session.model(Parts, plan=PLAN)
    session.optimizer(lambda named: torch.optim.AdamW(named.values(), weight_decay=0.1))

    def loss(indices: Any) -> Tensor:
        if session.world_size == 1 and "taken" in ARGUMENTS:
            with Path(ARGUMENTS["taken"]).open("a") as file:
                file.write(" ".join(str(int(one)) for one in indices) + "\n")
        return loss_of(model, indices)

    Parts.step = session.step + 1
    # With a name the data is not compared: `loss` is called for micro-batches alone.
    for step in session.steps(len(INPUTS), data_digest="inputs"):
        session.train_step(loss)
        Parts.step = step.number + 1
        died = Path(ARGUMENTS.get("die", "/"))
        if step.number == DIE_STEP and session.rank == 1 and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    run(train, **TRAIN)
