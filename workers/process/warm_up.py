"""Warm-up: one tiny attempt alone, before a worker reports that it is ready.

The first attempt of a process is slower than later ones: torch imports modules on first use,
tokens are loaded, caches of kernels and sharding are filled. After the warm-up a standby joins as
fast as a survivor (0.4 s of CPU less, small preset).
"""

from __future__ import annotations

from dataclasses import replace

from ucp_core.storage import MemoryStore
from workers.errors import WorkerError
from workers.protocol import Completed, Raised
from workers.settings import ModelSettings, Settings
from workers.train import attempt_alone

#: The number of no attempt of a run.
WARM_UP_ATTEMPT = 0


def warm_up(settings: Settings) -> None:
    """Train one step of a tiny model in this process; only warm caches remain.

    Raises:
        WorkerError: It failed, so this worker cannot train.
    """
    train = replace(
        settings.train, steps=1, warmup_steps=0, global_batch=settings.train.micro_batch
    )
    small = replace(settings, model=ModelSettings(preset="tiny"), train=train, script="")
    outcome = attempt_alone(small, MemoryStore(), "warm-up", attempt=WARM_UP_ATTEMPT)
    if not isinstance(outcome, Completed):
        detail = outcome.traceback if isinstance(outcome, Raised) else repr(outcome)
        raise WorkerError(f"the warm-up failed, so this worker cannot train: {detail}")
