"""What a process records of itself, readable from outside after it stopped or died."""

from workers.records.progress import (
    PageReader,
    PageView,
    ProgressPage,
    open_page,
    process_state,
    read_page,
    report_on,
)
from workers.records.ring import ABORTED, FAILED, FINISHED, RecordRing, RingReader

__all__ = [
    "ABORTED",
    "FAILED",
    "FINISHED",
    "PageReader",
    "PageView",
    "ProgressPage",
    "RecordRing",
    "RingReader",
    "open_page",
    "process_state",
    "read_page",
    "report_on",
]
