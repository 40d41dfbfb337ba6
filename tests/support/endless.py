"""A script that runs alone and never ends, beside a process that it forked."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from everstep import Session, run


def _train(_session: Session) -> None:
    # As a DataLoader forks its own.
    child = os.fork()
    if child:
        os.write(1, f"{child}\n".encode())
    signal.pause()


@contextlib.contextmanager
def endless(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """Run the script while the block runs; the process that it forked lives as long."""
    command = [sys.executable, "-m", __name__, str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        forked = int(process.stdout.readline())
        try:
            yield process
        finally:
            process.kill()
            os.kill(forked, signal.SIGKILL)


if __name__ == "__main__":
    run(_train, directory=sys.argv[1], steps=1)
