"""Keep a process's records of itself, which others can read even after it stopped or died."""

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
    history_after,
    history_before,
    last_ring_path,
)
from workers.records.ring_reader import Record, Ring, RingReader, RingView, is_ring, read_ring
