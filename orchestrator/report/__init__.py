"""Read a run's directory, and write its document and page: live, or a report afterwards."""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
    from orchestrator.report.document import RunDocument, Scale, Seen, bounds_document, tell
    from orchestrator.report.html import live_page, report_of, write_report
    from orchestrator.report.page import live_part, numbers_of, page_document
    from orchestrator.report.run_directory import (
        COMPACTED,
        CONFIG,
        CONTACT,
        JOURNAL,
        LOGGERS,
        SETTINGS,
        SUMMARY,
        TOKEN,
        Curves,
        RunRecord,
        StepRecord,
        Tail,
        appended_text,
        json_object,
        log_tail,
        read_run,
        thin,
    )
    from orchestrator.report.situation import what_it_does, what_survives


__getattr__ = lazy_door(__name__)
