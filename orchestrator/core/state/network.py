"""The known state of the network between the nodes."""

from math import inf
from typing import Final, NamedTuple, TypeAlias

#: The controller as an end of a link: the link is lost if the controller loses a node and finds it
#: again. It is not probed, and it is forgotten if the node never comes back.
CONTROLLER: Final = ""
#: Two nodes by name: the way from the first to the second or, sorted, the link between them.
Pair: TypeAlias = tuple[str, str]
#: Sender, receiver and bytes a second. An end is "" if the other is slow with all nodes.
SlowLink: TypeAlias = tuple[str, str, float]

#: Shortest and longest pause of a link that is whole again.
_PAUSE_S = 5.0
_PAUSE_S_MAX = 600.0


class Link(NamedTuple):
    """A link between two nodes that was lost and may be whole again."""

    ends: Pair  #: Its nodes, sorted.
    #: The ways that the last probe found without a connection; () if the link is whole.
    lost: tuple[Pair, ...]
    since_s: float  #: When it was last lost in use.
    num_lost: int = 1  #: How often it was lost in use.
    whole_s: float = inf  #: Since when it is whole; infinity while it is lost.
    probe_s: float = inf  #: When to probe it again; infinity once its pause is over.

    @property
    def pause_s(self) -> float:
        """Return how long it must be whole before it is used, in seconds."""
        return min(_PAUSE_S * 2.0 ** min(self.num_lost - 1, 10), _PAUSE_S_MAX)

    @property
    def until_s(self) -> float:
        """Return when it may be used again; infinity while it is lost."""
        return self.whole_s + self.pause_s


class Network(NamedTuple):
    """Links that were lost, and the search for one."""

    links: tuple[Link, ...] = ()  #: Links that are lost, or were lost and are whole again.
    #: Number of the newest ``ProbeLinks``; numbers count up over the run.
    num_probes: int = 0
    #: Number of the probe for what ended the attempt or delays its forming; 0 if there was none.
    search: int = 0
    begun_s: float = -inf
    asked: tuple[str, ...] = ()  #: The nodes whose keepers were to probe one another.
    until_s: float = inf  #: When to stop waiting for the answer; infinity if none is awaited.
    found: tuple[Pair, ...] = ()  #: The ways without a connection that it found.
    #: Whether all nodes answered and every way between them has a connection.
    is_sound: bool = False
    #: Nodes that the newest read excluded because they were unreached.
    unread: tuple[str, ...] = ()
    #: Ways that the transport of a member called unreachable in this attempt.
    suspects: tuple[Pair, ...] = ()
    suspects_before: tuple[Pair, ...] = ()  #: The same for the previous attempt.
    slow: tuple[SlowLink, ...] = ()  #: Links that keepers last found slow.
    #: Estimated step time without slow links, divided by the measured one.
    without_slow: float = 1.0

    @property
    def is_searching(self) -> bool:
        """Return whether an answer of the search is awaited."""
        return self.until_s != inf
