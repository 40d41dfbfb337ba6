"""The exit codes of ``everstep``: one table for the code and the help."""

import signal
from enum import IntEnum

from orchestrator.errors import CapacityError, ConfigError, RunNotFoundError, TokenError
from ucp_core.errors import HeldError, StorageError
from workers.launchers import SCHEDULERS


class ExitCode(IntEnum):
    """How a command ended; 128 + n if signal n ended it."""

    OK = 0
    FAILED = 1
    BAD_INPUT = 2
    NO_CAPACITY = 3
    DAMAGED = 4
    NO_STORAGE = 5


_MEANINGS = {
    ExitCode.OK: "success, or `everstep stop` stopped the run",
    ExitCode.FAILED: "the run failed, or the answer is no (doctor, demo, diff, replay)",
    ExitCode.BAD_INPUT: "wrong usage, configuration or token, or no run in the directory",
    ExitCode.NO_CAPACITY: "no cluster, a lost cluster, or too few workers for too long a time",
    ExitCode.DAMAGED: ("another cluster took the run over, or a journal or checkpoint is damaged"),
    ExitCode.NO_STORAGE: "the storage does not answer, or refuses",
}

#: For ``everstep --help``.
TABLE = "Exit codes:\n\n" + "\n\n".join(
    [
        *(f"{code:d}  {meaning}" for code, meaning in _MEANINGS.items()),
        "129, 130, 143  a closed terminal, Ctrl-C or SIGTERM (SIGUSR1, SIGUSR2) ended the command",
    ]
)


def code_of_error(error: Exception) -> ExitCode:
    """Return the exit code for one of our errors."""
    if isinstance(error, CapacityError):
        return ExitCode.NO_CAPACITY
    if isinstance(error, ConfigError | HeldError | RunNotFoundError | TokenError):
        return ExitCode.BAD_INPUT
    if isinstance(error, StorageError):
        return ExitCode.NO_STORAGE
    return ExitCode.DAMAGED


def code_of_outcome(outcome: str) -> ExitCode:
    """Return the code for the ``outcome`` of a run's summary."""
    if outcome == "no_capacity":
        return ExitCode.NO_CAPACITY
    return ExitCode.FAILED if outcome == "failed" else ExitCode.OK


def code_of_signal(number: signal.Signals) -> int:
    """Return the code for a command that a signal ended."""
    return 128 + (signal.SIGTERM if number in SCHEDULERS else number)


def is_final(code: int) -> bool:
    """Return whether an ``everstep run`` that ended with ``code`` would do so again.

    Code 1 can also come from a process that Ray ended, and codes below 0 name the signal that
    killed it: the run's summary says whether the run has failed.
    """
    again = (ExitCode.FAILED, ExitCode.NO_CAPACITY, ExitCode.NO_STORAGE)
    return code not in again and code >= 0
