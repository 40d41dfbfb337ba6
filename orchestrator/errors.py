"""Errors that the orchestrator raises on purpose.

OrchestratorError
+ ConfigError           every problem of a configuration at once
+ CapacityError         the cluster cannot give what the run needs
+ TokenError            who asks to change a run does not know its token
+ RunNotFoundError      there is no run where one was looked for
+ JournalCorruptError   a journal cannot be read back
+ CompactionError       a compacted journal cannot be used
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "CapacityError",
    "CompactionError",
    "ConfigError",
    "JournalCorruptError",
    "OrchestratorError",
    "RunNotFoundError",
    "TokenError",
]


class OrchestratorError(Exception):
    """Base of every error that the orchestrator raises on purpose.

    Attributes:
        facts: The facts of the message for machines: step, attempt, path, found, expected.
    """

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.facts = facts

    def __reduce__(self) -> tuple[Any, ...]:
        # Ray pickles errors; the default would lose the keyword arguments.
        return (_rebuild, (type(self), str(self), self.facts))


class ConfigError(OrchestratorError):
    """A configuration is refused; ``facts["problems"]`` has a line for each problem."""


class CapacityError(OrchestratorError):
    """The cluster cannot give what the run needs."""


class RunNotFoundError(OrchestratorError):
    """There is no run in a directory."""


class TokenError(OrchestratorError):
    """Whoever asks to change a run does not know its token."""


class JournalCorruptError(OrchestratorError):
    """A journal line before the last one cannot be read."""


class CompactionError(OrchestratorError):
    """A compacted journal cannot be used; the whole journal has to be folded."""


def _rebuild(
    kind: type[OrchestratorError], message: str, facts: dict[str, Any]
) -> OrchestratorError:
    return kind(message, **facts)
