"""What the controller writes to the run directory."""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
    from orchestrator.shell.storage.compaction import BookmarkFile
    from orchestrator.shell.storage.incarnation import begin_life, config_of, next_life
    from orchestrator.shell.storage.journal import JournalFile, read_segments
    from orchestrator.shell.storage.record import RunRecord

__all__ = [
    "BookmarkFile",
    "JournalFile",
    "RunRecord",
    "begin_life",
    "config_of",
    "next_life",
    "read_segments",
]

__getattr__ = lazy_door(
    __name__,
    {
        "orchestrator.shell.storage.compaction": ("BookmarkFile",),
        "orchestrator.shell.storage.incarnation": ("begin_life", "config_of", "next_life"),
        "orchestrator.shell.storage.journal": ("JournalFile", "read_segments"),
        "orchestrator.shell.storage.record": ("RunRecord",),
    },
)
