"""What ``run_attempt`` is given besides its assignment: the process around the training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ucp_core.storage import Store
from workers.protocol import WorkerPhase
from workers.train.settings import Settings

__all__ = ["Flag", "Progress", "WorkerContext"]


class Flag(Protocol):
    """What can be asked whether it was set, as ``threading.Event`` can."""

    def is_set(self) -> bool:
        """Return whether it was set."""


class Progress(Protocol):
    """The writing end of a progress page, ``workers.progress.ProgressPage``."""

    def assign(self, attempt: int, rank: int) -> None:
        """Store that the worker enters ``attempt`` as ``rank``."""

    def enter(self, phase: WorkerPhase) -> None:
        """Store that the worker comes into ``phase`` now."""

    def resumed(self, step: int) -> None:
        """Store that the state after ``step`` was loaded."""

    def micro_batch(self, num_done: int) -> None:
        """Store how many micro-batches of the step under way are done."""

    def completed(self, step: int, step_s: float, loss: float) -> None:
        """Store that ``step`` is completed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """The worker that an attempt runs in. One per attempt or per process, as the caller likes.

    Attributes:
        worker: Worker id, as ``w0007``.
        settings: What to train.
        store: The run directory.
        page: Where the worker says how far it is.
        ring_path: Where its collectives are recorded.
        device_type: "cpu" or "cuda"; on "cuda" the current device is used.
        yield_requested: Set when the worker is to leave at the next step boundary.
        fenced: Whether an attempt may write no more. Asked from several threads.
        on_formed: Called once per attempt, by the training thread, when the groups stand, the
            model is built and its state is loaded.
    """

    worker: str
    settings: Settings
    store: Store
    page: Progress
    ring_path: Path
    device_type: str
    yield_requested: Flag
    fenced: Callable[[int], bool]
    on_formed: Callable[[], None]
