"""Tell keepers at the start of each attempt how to protect it; they then work alone."""

from collections.abc import Mapping, Sequence

from orchestrator.core import actions as act
from orchestrator.policies import bad_sources
from orchestrator.shell.capacity import Nodes, NodeView
from workers.protocol import GroupPlace, KeeperOrder, ParityGroup, Peer

#: A keeper that reaches none of this many other nodes is cut off.
NUM_OTHERS = 3


class Orders:
    """Gives orders to keepers in the run's ``claim``, and keeps the last one."""

    def __init__(self, nodes: Nodes, claim: int) -> None:
        self._nodes = nodes
        self._claim = claim
        self._last: act.OrderKeepers | None = None

    def give(self, order: act.OrderKeepers) -> None:
        """Send all keepers the order for an attempt, without waiting."""
        self._last = order
        views = self._nodes.kept()
        peers = {view.node: view.peer for view in views if view.secret}
        for view in views:
            told = KeeperOrder(
                attempt=order.attempt,
                lineage=order.lineage,
                copies_of=tuple(
                    peers[name] for name in order.plan.copies_of(view.node) if name in peers
                ),
                parity=_parity_group(order, view.node, peers),
                bad=bad_sources.on_node(order.bad, view.node),
                claim=self._claim,
                others=self._others(view, order.nodes),
            )
            view.keeper.order.remote(told)

    def repeat(self) -> None:
        """Give the last order again: a keeper that restarted has forgotten it."""
        if self._last is not None:
            self.give(self._last)

    def _others(self, view: NodeView, members: Sequence[str]) -> tuple[tuple[str, int], ...]:
        """Return a few other nodes with members for a keeper to probe: the next ones in a ring."""
        nodes = list(dict.fromkeys(members))
        at = nodes.index(view.node) if view.node in nodes else len(nodes)
        ring = [self._nodes.views.get(node) for node in (*nodes[at + 1 :], *nodes[:at])]
        found = [other.raylet_address for other in ring if other is not None]
        return tuple(found[:NUM_OTHERS]) if at < len(nodes) else ()


def _parity_group(
    order: act.OrderKeepers, node: str, peers: Mapping[str, Peer]
) -> ParityGroup | None:
    """Return the parity group of a keeper; None until all keepers in it are connected."""
    plan = order.plan
    group = plan.group_of(node) if plan.is_parity else ()
    if not group or not peers.keys() >= set(group):
        return None
    places = tuple(
        GroupPlace(
            peer=None if name == node else peers[name],
            ranks=tuple(rank for rank, where in enumerate(order.nodes) if where == name),
        )
        for name in group
    )
    return ParityGroup(
        attempt=order.attempt,
        tolerance=plan.tolerance,
        places=places,
        over_replicas=plan.rank_groups is not None,
    )
