"""What is known of the network between the nodes."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from orchestrator.policies import Link, Pair


class Network(NamedTuple):
    """Links that were lost, and the search for one.

    Attributes:
        links: Lost ones, and ones that were lost and are whole again.
        num_probes: How many ``ProbeLinks`` there were in the whole run: the number of the newest.
        search: Number of the probe that looks for what ended the attempt, or holds up its forming;
            0 if there was none.
        begun_s: When it was begun.
        asked: The nodes that it asked.
        until_s: The bound of its answer; infinity if none is awaited.
        found: The ways without connection that it found.
        is_sound: Whether all nodes answered and every way has a connection.
        unread: Nodes that the newest read left out, as they could not be reached.
        suspects: Ways that the transport of a member called unreachable in this attempt.
        suspects_before: The same, in the attempt before.
    """

    links: tuple[Link, ...] = ()
    num_probes: int = 0
    search: int = 0
    begun_s: float = -inf
    asked: tuple[str, ...] = ()
    until_s: float = inf
    found: tuple[Pair, ...] = ()
    is_sound: bool = False
    unread: tuple[str, ...] = ()
    suspects: tuple[Pair, ...] = ()
    suspects_before: tuple[Pair, ...] = ()

    @property
    def is_searching(self) -> bool:
        """Return whether an answer of the search is awaited."""
        return self.until_s != inf
