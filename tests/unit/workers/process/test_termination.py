"""The message to a script that sets a signal handler in a worker."""

import signal
import threading

import pytest

from workers.errors import TaskError
from workers.process.termination import explain_handlers


def test_a_handler_of_a_script_in_a_worker_is_refused_as_needless(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python says "signal only works in main thread", which does not help."""
    monkeypatch.setattr(signal, "signal", signal.signal)
    explain_handlers()
    told: list[str] = []

    def script() -> None:
        for number in (signal.SIGTERM, signal.SIGALRM):
            try:
                signal.signal(number, signal.SIG_DFL)
            except ValueError as error:
                # As libraries catch what Python raises.
                told.append(str(error) if isinstance(error, TaskError) else "")

    thread = threading.Thread(target=script)
    thread.start()
    thread.join()

    assert "signal.signal(SIGTERM, ...): a worker leaves by itself" in told[0]
    assert "signal.signal(SIGALRM, ...): Ray runs a script outside of the main thread" in told[1]
    # In the main thread, where a script runs alone, it works.
    assert signal.signal(signal.SIGUSR2, signal.getsignal(signal.SIGUSR2)) is not None
