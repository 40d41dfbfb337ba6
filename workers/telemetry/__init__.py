"""Keep a process's records of itself, which others can read even after it stopped or died."""

from workers.telemetry.evidence import (
    RINGS,
    STACKS,
    Evidence,
    Subject,
    copies,
    forget_stacks,
    kernel_facts,
    offer_stacks,
    stacks_path,
    take_stacks,
    write_stacks,
)
from workers.telemetry.lease import Lease, has_run_out, holders, lease_s
from workers.telemetry.processes import descendants, process_state
from workers.telemetry.progress import (
    ProgressReader,
    ProgressRecord,
    ProgressView,
    open_progress,
    read_progress,
    report_on,
)
from workers.telemetry.ring import RecordRing, Waited
from workers.telemetry.ring_format import (
    ABORTED,
    DTYPES,
    FAILED,
    FINISHED,
    OP_CODES,
    history_after,
    history_before,
    last_ring_path,
)
from workers.telemetry.ring_reader import Record, Ring, RingReader, RingView, is_ring, read_ring
