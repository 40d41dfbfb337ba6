"""What ``run_attempt`` is given besides its assignment: the process around the training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ucp_core.storage import Store
from workers.protocol import Formed, Pace, SaveCosts, WorkerPhase
from workers.settings import Settings

__all__ = ["Progress", "WorkerContext"]


class Progress(Protocol):
    """The writing end of a progress page, ``workers.records.progress.ProgressRecord``."""

    def assign(self, attempt: int, rank: int) -> None:
        """Store that the worker enters ``attempt`` as ``rank``."""

    def enter(self, phase: WorkerPhase) -> None:
        """Store that the worker comes into ``phase`` now."""

    def resumed(self, step: int) -> None:
        """Store that the state after ``step`` was loaded."""

    def micro_batch(self, num_done: int) -> None:
        """Store how many micro-batches of the step under way are done."""

    def moved(self, num_bytes: int) -> None:
        """Store that so much more was read or written. Called from several threads."""

    def completed(self, step: int, step_s: float, loss: float) -> None:
        """Store that ``step`` is completed."""


def _nothing(_formed: Formed) -> None:
    """Do nothing."""


def _no_pace(_attempt: int) -> Pace:
    """Return no change."""
    return Pace()


def _no_costs(_attempt: int, _costs: Callable[[], SaveCosts]) -> None:
    """Do nothing."""


def _always(_attempt: int) -> bool:
    """Return True."""
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """The worker that attempts run in; one per process.

    Attributes:
        worker: Worker id, as ``w0007``.
        settings: What to train.
        store: Where the run directory is.
        directory: Its path in the store.
        page: Where the worker says how far it is.
        ring_path: Where its collectives are recorded.
        yield_requested: Whether the worker is to leave an attempt at the next step boundary.
        fenced: Whether an attempt may write no more. Asked from several threads.
        yield_durable: Whether the state that it leaves with must be in storage, because memory
            may go.
        node: Ray node id, hex; tells which memory is near.
        keeper_directory: Where the keeper of the node has its door; None if there is none.
        same_weights: Whether a checkpoint is refused that holds weights which the model lacks.
        on_formed: Called once per attempt, by the training thread, when the groups stand, the
            model is built and its state is loaded.
        pace: Returns how often to save in an attempt, as far as somebody said so.
        on_costs: Called at the begin of an attempt with what returns the costs of its steps and
            saves so far, from any thread.
    """

    worker: str
    settings: Settings
    store: Store
    directory: str
    progress: Progress
    ring_path: str
    yield_requested: Callable[[int], bool]
    fenced: Callable[[int], bool]
    yield_durable: Callable[[int], bool] = _always
    node: str = ""
    keeper_directory: Path | None = None
    same_weights: bool = False
    on_formed: Callable[[Formed], None] = _nothing
    pace: Callable[[int], Pace] = _no_pace
    on_costs: Callable[[int, Callable[[], SaveCosts]], None] = _no_costs
