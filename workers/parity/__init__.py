"""Parity over the parts of a version: the code, what is stored, and rebuilding."""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
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

__getattr__ = lazy_door(
    __name__,
    {
        "workers.parity.rebuild": ("damaged", "lost_parts", "write"),
        "workers.parity.record": (
            "ParityRecord",
            "complete_draft",
            "read_record",
            "slot_bytes",
            "write_draft",
        ),
        "workers.parity.stripes": ("Stripes",),
    },
)
