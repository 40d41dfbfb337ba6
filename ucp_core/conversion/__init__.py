"""Makes a universal checkpoint of any checkpoint.

``convert`` does it (``run``); ``forecast`` says beforehand what it costs. A conversion is laid out
as files and items (``job``). A worker does an item (``work_items``), here, in threads or in
processes (``workers``); a cluster gives ``do_batch`` to its tasks. ``outputs`` is where bytes are
written, and a ``journal`` notes what is done.
"""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
    from ucp_core.conversion.forecasting import Forecast, forecast
    from ucp_core.conversion.run import ConvertResult, convert, memory_left
    from ucp_core.conversion.source_checks import plan_extents
    from ucp_core.conversion.work_items import Item, Job, Result, Worker
    from ucp_core.conversion.workers import Batch, do_batch

__all__ = [
    "Batch",
    "ConvertResult",
    "Forecast",
    "Item",
    "Job",
    "Result",
    "Worker",
    "convert",
    "do_batch",
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
        "ucp_core.conversion.workers": ("Batch", "do_batch"),
    },
)
