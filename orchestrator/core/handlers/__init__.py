"""The changes that each event makes. Pure."""

from orchestrator.core.handlers import (
    deadlines,
    demand,
    fleet_events,
    member_events,
    pace,
    planned,
    protection,
    resume,
    sharing,
    survey,
)
from orchestrator.core.handlers.resume import go_back, resume_event, resume_without_journal
from orchestrator.core.handlers.sharing import own_share
from orchestrator.core.handlers.survey import adopted
