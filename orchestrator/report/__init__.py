"""A run as one HTML page: live while it trains, the report when it is over."""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
    from orchestrator.report.document import Scale, numbers_of, rate, run_document
    from orchestrator.report.html import live_page, report_of, write_report
    from orchestrator.report.situation import what_it_does, what_survives


__getattr__ = lazy_door(__name__)
