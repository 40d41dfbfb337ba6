"""How keepers' threads share a node's processors with the trainers."""

from __future__ import annotations

import contextlib
import os
import threading

__all__ = ["be_nice"]


def be_nice(niceness: int) -> None:
    """Give the calling thread at least this niceness, and no other thread of the process."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):
        if os.getpriority(os.PRIO_PROCESS, thread) < niceness:
            os.setpriority(os.PRIO_PROCESS, thread, niceness)
