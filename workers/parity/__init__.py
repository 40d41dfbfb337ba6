"""Compute parity of the parts of a version, arrange it in buffers, and rebuild lost parts."""

from workers.parity.making import write
from workers.parity.rebuild import damaged, lost_parts
from workers.parity.record import (
    ParityRecord,
    buffer_bytes,
    complete_draft,
    read_record,
    write_draft,
)
from workers.parity.stripes import Stripes
