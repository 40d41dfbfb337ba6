"""What is known of the network between the nodes."""

from __future__ import annotations

from math import inf
from typing import Final, NamedTuple, TypeAlias

#: The controller as an end of links: a node that it loses and finds again lost this one. It
#: is not probed, and that of a node that is never found again is forgotten.
CONTROLLER: Final = ""
#: Two nodes by name: the way from the first to the second, or, sorted, the link of both.
Pair: TypeAlias = tuple[str, str]
#: Sender, receiver and bytes a second; "" for all others, where one end is slow to all of them.
SlowLink: TypeAlias = tuple[str, str, float]

#: First pause of a link that is whole again, and the longest.
_PAUSE_S = 5.0
_PAUSE_S_MAX = 600.0


class Link(NamedTuple):
    """A link between two nodes that was lost, and perhaps is whole again."""

    ends: Pair  #: Its nodes, sorted.
    #: The ways that have no connection, by the last probe; () if it is whole.
    lost: tuple[Pair, ...]
    since_s: float  #: When it was lost in use, the last time.
    num_lost: int = 1  #: How often it was lost in use.
    whole_s: float = inf  #: Since when it is whole; infinity while it is lost.
    probe_s: float = inf  #: When to probe it again; infinity once its pause is over.

    @property
    def pause_s(self) -> float:
        """Return how long it must be whole before it is used."""
        return min(_PAUSE_S * 2.0 ** min(self.num_lost - 1, 10), _PAUSE_S_MAX)

    @property
    def until_s(self) -> float:
        """Return from when on it may be used; infinity while it is lost."""
        return self.whole_s + self.pause_s


class Network(NamedTuple):
    """Links that were lost, and the search for one."""

    links: tuple[Link, ...] = ()  #: Lost ones, and ones that were lost and are whole again.
    #: How many ``ProbeLinks`` there were in the whole run: the number of the newest.
    num_probes: int = 0
    #: Number of the probe that looks for what ended the attempt, or holds up its forming; 0 if
    #: there was none.
    search: int = 0
    begun_s: float = -inf
    asked: tuple[str, ...] = ()  #: The nodes that it asked.
    until_s: float = inf  #: The bound of its answer; infinity if none is awaited.
    found: tuple[Pair, ...] = ()  #: The ways without connection that it found.
    is_sound: bool = False  #: Whether all nodes answered and every way has a connection.
    #: Nodes that the newest read left out, as they could not be reached.
    unread: tuple[str, ...] = ()
    #: Ways that the transport of a member called unreachable in this attempt.
    suspects: tuple[Pair, ...] = ()
    suspects_before: tuple[Pair, ...] = ()  #: The same, in the attempt before.
    slow: tuple[SlowLink, ...] = ()  #: Links that keepers found slow the last time.
    without_slow: float = 1.0  #: What a step would take without them over what it took then.

    @property
    def is_searching(self) -> bool:
        """Return whether an answer of the search is awaited."""
        return self.until_s != inf
