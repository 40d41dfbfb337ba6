"""Which signals end a command, and with which exit code."""

import os
import signal

import pytest

from orchestrator.cli.exit_codes import code_of_signal
from orchestrator.driver import Interrupt, interrupts, raise_interrupt


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 143),
        (signal.SIGHUP, 129),
        (signal.SIGUSR1, 143),
        (signal.SIGUSR2, 143),
    ],
)
def test_a_signal_of_a_scheduler_ends_a_command_as_sigterm_does(
    number: signal.Signals, code: int
) -> None:
    """Slurm's ``--signal`` sends SIGUSR1 before the time limit; its default is exit 138 at once."""

    # One that is ignored, as under nohup, stays ignored.
    signal.signal(number, signal.SIG_DFL)

    def end() -> None:
        with interrupts(raise_interrupt):
            os.kill(os.getpid(), number)
            signal.pause()

    with pytest.raises(Interrupt) as found:
        end()

    assert found.value.number is number
    assert code_of_signal(number) == code
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
