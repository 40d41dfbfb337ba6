"""A training script with steps of a given length that need hardly any processor time.

Its argument is the length of a step with four workers, in seconds; with fewer they have more to do.
A micro-batch takes its share of that, what it computes included.
It runs alone, too, and makes ``STEPS`` then, or as many as a second argument says.
A third argument is a folder of orders: the loss of step N is not a number if it has a file
``nan-N``, and rank R takes a file ``raise-R`` away and raises.
"""

import math
import sys
import time
from pathlib import Path

import torch
from torch import nn

from everstep import Session, run

STEPS = 60
#: The message of a rank that raises by order.
ORDERED = "this rank was ordered to raise"
_NUM_SAMPLES, _WORKERS = 4096, 4


def train(session: Session) -> None:
    """Fit random numbers."""
    pace_s = float(sys.argv[1])
    settings = session.settings.train
    share_s = pace_s * _WORKERS * settings.micro_batch / settings.global_batch
    numbers = torch.Generator().manual_seed(5)
    inputs = torch.randn(_NUM_SAMPLES, 64, generator=numbers)
    torch.manual_seed(0)
    model = session.model(
        lambda: nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 64)),
    )
    session.optimizer(lambda parameters: torch.optim.AdamW(parameters.values()))
    orders = Path(sys.argv[3]) if len(sys.argv) > 3 else None
    for step in session.steps(_NUM_SAMPLES):
        spoil = _obey(orders, step.number, session.rank) if orders else 1.0
        for samples in step.micro_batches():
            begun_s = time.monotonic()
            loss = (model(inputs[samples]) - inputs[samples].flip(-1)).square().mean()
            step.backward(loss * spoil, tokens=len(samples))
            time.sleep(max(0.0, begun_s + share_s - time.monotonic()))
        step.apply()


def _obey(orders: Path, number: int, rank: int) -> float:
    """Raise if that is ordered of this rank; return what the loss of a step is multiplied by."""
    order = orders / f"raise-{rank}"
    if order.exists():
        order.unlink()
        raise RuntimeError(ORDERED)
    return math.nan if (orders / f"nan-{number}").exists() and rank == 0 else 1.0


if __name__ == "__main__":
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else STEPS
    run(train, steps=steps, schedule="constant", deterministic=True)
