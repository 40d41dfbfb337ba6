"""Errors that the orchestrator raises on purpose.

OrchestratorError
+ ConfigError           every problem of a configuration at once
+ CapacityError         the cluster cannot give what the run needs
+ RunFailedError        a budget is spent or the user's code is broken
+ RunNotFoundError      there is no run where one was looked for
+ JournalCorruptError   a journal cannot be read back
+ BookmarkError         what a journal amounted to was kept, and cannot be used
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "BookmarkError",
    "CapacityError",
    "ConfigError",
    "JournalCorruptError",
    "OrchestratorError",
    "RunFailedError",
    "RunNotFoundError",
]


class OrchestratorError(Exception):
    """Base of every error that the orchestrator raises on purpose.

    Attributes:
        facts: What the message says, for machines: step, attempt, path, found, expected.
    """

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.facts = facts

    def __reduce__(self) -> tuple[Any, ...]:
        # Ray ships errors; the default would lose the keyword arguments.
        return (_rebuild, (type(self), str(self), self.facts))


class ConfigError(OrchestratorError):
    """A configuration is refused; ``facts["problems"]`` lists all that is wrong, one line each."""


class CapacityError(OrchestratorError):
    """The cluster cannot give what the run needs."""


class RunFailedError(OrchestratorError):
    """The run gave up; the message has the last failures, the user's traceback first."""


class RunNotFoundError(OrchestratorError):
    """There is no run directory at a place, or nothing of a run is in it."""


class JournalCorruptError(OrchestratorError):
    """A journal line before the last one cannot be read."""


class BookmarkError(OrchestratorError):
    """What a journal amounted to up to some record was kept, and is of no use: fold it all."""


def _rebuild(
    kind: type[OrchestratorError], message: str, facts: dict[str, Any]
) -> OrchestratorError:
    return kind(message, **facts)
