"""The journal's records: print, parse, compact, count. Pure."""

from orchestrator.core.log.compaction import Compaction, JournalPlace
from orchestrator.core.log.incident import Incident, incident_folder
from orchestrator.core.log.journal_lines import (
    Folded,
    fold_on,
    is_event,
    starts,
    transition_records,
    verify,
    without_late_lines,
)
from orchestrator.core.log.stats import RunStats
from orchestrator.core.log.suspected import suspects_shown
