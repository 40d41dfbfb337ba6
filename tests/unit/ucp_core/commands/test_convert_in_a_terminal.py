"""``ucp convert`` in a terminal shows a bar, and still works in processes."""

import os
import pty
import subprocess
import sys
from pathlib import Path

from tests.support.checkpoints import Whole, save
from ucp_core.geometry import TensorKey
from ucp_core.storage import LocalStore

#: Runs the command, and notes in the file of its first argument how often it forks.
_NOTING_FORKS = """
import os, sys
noted = open(sys.argv.pop(1), "w")
os.register_at_fork(after_in_parent=lambda: print("forked", file=noted, flush=True))
from ucp_core.cli import main
main()
"""


def test_a_bar_does_not_turn_processes_into_threads(tmp_path: Path) -> None:
    """A thread that draws the bar would forbid to fork: one interpreter would do all the work."""
    data = bytes(80 << 20)
    state = {TensorKey("w", "weight"): Whole(dtype="F32", shape=(len(data) // 4,), data=data)}
    save(LocalStore(), state, step=7, root=str(tmp_path))
    noted = tmp_path / "noted"
    command = [sys.executable, "-c", _NOTING_FORKS, str(noted)]
    command += ["convert", str(tmp_path / "step-00000007"), str(tmp_path / "out")]
    command += ["--processes", "2", "--memory", "1GiB"]
    terminal, end = pty.openpty()
    with subprocess.Popen(command, stdin=end, stdout=end, stderr=end) as process:
        os.close(end)
        shown = _read_all(terminal)
    os.close(terminal)

    assert process.returncode == 0, shown
    assert "converting" in shown, "there was no bar"
    assert noted.read_text().splitlines() == ["forked", "forked"]


def _read_all(terminal: int) -> str:
    shown = b""
    while True:
        try:
            part = os.read(terminal, 1 << 16)
        except OSError:
            # Linux says so when the other end is closed.
            return shown.decode()
        if not part:
            return shown.decode()
        shown += part
