"""A process's records of itself, readable from outside after it stopped or died."""

from workers.records.lease import Lease, has_run_out, lease_s
from workers.records.processes import descendants, process_state
from workers.records.progress import (
    ProgressReader,
    ProgressRecord,
    ProgressView,
    open_progress,
    read_progress,
    report_on,
)
from workers.records.ring import RecordRing, Waited
from workers.records.ring_format import (
    ABORTED,
    DTYPES,
    FAILED,
    FINISHED,
    OP_CODES,
    SPANS,
    history_after,
    last_ring_path,
)
from workers.records.ring_reader import Record, Ring, RingReader, RingView, is_ring, read_ring

__all__ = [
    "ABORTED",
    "DTYPES",
    "FAILED",
    "FINISHED",
    "OP_CODES",
    "SPANS",
    "Lease",
    "ProgressReader",
    "ProgressRecord",
    "ProgressView",
    "Record",
    "RecordRing",
    "Ring",
    "RingReader",
    "RingView",
    "Waited",
    "descendants",
    "has_run_out",
    "history_after",
    "is_ring",
    "last_ring_path",
    "lease_s",
    "open_progress",
    "process_state",
    "read_progress",
    "read_ring",
    "report_on",
]
