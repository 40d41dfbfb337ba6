"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

from workers.settings import TrainSettings

__all__ = ["learning_rate"]


def learning_rate(train: TrainSettings, step: int) -> float:
    """Return the learning rate of ``step``, counted from 1.

    It rises linearly over the warm-up to ``lr``, then falls to ``lr * lr_min_ratio`` at the
    last step, by half a cosine or a line; "constant" stays at ``lr``.
    """
    warmup_steps = train.num_warmup_steps
    if step <= warmup_steps:
        return train.lr * step / warmup_steps
    if train.schedule == "constant":
        return train.lr
    done = min(1.0, (step - warmup_steps) / max(1, train.steps - warmup_steps))
    left = 0.5 * (1.0 + math.cos(math.pi * done)) if train.schedule == "cosine" else 1.0 - done
    return train.lr * (train.lr_min_ratio + (1.0 - train.lr_min_ratio) * left)
