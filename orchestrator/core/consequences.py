"""What events come down to inside the core. What each does depends on the phase, as for events.

A handler calls ``transition.follow(AttemptFailed(...))``; ``phase_table`` says who handles that.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from orchestrator.policies import FaultKind


class AttemptFailed(NamedTuple):
    """A fault was found; the attempt has to end."""

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
    """A node without a member was lost. It blames nobody."""

    kind: FaultKind
    evidence: str


class MemoryLost(NamedTuple):
    """A keeper's memory is gone, so what was read from memory may be gone too."""


class RecoveryAdvanced(NamedTuple):
    """A member is out, or an answer came: the recovery may go on."""


class CapacityChanged(NamedTuple):
    """A worker, a reservation or a node can be used, or no longer."""


class ReachChanged(NamedTuple):
    """Keepers said which nodes reach each other."""


class LinksDue(NamedTuple):
    """Lost links were looked at: one may have been whole for its pause."""


class SearchAnswered(NamedTuple):
    """The search for a lost link has an answer, in ``network.found``."""


class KeepersOutdated(NamedTuple):
    """The plan or the bad sources that keepers know are not the newest."""


class BoundReached(NamedTuple):
    """The phase lasted until its bound, ``deadline_s``."""


class EventFolded(NamedTuple):
    """The event itself is handled: request what is missing and consider planned changes."""


Consequence: TypeAlias = (
    AttemptFailed
    | IdleLoss
    | MemoryLost
    | RecoveryAdvanced
    | CapacityChanged
    | ReachChanged
    | LinksDue
    | SearchAnswered
    | KeepersOutdated
    | BoundReached
    | EventFolded
)
