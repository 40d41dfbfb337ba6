import signal
import subprocess
import sys
from typing import Any

from orchestrator.driver.faults import signal_rank
from orchestrator.driver.launch import Launched

_WAITING = "import signal; signal.pause()"


class Starved(Launched):
    """A run whose controller answers in time the third time that it is asked."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.num_asked = 0

    def status(self) -> dict[str, Any] | None:
        self.num_asked += 1
        if self.num_asked < 3:
            return None
        return {"workers": [{"rank": 1, "worker": "w0001", "pid": self._pid}]}

    def summary(self) -> dict[str, Any] | None:
        return None

    def note_fault(self, kind: str, target: str) -> None:
        """Note nothing: no test here looks."""


def test_a_fault_is_not_given_up_because_the_controller_is_late() -> None:
    """It has two seconds to answer; the demo would end without its faults on a busy machine."""
    with subprocess.Popen([sys.executable, "-c", _WAITING]) as process:
        try:
            hit = signal_rank(Starved(process.pid), 1, signal.SIGTERM)
            assert process.wait(120) == -signal.SIGTERM
        finally:
            process.kill()

    assert hit["worker"] == "w0001"
