"""The run as a value: all that the controller knows. Pure."""

from orchestrator.core.state.attempt import Attempt
from orchestrator.core.state.fleet import (
    Fleet,
    Node,
    Offer,
    Reservation,
    Slow,
    Worker,
    WorkerStatus,
    is_dying,
    is_pending,
    worker_name,
    worker_number,
)
from orchestrator.core.state.network import CONTROLLER, Link, Pair, SlowLink
from orchestrator.core.state.run import (
    ACTIVE,
    EDGES,
    TERMINAL,
    Cause,
    MutableRunState,
    Phase,
    Reads,
    RunOutcome,
    RunState,
    describe,
    freeze,
    next_deadline_s,
    thaw,
)
from orchestrator.core.state.table import Table
