"""A script that reads other data than other workers, or than before.

Args: how it reads (``index`` or ``loader``), what is wrong (``order``, ``content`` if a file is
there, ``chance``, ``later`` on one worker or ``curriculum`` on all, from step 3 on, or
``nothing``), and the file.
"""

import os
import random
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import everstep

HOW, WRONG, FILE = sys.argv[1:4]
NUM = 256
CHANCE = random.SystemRandom()
CHANGES_AT = 3

numbers = list(range(NUM))
if WRONG == "order":
    random.Random(os.getpid()).shuffle(numbers)
seed = int(WRONG == "content" and Path(FILE).exists())
inputs = torch.randn(NUM, 8, generator=torch.Generator().manual_seed(seed))[numbers]


class Samples:
    def __len__(self) -> int:
        return NUM

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        # Rounds as another kind of processor would, and augments by the seeds of the run.
        one = inputs[index] * (1.0 + 1e-7 * (os.getpid() % 3)) + torch.randn(())
        return one + (CHANCE.random() if WRONG == "chance" else added[0]), numbers[index]


#: The value added to all samples.
added = [0.0]


def train(session: everstep.Session) -> None:
    model = session.model(lambda: nn.Sequential(nn.Linear(8, 33), nn.Tanh(), nn.Linear(33, 1)))
    session.optimizer(lambda named: torch.optim.AdamW(named.values(), lr=1e-2))

    def steps(data: Any) -> Any:
        for step in session.steps(data):
            is_wrong = WRONG == "curriculum" or (WRONG == "later" and session.rank == 1)
            added[0] = float(is_wrong and step.number >= CHANGES_AT)
            yield step

    def by_index(indices: Any) -> Tensor:
        one = CHANCE.random() if WRONG == "chance" else torch.randn(()) + added[0]
        rows = inputs[indices] + one
        loss: Tensor = model(rows).square().mean()
        return loss

    def by_batch(batch: Any) -> Tensor:
        loss: Tensor = model(batch[0]).square().mean()
        return loss

    if HOW == "index":
        for _ in steps(NUM):
            session.train_step(by_index)
    else:
        for _ in steps(everstep.DataLoader(Samples())):
            session.train_step(by_batch)


if __name__ == "__main__":
    everstep.run(train)
