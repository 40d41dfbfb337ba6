"""A node's processes end with their raylet, at once and together, as in a loss of power.

Ray looks for a dead raylet once a second in each process. In that second trainers would go on, and
without a keeper, if that one looked first: whatever they train then is copied nowhere and lost.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from typing import Final

__all__ = ["end_with_parent"]

#: Its parent is outside the container, or has ended already.
_NOBODY: Final = 1


def end_with_parent() -> None:
    """Kill this process as soon as its parent has ended; call it early.

    Not before: once a parent has ended all its ports are closed, so that whoever asks why this
    process ended finds out. Where the system cannot watch a process, it is left to Ray.
    """
    parent = os.getppid()
    if parent <= _NOBODY or not hasattr(os, "pidfd_open"):
        return
    try:
        process = os.pidfd_open(parent)
    except OSError:
        # It is gone, or may not be watched.
        return
    threading.Thread(target=_end_after, args=(process,), name="parent", daemon=True).start()


def _end_after(process: int) -> None:
    """Wait for the end of what the descriptor is of, for which it gets readable."""
    watch = select.poll()
    watch.register(process, select.POLLIN)
    watch.poll()
    os.kill(os.getpid(), signal.SIGKILL)
