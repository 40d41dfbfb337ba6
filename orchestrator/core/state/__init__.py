"""The run as a value: what the controller knows, and nothing else. Pure."""

from orchestrator.core.state.run import (
    ACTIVE,
    TERMINAL,
    Cause,
    Draft,
    Node,
    Phase,
    RunState,
    Slot,
    Worker,
    WorkerStatus,
    describe,
    freeze,
    next_deadline_s,
    thaw,
    worker_name,
    worker_number,
)
from orchestrator.core.state.table import Table

__all__ = [
    "ACTIVE",
    "TERMINAL",
    "Cause",
    "Draft",
    "Node",
    "Phase",
    "RunState",
    "Slot",
    "Table",
    "Worker",
    "WorkerStatus",
    "describe",
    "freeze",
    "next_deadline_s",
    "thaw",
    "worker_name",
    "worker_number",
]
