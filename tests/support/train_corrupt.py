"""Train on a machine that computes wrong: ``HOW:STEP:RANK:ELEMENT:BIT`` says how.

From that step on the process of that rank flips one bit: with ``matmul`` in each result of a layer,
with ``bucket`` in the gradients of each reduction. ``weight`` flips a bit of a weight once, before
the step. With ``varies`` every rank gets another result each time. ``slow=SECONDS`` is the length
of a micro-batch. The process that errs creates ``mark=FILE``, and while the file exists no other
process errs.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from everstep import Session, run
from workers.train.executor import reduction

INPUTS = torch.linspace(-1, 1, 512).reshape(64, 8)
GIVEN = dict(one.split("=", 1) for one in sys.argv[1:] if "=" in one)


def flip(values: Tensor, element: int, bit: int) -> None:
    """Flip a bit in memory without a trace."""
    words = values.detach().view(torch.int32).view(-1)
    words[element % len(words)] ^= (1 << bit) - (1 << 32 if bit == 31 else 0)


class Machine:
    """The machine of this process."""

    def __init__(self, session: Session) -> None:
        self._session = session
        told = next((each for each in sys.argv[1:] if ":" in each), "none:0:0:0:0")
        self.how, *numbers = told.split(":")
        self._first, self._rank, *self.where = map(int, numbers)

    def errs(self, how: str) -> bool:
        """Return whether it does now."""
        if how != self.how or self._session.step + 1 < self._first:
            return False
        mark = Path(GIVEN["mark"]) if "mark" in GIVEN else None
        if mark is not None and mark.exists():
            return how != "weight" and mark.read_text() == str(os.getpid())
        if self._session.rank != self._rank:
            return False
        if mark is not None:
            mark.write_text(str(os.getpid()))
        return mark is not None or how != "weight" or self._session.step + 1 == self._first

    def computes(self, _module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        """Return the result of a layer, as this machine has it."""
        if self.how == "varies":
            return output + time.perf_counter_ns() % 1000 * 1e-6
        if not self.errs("matmul"):
            return output
        result = output.clone()
        flip(result, *self.where)
        return result


def train(session: Session) -> None:
    """Fit random numbers."""
    machine = Machine(session)
    model = session.model(
        lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Dropout(0.1))
    )
    session.optimizer(lambda named: torch.optim.AdamW(named.values()))
    for layer in model:
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(machine.computes)
    reduces = reduction._OwnReduceScatter.__call__

    def reduce(
        self: Any, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **how: Any
    ) -> None:
        if machine.errs("bucket"):
            flip(input_tensor, *machine.where)
        reduces(self, output_tensor, input_tensor, *args, **how)

    def loss_of(samples: Any) -> Tensor:
        time.sleep(float(GIVEN.get("slow", 0)))
        loss: Tensor = (model(INPUTS[samples]) - INPUTS[samples].flip(-1)).square().mean()
        return loss

    reduction._OwnReduceScatter.__call__ = reduce  # type: ignore[method-assign]
    try:
        for _ in session.steps(len(INPUTS)):
            if machine.errs("weight"):
                sharded: Any = next(model.parameters())
                flip(sharded.to_local().data, *machine.where)
            session.train_step(loss_of)
    finally:
        reduction._OwnReduceScatter.__call__ = reduces  # type: ignore[method-assign]


if __name__ == "__main__":
    run(train, directory="runs/corrupt", steps=12, global_batch=16, micro_batch=2)
