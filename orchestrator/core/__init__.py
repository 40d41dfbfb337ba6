"""The controller's decisions: ``machine.step`` folds an event and returns actions."""

from orchestrator.core import actions, events, machine
from orchestrator.core.alike import take_alike
from orchestrator.core.handlers import (
    adopted,
    go_back,
    own_share,
    resume_event,
    resume_without_journal,
)
from orchestrator.core.log import (
    Compaction,
    Folded,
    Incident,
    JournalPlace,
    RunStats,
    fold_on,
    incident_folder,
    is_event,
    starts,
    suspects_shown,
    transition_records,
    verify,
    without_late_lines,
)
from orchestrator.core.machine import step
from orchestrator.core.rules import AvoidRules, Bounds, RunRules
from orchestrator.core.state import (
    ACTIVE,
    TERMINAL,
    Phase,
    RunState,
    WorkerStatus,
    describe,
    next_deadline_s,
)
