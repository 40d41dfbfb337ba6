"""Plan which bytes to read for which boxes, and read them; every byte is verified."""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door
from ucp_core.reading.extents import (
    Check,
    Collector,
    ExtentPlan,
    Note,
    crc32_of,
    joined_notes,
    plan_extents,
    touched,
    verify_extents,
)
from ucp_core.reading.gather import ElementRun, Holders, is_plain, scattered
from ucp_core.reading.planning import Copy, Mean, Part, ReadPlan, plan, read_bytes_of

if TYPE_CHECKING:
    from ucp_core.reading.mapped import Mapped
    from ucp_core.reading.transfer import (
        Source,
        execute,
        fresh_memory,
        gap_bytes_max,
        run_gap_bytes_min,
        view_of,
    )


__getattr__ = lazy_door(__name__)
