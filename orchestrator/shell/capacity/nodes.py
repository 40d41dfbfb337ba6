"""Watch the cluster's nodes: which there are, and which are lost.

Ray takes 14 to 62 s to declare a machine dead. This watcher checks a node as soon as its raylet
closes the connection or a process on it is gone: a raylet that refuses connections is dead, and its
node is lost. A node is also lost if its machine is silent for some seconds while others answer. If
all are silent at once, the controller's own machine is cut off, and Ray decides.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ray

from orchestrator.core import events as ev
from orchestrator.shell.capacity.node_view import NodeView, view_of
from orchestrator.shell.capacity.notices import CONTROLLER, Notices
from orchestrator.shell.capacity.probes import accepts, is_silent
from orchestrator.shell.inbox import Inbox
from orchestrator.shell.threads import RAY, Tasks, in_thread
from workers.keeper import hung_up
from workers.protocol import LEASE_S, Notice

#: Period of reading the node table and drain notices, which takes 2.6 ms of processor time.
#: Connections reveal lost nodes; a new node and a notice of 30 s can wait this long.
POLL_S = 2.0
#: A node that was declared lost but still lives is accepted again after this.
RETURN_S = 5.0
#: A live raylet closes idle connections after two minutes. The watcher connects again after this,
#: also to a dying raylet, in case its port outlived the connection.
RECALL_S = 0.05

#: Ray's node table, and its drain notices: the deadline of a node in ms since the epoch.
Cluster = tuple[Sequence[Mapping[str, Any]], Mapping[str, int]]


def read_cluster() -> Cluster:
    """Return what Ray's head knows of the nodes and their notices."""
    from ray._private.state import state as ray_state

    # In this order: otherwise the notice of a node that dies in between would look withdrawn.
    notices = dict(ray_state.get_draining_nodes())
    return ray.nodes(), notices


class Nodes:
    """Watches the cluster's nodes.

    Args:
        inbox: Takes joins, losses and notices.
        needs: The resources that a worker may need; smaller nodes are ignored.
        rack_label: Ray's label of a node that names its rack; "" if there is none.
        here: The controller's node, which may be too small for workers.
        own_notice: Returns the notice for the controller's machine; None if it stays.
        drained: As for ``Notices``.
        read: Returns the cluster's state from Ray; called in a thread.

    Attributes:
        views: The nodes by id, lost ones included.
    """

    def __init__(
        self,
        inbox: Inbox,
        *,
        needs: Sequence[Mapping[str, float]],
        rack_label: str,
        here: str,
        own_host: str,
        own_notice: Callable[[], Notice | None],
        drained: Mapping[str, float],
        read: Callable[[], Cluster] = read_cluster,
    ) -> None:
        self._inbox = inbox
        self._needs = needs
        self.rack_label = rack_label
        self._own_host = own_host
        self.here = here
        self._own_notice = own_notice
        self._read = read
        self._buried: set[str] = set()
        self._looks = Tasks()
        self.views: dict[str, NodeView] = {}
        self.notices = Notices(self.views, inbox, here, drained)
        #: Set after the first look at the cluster.
        self.seen = asyncio.Event()
        #: Set when the controller has connected to the keepers that were running when it started.
        #: After a restart during a recovery, it must not mistake unknown memory for no memory.
        self.met = asyncio.Event()

    async def watch_forever(self) -> None:
        """Report joins, losses and notices until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(POLL_S)

    async def look(self) -> None:
        """Report changes since the last look."""
        table, notices = await in_thread(RAY, self._read)
        for row in table:
            self._compare(row)
        self.notices.on_ray(notices)
        self.notices.on_keeper(self.here, self._own_notice(), CONTROLLER)
        self.seen.set()

    def on_report(self, node: str) -> None:
        """Count a report of the keeper of ``node``."""
        if node in self.views:
            self.views[node].num_reports += 1

    def lost(self, node: str, cause: str) -> None:
        """Report ``node`` as lost, once."""
        view = self.views.get(node)
        if view is not None and not view.lost.is_set():
            self.give_up(node)
            self._inbox.post(ev.NodeLost(at_s=self._inbox.at_s(), node=node, cause=cause))

    def give_up(self, node: str) -> None:
        """Mark ``node`` as lost."""
        view = self.views.get(node)
        if view is None or view.lost.is_set():
            return
        view.state, view.lost_s = "lost", self._inbox.at_s()
        view.lost.set()
        for task in view.tasks:
            task.cancel()

    async def outlived(self, nodes: Iterable[str]) -> set[str]:
        """Return those of ``nodes`` that live although their keepers did not answer.

        The raylet of a live machine accepts connections.
        """
        views = [self.views[node] for node in nodes if node in self.views]
        there = await asyncio.gather(*(accepts(view.raylet_address) for view in views))
        return {
            view.node
            for view, is_there in zip(views, there, strict=True)
            if is_there and view.greeted.is_set() and not view.lost.is_set()
        }

    async def is_gone(self, node: str) -> bool:
        """Return whether ``node`` is lost; if that is not known, try to connect to its raylet.

        A raylet that refuses connections is dead, and a node's processes end with their raylet. If
        the machine does not answer at all, this decides nothing.
        """
        view = self.views.get(node)
        if view is None:
            # A restarted controller has not seen any node yet.
            return self.seen.is_set()
        if not view.lost.is_set() and await accepts(view.raylet_address) is False:
            view.is_dead = True
            self.lost(node, "its raylet refuses connections")
        return view.lost.is_set()

    def look_around(self, host: str) -> str:
        """Check in the background whether each node is lost.

        Return the node with the address ``host``; "" if none or several have it.
        """
        there = self._living()
        for view in there:
            self._looks.spawn(self.is_gone(view.node))
        found = [view.node for view in there if host in {view.host, view.raylet_address[0]}]
        return found[0] if host and len(found) == 1 else ""

    def longest_lease_s(self) -> float:
        """Return the longest lease of the nodes that are present, in seconds."""
        return max((view.lease_s for view in self._living()), default=LEASE_S)

    def kept(self) -> list[NodeView]:
        """Return the nodes that are present and have a keeper."""
        return [view for view in self._living() if view.keeper is not None]

    def _living(self) -> list[NodeView]:
        return [view for view in self.views.values() if not view.lost.is_set()]

    def _compare(self, row: Mapping[str, Any]) -> None:
        node = row["NodeID"]
        view = self.views.get(node)
        if not row["Alive"]:
            if view is None and node not in self._buried:
                # It may have gone while no controller ran.
                self._buried.add(node)
                cause = "Ray declared it dead"
                self._inbox.post(ev.NodeLost(at_s=self._inbox.at_s(), node=node, cause=cause))
            self.lost(node, "Ray declared it dead")
        elif view is not None:
            if view.lost.is_set() and self._inbox.at_s() - view.lost_s >= RETURN_S:
                self._looks.spawn(self._look_again(view))
        elif self._fits(row["Resources"]):
            view = self.views[node] = view_of(row, self.rack_label)
            view.tasks.append(asyncio.create_task(self._listen(view)))
            self._inbox.post(ev.NodeJoined(at_s=self._inbox.at_s(), node=node, rack=view.rack))
            self.notices.joined(node)

    def _fits(self, total: Mapping[str, float]) -> bool:
        return any(
            all(total.get(name, 0.0) >= amount for name, amount in need.items())
            for need in self._needs
        )

    async def _listen(self, view: NodeView) -> None:
        """Check the node as soon as its raylet closes the connection, or its machine is silent.

        A dead raylet closes it at once. Ray takes up to a second to fail the calls of a process
        that it knows to be gone.
        """
        while True:
            if await hung_up(view.raylet_address):
                if await self.is_gone(view.node):
                    return
            elif await is_silent(view, self.views, self._own_host):
                self.lost(view.node, "its machine answers nothing")
                return
            await asyncio.sleep(RECALL_S)

    async def _look_again(self, view: NodeView) -> None:
        """Forget a lost node that answers again; the next look finds it as a new one."""
        if await accepts(view.raylet_address):
            self.views.pop(view.node, None)
