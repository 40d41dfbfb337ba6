"""What a collective can raise.

GroupError
+ AbortedError      the orchestrator aborted the attempt; no rank is to blame
+ CollectiveError   the transport failed; a hint that a peer died, no proof of which one
"""

from __future__ import annotations

from typing import Any


class GroupError(Exception):
    """Base of what the recorded process groups raise on purpose; ``facts`` carry the numbers."""

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.facts = facts

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), str(self), self.facts))


class AbortedError(GroupError):
    """The attempt was aborted from outside. Facts: ``attempt``, and ``op`` if one was called."""


class CollectiveError(GroupError):
    """gloo or NCCL failed under a collective. Facts: ``attempt``, ``group``, ``op``, ``seq``."""


def _rebuild(kind: type[GroupError], message: str, facts: dict[str, Any]) -> GroupError:
    return kind(message, **facts)
