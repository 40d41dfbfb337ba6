"""Keepers are asked what they hold: those that are silent, late, or lost meanwhile."""

import asyncio
import socket
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError

from orchestrator.shell.memory import snapshots as module
from orchestrator.shell.memory.snapshots import Snapshots
from tests.support.keeper_handles import LINEAGE, Handle, Handles, version_of, with_keepers
from ucp_core.storage import MemoryStore
from workers.protocol import Inventory, NodeReport


def test_a_silent_keeper_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be gone with its machine; what only it holds cannot be loaded either."""
    monkeypatch.setattr(module, "ASK_S", 0.05)

    async def act(made: Snapshots, handles: Handles) -> Any:
        handles["bb"].is_silent = True
        return version_of(await made.read(LINEAGE, enough_step=-1))

    assert with_keepers(MemoryStore(), act) is None


def test_a_node_that_is_lost_while_it_is_asked_is_not_waited_for() -> None:
    """The bound is for those of whom nothing is known."""

    async def act(made: Snapshots, handles: Handles) -> Any:
        handles["bb"].is_silent = True
        asked = asyncio.create_task(made.inventories())
        await asyncio.sleep(0)
        handles.nodes.views["bb"].lost.set()
        done, _ = await asyncio.wait([asked], timeout=module.ASK_S / 2)
        return [found.node for found in done.pop().result()]

    assert with_keepers(MemoryStore(), act) == ["aa"]


class Ended(Handle):
    """A keeper whose process is being started again."""

    async def _held(self) -> Inventory:
        raise ActorUnavailableError("it ended", None)


@pytest.mark.parametrize("kind", [Handle, Ended])
def test_a_silent_keeper_is_named_and_asked_again_once_it_is_back(
    monkeypatch: pytest.MonkeyPatch, kind: type[Handle]
) -> None:
    """Back at once or not: what only it holds was not looked at."""
    monkeypatch.setattr(module, "ASK_S", 0.05)

    async def act(made: Snapshots, handles: Handles) -> Any:
        handles.nodes.views["bb"].keeper = kind("bb", (), 1)
        handles.nodes.views["bb"].keeper.is_silent = True
        answers = [await made.read(LINEAGE, enough_step=-1)]
        handles.nodes.views["bb"].keeper = handles["bb"]
        answers.append(await made.read(LINEAGE, enough_step=-1))
        made.on_keeper("bb")
        answers.append(await made.read(LINEAGE, enough_step=-1))
        return [(version_of(one), one.unheard) for one in answers if one is not None]

    assert with_keepers(MemoryStore(), act) == [
        (None, {"bb"}), (None, {"bb"}), ((7, "memory"), frozenset()),
    ]  # fmt: skip


def test_nodes_outlive_their_keepers_while_their_raylets_take_connections() -> None:
    """The controller waits for keepers' answers, and a lost node gives none."""

    async def act(_: Snapshots, handles: Handles) -> Any:
        views = handles.nodes.views
        with socket.create_server(("127.0.0.1", 0)) as raylet:
            for view in views.values():
                view.raylet_address = raylet.getsockname()
                view.greeted.set()
            views["bb"].lost.set()
            found = [await handles.nodes.outlived(["aa", "bb", "cc"])]
        return [*found, await handles.nodes.outlived(["aa"])]

    assert with_keepers(MemoryStore(), act) == [{"aa"}, set()]


def test_a_keeper_that_did_not_answer_is_asked_again_when_it_was_heard_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A recovery may ask several times, and must not wait each time for one that has died."""
    monkeypatch.setattr(module, "ASK_S", 0.05)

    async def act(made: Snapshots, handles: Handles) -> Any:
        handles["bb"].is_silent = True
        answered = [[found.node for found in await made.inventories()]]
        handles["bb"].is_silent = False
        answered.append([found.node for found in await made.inventories()])
        made.on_report(NodeReport(node="bb", seq=1, workers=()))
        answered.append([found.node for found in await made.inventories()])
        return answered

    assert with_keepers(MemoryStore(), act) == [["aa"], ["aa"], ["aa", "bb"]]


class Late(Handle):
    """A keeper that answers the second time that it is asked."""

    num_asked = 0

    async def _held(self) -> Inventory:
        self.num_asked += 1
        self.is_silent = self.num_asked == 1
        return await super()._held()


def test_a_late_keeper_that_alone_holds_a_part_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a busy machine half a second is soon over, and storage is ten steps behind."""
    monkeypatch.setattr(module, "ASK_S", 0.05)
    monkeypatch.setattr(module, "LATE_S", 60.0)

    async def act(made: Snapshots, handles: Handles) -> Any:
        answers = []
        for steps in ((6, 7), (5,), ()):
            late = Late("bb", (6, 7), 1)
            handles.nodes.views["bb"].keeper = late
            said = Handle("bb", steps, 1)._inventory
            made.on_report(NodeReport(node="bb", seq=1, workers=(), inventory=said))
            found = version_of(await made.read(LINEAGE, enough_step=-1))
            parts = await made.find_parts(6, 1)
            answers.append((found, len(parts), late.num_asked))
        return answers

    assert with_keepers(MemoryStore(), act) == [
        ((7, "memory"), 2, 3), (None, 2, 2), (None, 2, 2),
    ]  # fmt: skip


def test_a_read_waits_once_for_a_late_keeper(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have died with its machine, and this is not known yet."""
    monkeypatch.setattr(module, "ASK_S", 0.05)
    monkeypatch.setattr(module, "LATE_S", 0.05)

    async def act(made: Snapshots, handles: Handles) -> Any:
        inventory = handles["bb"]._inventory
        made.on_report(NodeReport(node="bb", seq=1, workers=(), inventory=inventory))
        handles["bb"].is_silent = True
        first = version_of(await made.read(LINEAGE, enough_step=-1))
        monkeypatch.setattr(module, "ASK_S", 60.0)
        monkeypatch.setattr(module, "LATE_S", 60.0)
        async with asyncio.timeout(30.0):
            return first, version_of(await made.read(LINEAGE, enough_step=-1))

    assert with_keepers(MemoryStore(), act) == (None, None)
