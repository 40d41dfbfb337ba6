"""Keepers' handles that are answered in this process, and the controller's side of them."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.core import Bounds
from orchestrator.core import events as ev
from orchestrator.shell import RunNames
from orchestrator.shell.capacity import ActorPool, Keepers, Nodes, NodeView, Workers
from orchestrator.shell.capacity.nodes import Cluster
from orchestrator.shell.inbox import Inbox
from orchestrator.shell.memory.snapshots import Answer, Snapshots
from tests.support.made import held_of
from ucp_core.storage import Store
from workers.protocol import Inventory, KeeperOrder, PartRef

ROOT = "run/checkpoints"
LINEAGE = ((1, 0),)


class Call:
    """A method of a Ray handle."""

    def __init__(self, do: Callable[..., Awaitable[Any]]) -> None:
        self.remote = do


class Handle:
    """The methods of a keeper's Ray handle, answered in this process."""

    def __init__(self, node: str, steps: tuple[int, ...], rank: int) -> None:
        self.orders: list[KeeperOrder] = []
        self.flushed: list[tuple[int, int]] = []
        self.is_silent = False
        parts = tuple(
            PartRef(node=node, arena=f"w{rank}.0", held=held_of(step, rank)) for step in steps
        )
        self._inventory = Inventory(node=node, parts=parts)
        self.held, self.order, self.flush = Call(self._held), Call(self._order), Call(self._flush)

    async def _held(self) -> Inventory:
        if self.is_silent:
            await asyncio.Event().wait()
        return self._inventory

    def _order(self, order: KeeperOrder) -> Any:
        self.orders.append(order)

    async def _flush(self, attempt: int, step: int) -> bool:
        self.flushed.append((attempt, step))
        return True


@dataclass
class ClusterTable:
    """The nodes known to Ray's head, handed to the watcher in its place."""

    rows: dict[str, dict[str, Any]] = field(default_factory=dict)  #: Ray's row of each node.
    #: Drain notices: the deadline in ms since the epoch by node; 0 without one.
    notices: dict[str, int] = field(default_factory=dict)

    def add(self, node: str, address: tuple[str, int] = ("10.0.0.7", 4711)) -> None:
        host, port = address
        self.rows[node] = {
            "NodeID": node,
            "NodeManagerAddress": host,
            "NodeManagerPort": port,
            "Labels": {},
            "Alive": True,
            "Resources": {},
        }

    def read(self) -> Cluster:
        return list(self.rows.values()), self.notices


def nodes_of(
    table: ClusterTable,
    post: Callable[[ev.Event], None],
    *,
    at_s: Callable[[], float] = lambda: 1.0,
    here: str = "",
    drained: Mapping[str, float] | None = None,
) -> Nodes:
    """Return a watcher of the nodes in ``table``, on the machine 10.0.0.1."""
    return Nodes(
        Inbox(at_s, post),
        needs=[{}],
        rack_label="",
        here=here,
        own_host="10.0.0.1",
        own_notice=lambda: None,
        drained=drained or {},
        read=table.read,
    )


def keepers_of(
    nodes: Nodes,
    post: Callable[[ev.Event], None],
    at_s: Callable[[], float] = lambda: 1.0,
    bounds: Bounds = Bounds(),  # noqa: B008  it cannot change
) -> Keepers:
    """Return the keepers on ``nodes``, which are started on Ray."""
    names = RunNames("test")
    return Keepers(
        Inbox(at_s, post),
        nodes=nodes,
        pool=ActorPool(object, {}, names=names, name=names.keeper, boot={}),
        on_keeper=lambda _: None,
        bounds=bounds,
    )


def workers_of(
    nodes: Nodes, post: Callable[[ev.Event], None], at_s: Callable[[], float] = lambda: 0.0
) -> Workers:
    """Return the workers on ``nodes``, which are started on Ray."""
    names = RunNames("test")
    return Workers(
        Inbox(at_s, post),
        nodes=nodes,
        keepers=keepers_of(nodes, post),
        pool=ActorPool(object, {}, names=names, name=names.worker, boot={}),
    )


class Handles(dict[str, Handle]):
    """The keepers by node."""

    def __init__(self, nodes: Nodes) -> None:
        super().__init__(aa=Handle("aa", (6, 7), 0), bb=Handle("bb", (6, 7), 1))
        self.nodes = nodes  #: The shell's facts about the nodes.


def with_keepers(
    store: Store,
    act: Callable[[Snapshots, Handles], Coroutine[Any, Any, Any]],
) -> Any:
    """Run ``act`` with two keepers that hold steps 6 and 7 of one rank each."""

    async def run() -> Any:
        nodes = nodes_of(ClusterTable(), lambda _: None)
        nodes.met.set()
        handles = Handles(nodes)
        for node, handle in handles.items():
            nodes.views[node] = NodeView(node, ("", 0), keeper=handle, secret=node.encode())
        made = Snapshots(nodes=nodes, store=store, checkpoints=ROOT, total_steps=100)
        return await act(made, handles)

    return asyncio.run(run())


def version_of(answer: Answer | None) -> tuple[int, str] | None:
    assert answer is not None
    found = answer.version
    return None if found is None else (found.step, found.source)
