"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

from workers.train.settings import TrainSettings

__all__ = ["learning_rate"]


def learning_rate(train: TrainSettings, step: int) -> float:
    """Return the learning rate of ``step``, counted from 1.

    It rises linearly over ``warmup_steps`` to ``lr``, then falls to ``lr * lr_min_ratio`` at the
    last step, by half a cosine or a line; "constant" stays at ``lr``.
    """
    if step <= train.warmup_steps:
        return train.lr * step / train.warmup_steps
    if train.schedule == "constant":
        return train.lr
    done = min(1.0, (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps))
    left = 0.5 * (1.0 + math.cos(math.pi * done)) if train.schedule == "cosine" else 1.0 - done
    return train.lr * (train.lr_min_ratio + (1.0 - train.lr_min_ratio) * left)
