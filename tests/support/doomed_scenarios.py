"""Operations during which a node dies, and facts that must hold wherever that catches them."""

from collections.abc import Callable
from dataclasses import dataclass

from tests.support.doomed import Moment
from tests.support.doomed_cluster import Cluster, Loaded, Protect

MEMORY, STORAGE = "memory", "storage"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Step 1 is protected and stored; then something goes on, in which a node dies."""

    name: str  #: Name of the test.
    num_nodes: int  #: How many there are.
    protect: Protect  #: How they protect each other.
    moment: Moment  #: The events of node 0 that are counted.
    act: Callable[[Cluster], None]  #: The operation, until it is done or the node has died.
    lost_before: int = -1  #: A node that was lost before that; -1 for none.
    also_lost: tuple[int, ...] = ()  #: Nodes that are lost together with it.
    sources: tuple[str, ...] = (MEMORY,)  #: Where the run may go on from.
    num_moments_min: int = 5  #: Fewer would mean that not every moment was counted.

    def begin(self, cluster: Cluster, after: int) -> None:
        """Bring the run to where it goes on, with node 0 doomed."""
        cluster.begin(range(self.num_nodes), resume=0)
        cluster.take(1, pin=True)
        cluster.settle()
        if self.lost_before >= 0:
            cluster.lose(self.lost_before)
        cluster.nodes[0].doom(self.moment, after)

    def check(self, cluster: Cluster) -> Loaded:
        """Lose what is to be lost, and look at what is left."""
        for number in (0, *self.also_lost):
            cluster.lose(number)
        found = cluster.recover()
        assert found.step >= 1, "what was protected, or stored, is gone"
        assert found.source in self.sources, found
        assert found.bad == (), found
        return found


def snapshot(cluster: Cluster) -> None:
    """Take the next snapshot, which is copied, or of which parities are made."""
    cluster.take(2)
    cluster.settle()


def store(cluster: Cluster) -> None:
    """Take the next snapshot, which the keepers store."""
    cluster.take(2, pin=True)
    cluster.settle()


def load(cluster: Cluster) -> None:
    """Load on the last node what is left."""
    cluster.load(cluster.newest(), cluster.left()[-1])


def protect_again(cluster: Cluster) -> None:
    """Go on with the nodes that are left: their versions are protected again, then new ones."""
    members = [member for member in cluster.members if cluster.nodes[member] in cluster.left()]
    cluster.begin(members, resume=1)
    cluster.settle()
    cluster.take(2)
    cluster.settle()


COPY = Protect(copies=1)
TWO_COPIES = Protect(copies=2)
PARITY = Protect(parities=1)
TWO_PARITIES = Protect(parities=2)
GROUPS = Protect(parities=1, group_size=3)

SCENARIOS = (
    Scenario(
        name="copying", num_nodes=3, protect=COPY, moment=Moment.CHANGE, act=snapshot,
    ),
    Scenario(
        name="being copied", num_nodes=3, protect=COPY, moment=Moment.SEND, act=snapshot,
    ),
    Scenario(
        name="copying two, with another", num_nodes=4, protect=TWO_COPIES,
        moment=Moment.CHANGE, act=snapshot, also_lost=(1,),
    ),
    Scenario(
        name="making a parity", num_nodes=4, protect=PARITY, moment=Moment.CHANGE, act=snapshot,
    ),
    Scenario(
        name="read for a parity", num_nodes=4, protect=PARITY, moment=Moment.SEND, act=snapshot,
    ),
    Scenario(
        name="making two parities, with another of its group", num_nodes=5,
        protect=TWO_PARITIES, moment=Moment.CHANGE, act=snapshot, also_lost=(3,),
    ),
    Scenario(
        name="making a parity, with one of another group", num_nodes=6, protect=GROUPS,
        moment=Moment.CHANGE, act=snapshot, also_lost=(4,),
    ),
    Scenario(
        name="making a parity, with another of its group", num_nodes=3, protect=PARITY,
        moment=Moment.CHANGE, act=snapshot, also_lost=(1,), sources=(STORAGE,),
    ),
    Scenario(
        name="loaded from, beside copies", num_nodes=3, protect=COPY, moment=Moment.SEND,
        act=load,
    ),
    Scenario(
        name="loaded from, beside parities", num_nodes=5, protect=TWO_PARITIES,
        moment=Moment.SEND, act=load, lost_before=2,
    ),
    Scenario(
        name="loaded from, beside second copies", num_nodes=4, protect=TWO_COPIES,
        moment=Moment.SEND, act=load, lost_before=1,
    ),
    Scenario(
        name="protecting again by copies", num_nodes=4, protect=COPY, moment=Moment.CHANGE,
        act=protect_again, lost_before=2,
    ),
    Scenario(
        name="protected again by copies", num_nodes=4, protect=COPY, moment=Moment.SEND,
        act=protect_again, lost_before=2,
    ),
    Scenario(
        name="protecting again versions without a copy", num_nodes=4, protect=COPY,
        moment=Moment.CHANGE, act=protect_again, lost_before=3, sources=(MEMORY, STORAGE),
    ),
    Scenario(
        name="protecting again by two parities", num_nodes=5, protect=TWO_PARITIES,
        moment=Moment.CHANGE, act=protect_again, lost_before=2,
    ),
    Scenario(
        name="storing", num_nodes=3, protect=COPY, moment=Moment.STORE, act=store,
        sources=(MEMORY, STORAGE), num_moments_min=10,
    ),
)  # fmt: skip
