"""Parity over the parts of a version: the code, its arrangement in slots, and rebuilding."""

from workers.parity.rebuild import damaged, lost_parts, write
from workers.parity.record import (
    ParityRecord,
    complete_draft,
    read_record,
    slot_bytes,
    write_draft,
)
from workers.parity.stripes import Stripes

__all__ = [
    "ParityRecord",
    "Stripes",
    "complete_draft",
    "damaged",
    "lost_parts",
    "read_record",
    "slot_bytes",
    "write",
    "write_draft",
]
