"""Makes a universal checkpoint of any checkpoint.

``convert`` is the way in, ``forecast`` says beforehand what it costs. A conversion (``conversion``)
is laid out as files (``target_files``) and items of work (``work``), which a pool of workers
(``pool``) does and a journal notes (``journal``); ``files`` is where bytes are written,
``source_checks`` verifies what is read by the source's own checksums, ``universal`` is the result.
"""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
    from ucp_core.conversion.forecasting import Forecast, forecast
    from ucp_core.conversion.run import ConvertResult, convert, memory_left
    from ucp_core.conversion.source_checks import plan_extents
    from ucp_core.conversion.work_items import Item, Job, Result, Worker
    from ucp_core.conversion.workers import Batch

__all__ = [
    "Batch",
    "ConvertResult",
    "Forecast",
    "Item",
    "Job",
    "Result",
    "Worker",
    "convert",
    "forecast",
    "memory_left",
    "plan_extents",
]

__getattr__ = lazy_door(
    __name__,
    {
        "ucp_core.conversion.run": ("ConvertResult", "convert", "memory_left"),
        "ucp_core.conversion.forecasting": ("Forecast", "forecast"),
        "ucp_core.conversion.source_checks": ("plan_extents",),
        "ucp_core.conversion.work_items": ("Item", "Job", "Result", "Worker"),
        "ucp_core.conversion.workers": ("Batch",),
    },
)
