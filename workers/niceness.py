"""Gives training priority over the threads that work beside it."""

import contextlib
import os
import threading


def be_nice(niceness: int) -> None:
    """Raise the calling thread's niceness to at least this; other threads keep theirs."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):
        if os.getpriority(os.PRIO_PROCESS, thread) < niceness:
            os.setpriority(os.PRIO_PROCESS, thread, niceness)
