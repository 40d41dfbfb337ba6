"""The document of a run and its page: live while the run trains, a report afterwards."""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
    from orchestrator.report.document import RunDocument, Scale, Seen, bounds_document, tell
    from orchestrator.report.html import live_page, report_of, write_report
    from orchestrator.report.page import live_part, numbers_of, page_document
    from orchestrator.report.situation import what_it_does, what_survives


__getattr__ = lazy_door(__name__)
