"""Parent-death watch: a node's processes end with their raylet, at once, as in a power loss.

Ray checks for a dead raylet once a second in each process. In that second trainers would train on,
possibly without a keeper, and lose steps that no other node copies.
"""

import os
import select
import signal
import threading
from typing import Final

#: The parent is outside the container, or has ended already.
_NOBODY: Final = 1


def end_with_parent() -> None:
    """Kill this process as soon as its parent has ended; call it early.

    The parent's ports are closed by then, so others can see the cause. If the system has no
    ``pidfd_open``, only Ray ends this process.
    """
    parent = os.getppid()
    if parent <= _NOBODY or not hasattr(os, "pidfd_open"):
        return
    try:
        process = os.pidfd_open(parent)
    except OSError:
        # It has ended, or may not be watched.
        return
    threading.Thread(target=_end_after, args=(process,), name="parent", daemon=True).start()


def _end_after(process: int) -> None:
    """Kill this process when the other one ends: its process descriptor becomes readable."""
    watch = select.poll()
    watch.register(process, select.POLLIN)
    watch.poll()
    os.kill(os.getpid(), signal.SIGKILL)
