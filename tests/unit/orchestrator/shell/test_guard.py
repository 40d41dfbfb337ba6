import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

#: A guarded process: says who guards it, works for so long and ends, or waits for a signal.
_GUARDED = """
import signal, sys, time
from orchestrator.shell.guard import begin_guard
guard = begin_guard(float(sys.argv[1]))
print(guard.pid, flush=True)
while time.process_time() < float(sys.argv[2]):
    pass
if not float(sys.argv[2]):
    signal.pause()
"""
pytestmark = pytest.mark.skipif(
    not hasattr(os, "pidfd_open"), reason="the system cannot watch processes"
)

_SOON_S = 0.2
_NEVER_S = 10_000.0


@contextlib.contextmanager
def _guarded(
    stopped_s: float, *, work_s: float = 0.0
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Yield a process and a descriptor that tells of the end of its guard."""
    command = [sys.executable, "-c", _GUARDED, str(stopped_s), str(work_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        guard = os.pidfd_open(int(process.stdout.readline()))
        try:
            yield process, guard
        finally:
            os.close(guard)
            process.kill()


def test_a_stopped_process_is_ended_and_its_guard_with_it() -> None:
    """It hears nothing, and its threads stand still: no code in it can notice."""
    with _guarded(_SOON_S) as (process, guard):
        process.send_signal(signal.SIGSTOP)

        assert process.wait(120) == -signal.SIGKILL
        assert select.select([guard], [], [], 120)[0]


def test_a_guard_ends_with_a_process_that_was_not_stopped() -> None:
    """A controller is killed or done long before; guards that stay would pile up on the head."""
    with _guarded(_NEVER_S) as (process, guard):
        process.kill()

        assert select.select([guard], [], [], 120)[0]


def test_a_process_that_is_only_busy_is_left_alone() -> None:
    """One that does not answer for that reason has nothing wrong with it."""
    with _guarded(_SOON_S, work_s=5 * _SOON_S) as (process, _):
        assert process.wait(120) == 0
