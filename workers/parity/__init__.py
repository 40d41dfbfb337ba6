"""Parity over the parts of a version: the code, its arrangement in buffers, and rebuilding."""

from workers.parity.rebuild import damaged, lost_parts, write
from workers.parity.record import (
    ParityRecord,
    buffer_bytes,
    complete_draft,
    read_record,
    write_draft,
)
from workers.parity.stripes import Stripes
