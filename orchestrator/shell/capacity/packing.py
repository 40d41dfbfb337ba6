"""Choose nodes for reservations so that each tensor group fits on one node.

Ray 2.60 spreads groups of one bundle: six on three nodes of four put two on each, and no node has
room for a tensor group of four. A group of four bundles does not help, because Ray cannot release a
part of it.
"""

import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Final

from ray._private.state import available_resources_per_node

#: Ray shows a reservation only a moment later. Until then requests are counted here.
_FRESH_S: Final = 1.0


class Packing:
    """Chooses nodes for requests, in any thread; ``group`` workers must be on one node."""

    def __init__(self, group: int) -> None:
        self._group = group
        self._lock = threading.Lock()
        self._room: Counter[str] = Counter()
        self._begun: Counter[str] = Counter()
        self._asked_s = float("-inf")

    def node_for(
        self, needs: Mapping[str, float], avoid: Collection[str], held: Mapping[int, str | None]
    ) -> str | None:
        """Return the node for a worker that needs these resources; None if any will do.

        ``held`` has the nodes of the run's reservations; None for pending ones.
        """
        if self._group == 1:
            return None
        with self._lock:
            if time.monotonic() > self._asked_s + _FRESH_S:
                self._begun = Counter(node for node in held.values() if node is not None)
                self._room = Counter(
                    {
                        node: int(min(free.get(name, 0.0) / each for name, each in needs.items()))
                        for node, free in available_resources_per_node().items()
                    }
                )
            self._asked_s = time.monotonic()
            node = choose(self._room, self._begun, self._group, avoid)
            if node is not None:
                self._room[node] -= 1
                self._begun[node] += 1
            return node


def choose(
    room: Mapping[str, int], begun: Mapping[str, int], group: int, avoid: Collection[str] = ()
) -> str | None:
    """Return the node of an incomplete group with room, else the node with the most room, if any.

    ``room`` says how many more workers each node has room for, ``begun`` how many the run has
    there. ``group`` workers must be on one node.
    """
    open_ = {node: free for node, free in room.items() if free > 0 and node not in avoid}
    return max(
        open_,
        key=lambda node: (begun.get(node, 0) % group > 0, open_[node], node),
        default=None,
    )
