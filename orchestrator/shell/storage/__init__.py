"""The files that the controller writes to the run directory."""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
    from orchestrator.shell.storage.compaction import CompactionFile, read_journal
    from orchestrator.shell.storage.incarnation import begin_incarnation, config_of
    from orchestrator.shell.storage.journal import (
        JournalFile,
        read_segments,
        segment_path,
        segment_sizes,
    )
    from orchestrator.shell.storage.outputs import RunOutputs
    from orchestrator.shell.storage.sender import Sender
    from orchestrator.shell.storage.token import run_token


__getattr__ = lazy_door(__name__)
