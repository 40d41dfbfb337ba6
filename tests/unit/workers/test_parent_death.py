"""A process that is to end with its parent."""

import select
import signal
import subprocess
import sys

END_S_MAX = 60.0

CHILD = """
import signal
from workers.parent_death import end_with_parent
end_with_parent()
print("ready", flush=True)
signal.pause()
"""
PARENT = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", {CHILD!r}])
"""


def test_a_process_ends_when_its_parent_is_killed() -> None:
    """SIGKILL lets the parent say nothing, and an orphan goes on by default."""
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"

        parent.send_signal(signal.SIGKILL)

        # Only the child still holds the other end. Its parent has ended, though it was not reaped.
        readable, _, _ = select.select([parent.stdout], [], [], END_S_MAX)
        assert readable, "the child lives on"
        assert parent.stdout.read() == b""
