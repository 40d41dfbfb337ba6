"""Handle SIGTERM and SIGINT in a worker process, and signal handlers of scripts.

Only a process's main thread may set a signal handler. In a Ray worker that thread is Ray's; actors
and scripts run in others. Ray's handler would end the process in the middle of a step.
"""

import os
import signal
import threading
from collections.abc import Callable
from typing import Any, Final

import ray._private.worker

from workers.errors import HandlerError

#: The signals with which schedulers end a process.
_ENDINGS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
#: Ray's handler calls its module's function of this name, in its main thread (Ray 2.60).
_ENDS: Final = "raise_sys_exit_with_custom_error_message"


def exit_code(number: int) -> int:
    """Return the exit code that shells report for a process that a signal ended."""
    return 128 + number


def on_termination(act: Callable[[int], None]) -> None:
    """Call ``act`` in the main thread on SIGTERM and SIGINT, which mean the same.

    Ray's handler is called once, with a replacement action that installs ours. If this version of
    Ray has another handler, do nothing.
    """
    module: Any = ray._private.worker  # noqa: SLF001  no public way
    handler: Any = signal.getsignal(signal.SIGTERM)
    names = getattr(getattr(handler, "__code__", None), "co_names", ())
    if _ENDS not in names:
        return
    theirs = getattr(module, _ENDS)

    def install(*_: Any, **__: Any) -> None:
        setattr(module, _ENDS, theirs)
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, lambda number, _frame: act(number))
        # A raylet starts with SIGINT blocked, and its workers inherit that.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    setattr(module, _ENDS, install)
    os.kill(os.getpid(), signal.SIGTERM)


def explain_handlers() -> None:
    """Raise an error that explains what to do, if a script sets a signal handler in a thread."""
    real = signal.signal

    def set_handler(number: int, handler: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            return real(number, handler)
        why = "Ray runs a script outside of the main thread, and Python sets handlers there only"
        if number in _ENDINGS:
            why = (
                "a worker leaves by itself on SIGTERM, at the next step boundary and with "
                "that step saved"
            )
        raise HandlerError(
            f"signal.signal({signal.Signals(number).name}, ...): {why}. Leave the handler out, or "
            "set it only where the script runs alone: `if threading.current_thread() is "
            "threading.main_thread():`"
        )

    signal.signal = set_handler  # type: ignore[assignment]
