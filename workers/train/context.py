"""The worker that an attempt runs in: what ``run_attempt`` needs besides its assignment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ucp_core.storage import Store
from workers.protocol import Formed, Noted, Pace, SaveCosts
from workers.records import ProgressRecord
from workers.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """The worker that attempts run in; one per process.

    Attributes:
        worker: Worker id, as ``w0007``.
        settings: What to train.
        store: The store of the run directory.
        directory: Its path in the store.
        ring_path: File of the record ring of its collectives.
        yield_requested: Returns whether to leave an attempt at the next step boundary.
        fenced: Returns whether an attempt was fenced. Any thread may call it.
        yield_durable: Returns whether the state must be in storage when the worker leaves.
        node: Ray node id, hex; tells which memory is near.
        keeper_directory: Directory of the keeper's descriptor server; None if there is no keeper.
        on_formed: Called once per attempt, by the training thread, when the groups are formed, the
            model is built and its state is loaded.
        pace: Returns how often to save in an attempt.
        on_costs: Called at the start of an attempt with a function that returns the costs of its
            steps and saves so far; any thread may call that.
        on_note: Called by rank 0 with what is to be put on record.
    """

    worker: str
    settings: Settings
    store: Store
    directory: str
    progress: ProgressRecord
    ring_path: str
    yield_requested: Callable[[int], bool]
    fenced: Callable[[int], bool]
    yield_durable: Callable[[int], bool] = lambda _attempt: True
    node: str = ""
    keeper_directory: Path | None = None
    on_formed: Callable[[Formed], None] = lambda _formed: None
    pace: Callable[[int], Pace] = lambda _attempt: Pace()
    on_costs: Callable[[int, Callable[[], SaveCosts]], None] = lambda _attempt, _costs: None
    on_note: Callable[[Noted], None] = lambda _noted: None
