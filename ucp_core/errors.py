"""The errors of ucp_core.

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
    + MemoryBudgetError
    + StorageError
    + SupersededError
    + HeldError

They are about the input and the world; a mistake in the caller's code is an ``AssertionError``.
"""

from typing import Any, NamedTuple


class Place(NamedTuple):
    """A place in a text."""

    file: str = ""  #: Its name, or ``command line``; "" for nowhere.
    line: int = 0  #: Counts from 1; 0 for the whole text.
    column: int = 0  #: Counts from 1.

    def __str__(self) -> str:
        """Return ``file:line``."""
        return f"{self.file}:{self.line}" if self.line else self.file


class Problem(NamedTuple):
    """One thing that is wrong with a document."""

    #: The key, as in ``tensors.wte.slots.weight.fragments[3].box`` or ``train.lr``; "" for the
    #: whole document.
    path: str
    message: str  #: The mistake, and the right form.
    place: Place = Place()  #: Where a text for people has it.

    def __str__(self) -> str:
        """Return it as one line for people."""
        return ": ".join(part for part in (str(self.place), self.path, self.message) if part)


class FactsError(Exception):
    """An error with facts, which survives pickling; each package derives a base of its own.

    Attributes:
        facts: The finding and its place, for programs; the message says the same to people.
    """

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.facts = facts

    def __reduce__(self) -> tuple[Any, ...]:
        # Ray pickles errors; the default loses the keyword arguments.
        return (_rebuild, (type(self), str(self), self.facts))


def _rebuild(kind: type[FactsError], message: str, facts: dict[str, Any]) -> FactsError:
    return kind(message, **facts)


class UcpError(FactsError):
    """Base of every error of ucp_core."""


class CheckpointNotFoundError(UcpError):
    """There is no committed checkpoint at this place."""


class CheckpointCorruptError(UcpError):
    """A checkpoint contradicts itself or its files; use another version."""


class ChecksumMismatchError(CheckpointCorruptError):
    """The bytes that were read are not those that were written."""


class UncoveredRegionError(CheckpointCorruptError):
    """Part of a tensor is in no file, or in two that are not declared replicas."""


class UnsupportedVersionError(UcpError):
    """This version cannot read the checkpoint's format."""


class PatternError(UcpError):
    """A pattern does not fit the shards that it describes."""


class RulesError(UcpError):
    """Rules are wrong. The message and ``facts["problems"]`` contain every problem.

    ``line`` and ``column`` in ``facts`` are those of the first problem and count from 1.
    """


class ForeignClassError(UcpError):
    """A foreign file needs an unknown class or kind of tensor; none of its code ran."""


class MemoryBudgetError(UcpError):
    """The content of a foreign checkpoint takes more memory than reading may take."""


class StorageError(UcpError):
    """The storage refused: missing, forbidden, full or unreachable."""


class SupersededError(UcpError):
    """A later claim on the run's directory counts: the caller must write nothing more and end."""


class HeldError(UcpError):
    """Another process trains in the run's directory; nothing was written there."""
