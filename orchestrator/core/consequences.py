"""Consequences of events inside the core. As for events, the phase decides the handler.

A handler calls ``transition.follow(AttemptFailed(...))``; ``phase_table`` names what handles that.
"""

from typing import NamedTuple

from orchestrator.fault_kinds import FaultKind


class AttemptFailed(NamedTuple):
    """A fault was found, so the attempt has to end."""

    kind: FaultKind
    guilty: tuple[str, ...]  #: Workers proven to have caused it.
    evidence: str  #: One line for people.
    says_why: bool = False  #: Whether the evidence may replace that of the same fault.
    #: The rule of detection that found it, and the kind of its verdict; "" if none did.
    rule: str = ""
    verdict: str = ""
    #: (rank, worker, node) of each rank that it comes from; empty if that is not known.
    places: tuple[tuple[int, str, str], ...] = ()


class IdleLoss(NamedTuple):
    """A node without a member was lost. No worker is blamed."""

    kind: FaultKind
    evidence: str


class MemoryLost(NamedTuple):
    """A keeper's memory is gone, and with it perhaps the version that was read from memory."""


class RecoveryAdvanced(NamedTuple):
    """A member has left or an answer came, so the recovery may continue."""


class CapacityChanged(NamedTuple):
    """A worker, a reservation or a node became usable or unusable."""


class ReachChanged(NamedTuple):
    """Keepers reported which nodes reach each other."""


class LinksDue(NamedTuple):
    """It was time to check lost links; the pause of one may be over."""


class SearchAnswered(NamedTuple):
    """The search for a lost link has an answer, in ``network.found``."""


class KeepersOutdated(NamedTuple):
    """Keepers have an outdated plan or an outdated list of bad sources."""


class BoundReached(NamedTuple):
    """The phase lasted until its bound, ``deadline_s``."""


class EventFolded(NamedTuple):
    """The event was handled; next, request what is missing and consider planned changes."""
