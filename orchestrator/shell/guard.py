"""Kill the controller's process if a signal has stopped it.

A stopped controller looks alive to Ray, so Ray starts no other: the next fault would not be
handled, and a finished run would never end. Killing it does no harm: the workers continue to train,
and the next controller takes over about a second later.

The guard is a separate process, because all threads of a stopped process stand still. The kernel's
state of a process distinguishes a stopped one from a busy or waiting one. The guard runs as a file
without installed packages: it takes 10 MB of memory, and 30 us of processor time per check.
"""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

#: How many evenly spaced checks in a row must find it stopped. A guard that was suspended together
#: with it has made only one check in that time.
_NUM_LOOKS: Final = 10


def begin_guard(stopped_s: float) -> subprocess.Popen[bytes]:
    """Start a guard that kills this process once it has been stopped for ``stopped_s``.

    The guard ends with this process, or when the returned handle is dropped.
    """
    return subprocess.Popen(  # noqa: S603  our own file
        [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(stopped_s)],
        stdin=subprocess.PIPE,  # closed by the kernel when this process ends
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a signal to the group must not stop both
    )


def _is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped ``pid``; a process under a debugger has another state."""
    try:
        return b"\nState:\tT" in Path(f"/proc/{pid}/status").read_bytes()
    except OSError:
        return False


def _guard(pid: int, stopped_s: float) -> None:
    num_stopped = 0
    while not select.select([sys.stdin], [], [], stopped_s / _NUM_LOOKS)[0]:
        num_stopped = num_stopped + 1 if _is_stopped(pid) else 0
        if num_stopped >= _NUM_LOOKS:
            os.kill(pid, signal.SIGKILL)
            return


if __name__ == "__main__":
    _guard(int(sys.argv[1]), float(sys.argv[2]))
