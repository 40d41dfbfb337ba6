"""A training script of steps of a given length, in which one process does what it is told.

Arguments: a folder, and the length of a step with four workers, in seconds. The folder may have a
file ``plan.json``: what (slow, data or pause), the rank that does it, from which step on, and how
many times as long it takes, or for how many seconds. The process that has this rank then does it,
also in later attempts; another process in its place does not.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from everstep import Session, run

STEPS = 120
_NUM_SAMPLES, _WORKERS = 4096, 4


class _Samples:
    """Numbers, which one process gets late."""

    def __init__(self) -> None:
        self.late_s = 0.0
        numbers = torch.Generator().manual_seed(5)
        self.inputs = torch.randn(_NUM_SAMPLES, 64, generator=numbers)

    def __len__(self) -> int:
        return _NUM_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.late_s:
            time.sleep(self.late_s)
        return self.inputs[index]


def _takes_part(folder: Path, plan: dict[str, Any], rank: int, step: int) -> bool:
    """Return whether this process does what is planned; the first one that may, does."""
    if step < plan["from"]:
        return False
    who = folder / "pid"
    if rank == plan["rank"]:
        try:
            with who.open("x") as file:
                file.write(str(os.getpid()))
        except FileExistsError:
            pass
    return who.exists() and who.read_text() == str(os.getpid())


def train(session: Session) -> None:
    """Fit random numbers."""
    folder, pace_s = Path(sys.argv[1]), float(sys.argv[2])
    path = folder / "plan.json"
    plan: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"from": 10**9}
    settings = session.settings.train
    share_s = pace_s * _WORKERS * settings.micro_batch / settings.global_batch
    samples = _Samples()
    torch.manual_seed(0)
    model = session.model(
        lambda: nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 64)),
    )
    session.optimizer(lambda parameters: torch.optim.AdamW(parameters.values()))
    for step in session.steps(samples):
        does = _takes_part(folder, plan, session.rank, step.number)
        if does and plan["what"] == "pause" and step.number == plan["from"]:
            time.sleep(plan["by"])
        times = plan["by"] if does and plan["what"] == "slow" else 1.0
        samples.late_s = plan["by"] if does and plan["what"] == "data" else 0.0
        for batch in step.micro_batches():
            begun_s = time.monotonic()
            loss = (model(batch) - batch.flip(-1)).square().mean()
            time.sleep(max(0.0, begun_s + times * share_s - time.monotonic()))
            step.backward(loss, tokens=len(batch))
        step.apply()


if __name__ == "__main__":
    run(train, steps=STEPS, schedule="constant", deterministic=True)
