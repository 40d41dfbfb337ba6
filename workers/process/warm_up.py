"""Warm-up: one tiny attempt alone, before a worker reports that it is ready.

The first attempt of a process is slower than later ones: torch imports modules on first use,
tokens are loaded, caches of kernels and sharding are filled. After the warm-up a standby joins as
fast as a survivor (0.4 s of CPU less, small preset).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch.distributed import TCPStore

from ucp_core.layout import ParallelLayout
from ucp_core.storage import MemoryStore
from workers.errors import WorkerError
from workers.protocol import Assignment, Completed, Raised, WorkerPhase
from workers.settings import ModelSettings, Settings
from workers.train import WorkerContext, run_attempt

#: The number of no attempt of a run.
WARM_UP_ATTEMPT = 0


class _NoProgress:
    """A progress record that stores nothing."""

    def assign(self, attempt: int, rank: int) -> None:
        """Store nothing."""

    def enter(self, phase: WorkerPhase) -> None:
        """Store nothing."""

    def resumed(self, step: int) -> None:
        """Store nothing."""

    def micro_batch(self, num_done: int) -> None:
        """Store nothing."""

    def moved(self, num_bytes: int) -> None:
        """Store nothing."""

    def completed(self, step: int, step_s: float, loss: float) -> None:
        """Store nothing."""


def warm_up(settings: Settings, ring_path: Path) -> None:
    """Train one step of a tiny model in this process; only warm caches remain.

    Raises:
        WorkerError: It failed, so this worker cannot train.
    """
    train = replace(
        settings.train, steps=1, warmup_steps=0, global_batch=settings.train.micro_batch
    )
    small = replace(settings, model=ModelSettings(preset="tiny"), train=train, script="")
    server = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    assignment = Assignment(
        attempt=WARM_UP_ATTEMPT,
        rank=0,
        layout=ParallelLayout(),
        store_host="127.0.0.1",
        store_port=server.port,
        resume_step=0,
        resume_attempt=0,
        lineage=((WARM_UP_ATTEMPT, 0),),
    )
    context = WorkerContext(
        worker="warm-up",
        settings=small,
        store=MemoryStore(),
        directory="warm-up",
        progress=_NoProgress(),
        ring_path=str(ring_path),
        yield_requested=lambda _: False,
        fenced=lambda _: False,
    )
    outcome = run_attempt(assignment, context)
    if not isinstance(outcome, Completed):
        detail = outcome.traceback if isinstance(outcome, Raised) else repr(outcome)
        raise WorkerError(f"the warm-up failed, so this worker cannot train: {detail}")
