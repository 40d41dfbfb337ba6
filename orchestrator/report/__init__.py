"""A finished or running run as one HTML page."""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
    from orchestrator.report.html import write_report

__all__ = [
    "write_report",
]

__getattr__ = lazy_door(__name__)
