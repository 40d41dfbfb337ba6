"""Errors that the orchestrator raises on purpose; each class says when."""

from ucp_core.errors import FactsError

__all__ = [
    "CapacityError",
    "CompactionError",
    "ConfigError",
    "JournalCorruptError",
    "OrchestratorError",
    "RunNotFoundError",
    "TokenError",
]


class OrchestratorError(FactsError):
    """Base of every error that the orchestrator raises on purpose."""


class ConfigError(OrchestratorError):
    """A configuration is refused; ``facts["problems"]`` has a line for each problem."""


class CapacityError(OrchestratorError):
    """The cluster cannot give what the run needs."""


class RunNotFoundError(OrchestratorError):
    """There is no run in a directory."""


class TokenError(OrchestratorError):
    """A request to change a run does not carry its token."""


class ActionError(OrchestratorError):
    """The run cannot do now what a person asked for."""


class JournalCorruptError(OrchestratorError):
    """A journal line before the last one cannot be read."""


class CompactionError(OrchestratorError):
    """A compacted journal cannot be used; the whole journal has to be folded."""
