"""Keepers' handles that are answered in this process, and the controller's side of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from orchestrator.core import Bounds
from orchestrator.shell import RunNames
from orchestrator.shell.capacity.nodes import Nodes, NodeView
from orchestrator.shell.memory.snapshots import Answer, Snapshots
from ucp_core.storage import Store
from workers.protocol import Ending, Held, HeldPart, Inventory, KeeperOrder

ROOT = "run/checkpoints"
LINEAGE = ((1, 0),)


class Call:
    """A method of a Ray handle."""

    def __init__(self, do: Callable[..., Awaitable[Any]]) -> None:
        self.remote = do


class Handle:
    """What a keeper's Ray handle offers, answered in this process."""

    def __init__(self, node: str, steps: tuple[int, ...], rank: int) -> None:
        self.orders: list[KeeperOrder] = []
        self.flushed: list[tuple[int, int]] = []
        self.is_silent = False
        parts = tuple(HeldPart(arena=f"w{rank}.0", held=held(step, rank)) for step in steps)
        self._inventory = Inventory(node=node, host="h", port=7, parts=parts)
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


def held(step: int, rank: int) -> Held:
    return Held(
        slot=0,
        sequence=2,
        attempt=1,
        step=step,
        rank=rank,
        world_size=2,
        data_bytes=10,
        record_bytes=1,
    )


class Handles(dict[str, Handle]):
    """The keepers by node.

    Attributes:
        nodes: What the shell knows of the nodes.
    """

    def __init__(self, nodes: Nodes) -> None:
        super().__init__(aa=Handle("aa", (6, 7), 0), bb=Handle("bb", (6, 7), 1))
        self.nodes = nodes


def with_keepers(
    store: Store,
    act: Callable[[Snapshots, Handles], Coroutine[Any, Any, Any]],
) -> Any:
    """Run ``act`` with two keepers that hold steps 6 and 7 of one rank each."""

    async def run() -> Any:
        nodes = Nodes(
            rack_label="",
            names=RunNames("test"),
            needs=[{"CPU": 1.0}],
            boot={},
            at_s=lambda: 0.0,
            post=lambda _: None,
            on_keeper=lambda _: None,
            bounds=Bounds(),
        )
        nodes._met.set()
        handles = Handles(nodes)
        for node, handle in handles.items():
            nodes.views[node] = NodeView(node, ("", 0), keeper=handle, secret=node.encode())
        made = Snapshots(
            nodes=nodes,
            store=store,
            checkpoints=ROOT,
            life=0,
            total_steps=100,
        )
        return await act(made, handles)

    return asyncio.run(run())


def version_of(answer: Answer | None) -> tuple[int, str] | None:
    assert answer is not None
    found = answer.version
    return None if found is None else (found.step, found.source)


@dataclass
class SoundNodes:
    """Sound nodes that know of processes what they were told."""

    kill: Callable[[str, str], Awaitable[bool]] | None = None
    endings: dict[int, Ending] = field(default_factory=dict)

    def is_draining(self, _node: str) -> bool:
        return False

    async def is_gone(self, _node: str) -> bool:
        return False

    async def ending(self, _node: str, pid: int) -> Ending:
        return self.endings.get(pid, Ending(""))

    async def kill_worker(self, node: str, worker: str) -> bool:
        return await self.kill(node, worker) if self.kill is not None else True

    def look_around(self, host: str) -> str:  # noqa: ARG002
        return ""
