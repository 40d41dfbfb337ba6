"""Another run on the virtual cluster, which takes what room it finds and says what it lacks."""

from random import Random

from orchestrator.core import events as ev
from orchestrator.policies import Share
from tests.simulation.world.cluster import SimCluster

#: How often runs ask each other.
POLL_S = 0.2
#: So often the run hears that the other one is gone: its controller may be down.
_NUM_TOLD = 10


class Neighbour:
    """A run beside the one that is simulated: of it there is nothing but its share.

    Args:
        cluster: That both are on.
        rng: Decides how urgent and how large it is.
    """

    def __init__(self, cluster: SimCluster, rng: Random) -> None:
        self._cluster = cluster
        self._priority = cluster.rules.sharing.priority + rng.choice((-1, 0, 1, 1))
        self._num_min = rng.randint(1, 2)
        self._num_max = rng.randint(self._num_min, 8)
        self._rooms: list[str] = []
        self._has_begun = False
        self._num_told = 0
        self._turn()

    def end(self) -> None:
        """Leave everything. Safe to repeat."""
        self._num_max = 0

    def _turn(self) -> None:
        self._take_and_leave()
        share = Share(
            run="neighbour",
            priority=self._priority,
            num_min=self._num_min,
            has_begun=self._has_begun,
            num_held=len(self._rooms),
            num_lacking=self._num_max - len(self._rooms),
        )
        self._cluster.monitor.neighbour_says(self._cluster, share)
        others = (share,) if self._num_max else ()
        self._cluster.find(ev.OthersSeen, run="own", others=others)
        self._num_told += not others
        if self._num_told < _NUM_TOLD:
            self._cluster.at(POLL_S, self._turn)

    def _take_and_leave(self) -> None:
        nodes = self._cluster.nodes
        self._rooms = [name for name in self._rooms if nodes[name].alive]
        for node in nodes.values():
            num = min(node.num_free, self._num_max - len(self._rooms))
            if node.alive and num > 0:
                node.num_lent += num
                self._rooms += [node.name] * num
        self._has_begun |= len(self._rooms) >= self._num_min
        left = self._rooms[self._num_max :]
        del self._rooms[self._num_max :]
        for name in left:
            nodes[name].num_lent -= 1
        if left:
            self._cluster.place()
