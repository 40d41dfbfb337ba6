"""The worker context: all that ``run_attempt`` needs besides its assignment."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ucp_core.storage import Store
from workers.protocol import Formed, Noted, Pace, SaveCosts
from workers.settings import Settings
from workers.telemetry import ProgressRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """The worker in which attempts run; one per process."""

    worker: str  #: Worker id, as ``w0007``.
    settings: Settings  #: The settings of the training.
    store: Store  #: The store of the run directory.
    directory: str  #: Its path in the store.
    progress: ProgressRecord
    ring_path: str  #: File of the record ring of its collectives.
    #: Returns whether to leave an attempt at the next step boundary.
    yield_requested: Callable[[int], bool]
    fenced: Callable[[int], bool]  #: Returns whether an attempt was fenced. Any thread may call it.
    #: Returns whether the state must be in storage when the worker leaves.
    yield_durable: Callable[[int], bool] = lambda _attempt: True
    node: str = ""  #: Ray node id, hex; shows which memory is near.
    #: Directory of the keeper's descriptor server; None if there is no keeper.
    keeper_directory: Path | None = None
    #: Called once per attempt, by the training thread, when the groups are formed, the model is
    #: built and its state is loaded.
    on_formed: Callable[[Formed], None] = lambda _formed: None
    #: Returns how often to save in an attempt.
    pace: Callable[[int], Pace] = lambda _attempt: Pace()
    #: Called at the start of an attempt with a function that returns the costs of its steps and
    #: saves so far; any thread may call that.
    on_costs: Callable[[int, Callable[[], SaveCosts]], None] = lambda _attempt, _costs: None
    #: Called by rank 0 with an event to record.
    on_note: Callable[[Noted], None] = lambda _noted: None
