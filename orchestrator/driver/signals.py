"""Handle signals that ask a command to end, and output that has no reader."""

import contextlib
import os
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from typing import IO, Any, NoReturn

from workers.launchers import SCHEDULERS

#: Ctrl-C, a supervisor or ``kill``, a closed terminal, a scheduler before its time limit (Slurm's
#: ``--signal``).
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *SCHEDULERS)


class Interrupt(KeyboardInterrupt):
    """A signal asked the command to end."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__()
        self.number = number


def raise_interrupt(number: signal.Signals) -> NoReturn:
    """Raise ``Interrupt``: a handler that ends the block at once."""
    raise Interrupt(number)


@contextlib.contextmanager
def interrupts(handle: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Call ``handle`` for each signal that asks the command to end, while the block runs.

    A signal that the command was started to ignore, as by ``nohup``, stays ignored.
    """
    last = signal.SIGINT

    def on_signal(number: int, _frame: object) -> None:
        nonlocal last
        last = signal.Signals(number)
        handle(last)

    before = {number: signal.getsignal(number) for number in _ENDING}
    # Python's default for SIGTERM and SIGHUP would not clean up.
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, on_signal)
    try:
        yield
    except KeyboardInterrupt as error:
        if isinstance(error, Interrupt):
            raise
        # Ray 2.60 replaces the exception of a handler that raises while `ray.get` waits.
        raise Interrupt(last) from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def discard(stream: IO[Any]) -> None:
    """Discard further output to ``stream``: its reader or its terminal is gone."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def discard_closed_terminal() -> None:
    """Discard this process's output to a terminal that was closed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            number = stream.fileno()
            if stat.S_ISCHR(os.fstat(number).st_mode) and not os.isatty(number):
                discard(stream)
