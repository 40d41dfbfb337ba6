"""Which bytes to read for which boxes, and reading them: every byte is verified."""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
    from ucp_core.reading.gather import Holders, Run, is_plain, scattered
    from ucp_core.reading.mapped import Mapped
    from ucp_core.reading.planning import Copy, Mean, Part, ReadPlan, plan, read_bytes_of
    from ucp_core.reading.transfer import (
        THREAD_BYTES_MIN,
        Source,
        execute,
        gap_bytes_max,
        run_gap_bytes_min,
        view_of,
    )

__all__ = [
    "THREAD_BYTES_MIN",
    "Copy",
    "Holders",
    "Mapped",
    "Mean",
    "Part",
    "ReadPlan",
    "Run",
    "Source",
    "execute",
    "gap_bytes_max",
    "is_plain",
    "plan",
    "read_bytes_of",
    "run_gap_bytes_min",
    "scattered",
    "view_of",
]

__getattr__ = lazy_door(
    __name__,
    {
        "ucp_core.reading.gather": ("Holders", "Run", "is_plain", "scattered"),
        "ucp_core.reading.mapped": ("Mapped",),
        "ucp_core.reading.planning": ("Copy", "Mean", "Part", "ReadPlan", "plan", "read_bytes_of"),
        "ucp_core.reading.transfer": (
            "THREAD_BYTES_MIN",
            "Source",
            "execute",
            "gap_bytes_max",
            "run_gap_bytes_min",
            "view_of",
        ),
    },
)
