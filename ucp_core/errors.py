"""What ucp_core raises on purpose.

::

    UcpError
    + CheckpointNotFoundError
    + CheckpointCorruptError
    | + ChecksumMismatchError
    | + UncoveredRegionError
    + UnsupportedVersionError
    + PatternError
    + RulesError
    + ForeignClassError
    + StorageError

A mistake of the caller in code is an ``AssertionError``; these are about the world and the input.
"""

from __future__ import annotations

from typing import Any


class UcpError(Exception):
    """Base of every error that ucp_core raises on purpose.

    Attributes:
        facts: What was found and where, for programs; the message tells the same to people.
    """

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.facts = facts

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), str(self), self.facts))


def _rebuild(kind: type[UcpError], message: str, facts: dict[str, Any]) -> UcpError:
    return kind(message, **facts)


class CheckpointNotFoundError(UcpError):
    """There is no committed checkpoint where one was asked for."""


class CheckpointCorruptError(UcpError):
    """A checkpoint contradicts itself or its files; another version has to be used."""


class ChecksumMismatchError(CheckpointCorruptError):
    """Bytes were read that are not the bytes that were written."""


class UncoveredRegionError(CheckpointCorruptError):
    """Part of a tensor is held by nobody, or by two holders that do not say they are replicas."""


class UnsupportedVersionError(UcpError):
    """The checkpoint was written in a format that this version cannot read."""


class PatternError(UcpError):
    """A pattern does not fit the shards that it is said to describe."""


class RulesError(UcpError):
    """A text of rules says what it cannot mean; ``line`` and ``column`` in its facts count from 1.

    Several problems are all in the message, and in ``facts["problems"]``.
    """


class ForeignClassError(UcpError):
    """A foreign file needs a class, or holds a kind of tensor, that is not known; nothing ran."""


class StorageError(UcpError):
    """The storage refused: missing, forbidden, full or unreachable."""
