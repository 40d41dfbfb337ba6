"""A training script that halts: before the backward pass of step 9, or within the update of step 8.

It halts where a file that is named after the place is, below the folder that is the data's source,
and goes on when that is gone; before the backward pass it says so by the file ``mark_of`` names.
One that is named ``CHANGED`` has it change its weights after step 8.
"""

import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from everstep import Session, run
from workers.snapshot import final, writing
from workers.train.boundary import between_steps, protection_wait

BEHIND_STEP, UPDATE, CHANGED = "behind-step", "update", "changed"
#: The last step that is completed if it halts behind a step; the one that is not, in an update.
STEP = 8
_NUM_SAMPLES = 64
#: How long ranks wait for the memory of the first snapshot, and for what they leave behind.
_BOUNDS = (
    (protection_wait, "_WAIT_S_MIN"),
    (writing, "FINAL_S_MAX"),
    (between_steps, "FINAL_S_MAX"),
    (final, "_EXPECTED_S_MAX"),
)


def mark_of(places: Path, rank: int) -> Path:
    """Return the file that says that a rank stands behind ``STEP``."""
    return places / f"{BEHIND_STEP}-{rank}"


class HaltingAdamW(torch.optim.AdamW):
    """Raises when the weights are changed already, if that is asked for."""

    where: Path
    number = 0

    def step(self, closure: Any = None) -> Any:
        """Update."""
        loss = super().step(closure)
        if self.number == STEP and self.where.exists():
            raise RuntimeError("broken off within the update")
        return loss


def train(session: Session) -> None:
    """Fit random numbers."""
    # This looks at the remains, and not at whether a busy machine is quick enough.
    for module, name in _BOUNDS:
        setattr(module, name, 60.0)
    places = Path(session.settings.data.source)
    numbers = torch.Generator().manual_seed(5)
    inputs = torch.randn(_NUM_SAMPLES, 8, generator=numbers)
    model = session.model(lambda: nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)))
    optimizer = session.optimizer(
        lambda parameters: HaltingAdamW(parameters.values()), elementwise=True
    )
    assert isinstance(optimizer, HaltingAdamW)
    optimizer.where = places / UPDATE
    for step in session.steps(_NUM_SAMPLES):
        optimizer.number = step.number
        for samples in step.micro_batches():
            while step.number == STEP + 1 and (places / BEHIND_STEP).exists():
                mark_of(places, session.rank).touch()
                time.sleep(0.005)
            loss = (model(inputs[samples]) - inputs[samples].flip(-1)).square().mean()
            step.backward(loss, tokens=len(samples))
        # The others are told with a step that the snapshot before it is complete.
        writer = session._boundary._writer
        while step.number == STEP and writer is not None and writer.is_behind():
            time.sleep(0.005)
        step.apply()
        if step.number == STEP and (places / CHANGED).exists():
            with torch.no_grad():
                model[0].weight.clamp_(-0.01, 0.01)


if __name__ == "__main__":
    run(train)
