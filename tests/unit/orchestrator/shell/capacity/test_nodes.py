from __future__ import annotations

import asyncio
import math
import socket
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from orchestrator.core import events as ev
from orchestrator.shell.capacity.node_view import view_of
from orchestrator.shell.capacity.nodes import RETURN_S
from orchestrator.shell.capacity.notices import FAR_S
from orchestrator.shell.capacity.probes import is_silent
from tests.support.keeper_handles import Call, ClusterTable, keepers_of, nodes_of
from workers.protocol import Notice

ROW = {
    "NodeID": "a1b2",
    "NodeManagerAddress": "10.0.0.7",
    "NodeManagerPort": 4711,
    "Labels": {"ray.io/node-id": "a1b2", "rack": "r7"},
}
NODE, OTHER, THIRD = "a1b2" * 14, "c3d4" * 14, "e5f6" * 14


@pytest.mark.parametrize(("label", "rack"), [("rack", "r7"), ("zone", ""), ("", "")])
def test_a_label_says_what_a_node_fails_together_with(label: str, rack: str) -> None:
    """A cluster of which only some nodes are labelled is common; those without fail alone."""
    view = view_of(ROW, label)

    assert (view.rack, view.raylet_address) == (rack, ("10.0.0.7", 4711))


def test_a_node_that_was_not_seen_yet_is_not_taken_for_lost() -> None:
    """A worker that dies while a controller restarts would have all others of its node killed."""

    async def play() -> tuple[bool, bool]:
        nodes = nodes_of(ClusterTable(), lambda _: None)
        before = await nodes.is_gone(NODE)
        await nodes.look()
        return before, await nodes.is_gone(NODE)

    assert asyncio.run(play()) == (False, True)


def test_a_node_that_went_while_no_controller_looked_is_reported() -> None:
    """Its workers would be taken for the guilty, and it for alive as long as the run lasts."""
    posted: list[ev.Event] = []

    async def play() -> None:
        nodes = nodes_of(ClusterTable({NODE: {"NodeID": NODE, "Alive": False}}), posted.append)
        for _ in range(2):
            await nodes.look()

    asyncio.run(play())
    assert posted == [ev.NodeLost(at_s=1.0, node=NODE, cause="Ray declared it dead")]


def test_a_node_that_is_back_is_as_near_to_its_end_as_before() -> None:
    """It was silent for a while under notice: the run takes it in as a new one, and for good."""
    posted: list[ev.Event] = []
    now_s = [1.0]

    async def play() -> str:
        table = ClusterTable(notices={NODE: 0})
        table.add(NODE, raylet.getsockname())
        nodes = nodes_of(table, posted.append, at_s=lambda: now_s[0])
        await nodes.look()
        nodes.lost(NODE, "it was silent")
        now_s[0] += RETURN_S
        async with asyncio.timeout(120.0):
            while len(posted) < 5:
                await nodes.look()
        return nodes.views[NODE].state

    with socket.create_server(("127.0.0.1", 0)) as raylet:
        assert asyncio.run(play()) == "draining"
    assert [type(event) for event in posted] == [
        ev.NodeJoined,
        ev.NodeDraining,
        ev.NodeLost,
        ev.NodeJoined,
        ev.NodeDraining,
    ]


def test_a_notice_is_followed_as_it_changes() -> None:
    """A provider may come sooner than it said, or not at all; what dies is not called back."""
    posted: list[ev.Event] = []

    async def play() -> list[str]:
        table = ClusterTable()
        table.add(NODE)
        table.add(OTHER)
        nodes = nodes_of(table, posted.append)
        now_ms = int(time.time() * 1000)
        states = []
        later, sooner = {NODE: now_ms + 900_000}, {NODE: now_ms + 300_000, OTHER: 0}
        for table.notices in (later, later, sooner, {}):
            if not table.notices:
                nodes.lost(OTHER, "it died")
            await nodes.look()
            states.append(nodes.views[NODE].state)
        is_draining = nodes.notices.is_draining
        assert (is_draining(NODE), is_draining(OTHER)) == (False, True)
        return states

    assert asyncio.run(play()) == ["draining", "draining", "draining", "alive"]
    told = [event for event in posted if isinstance(event, ev.NodeDraining)]
    assert [event.node for event in told] == [NODE, NODE, OTHER, NODE]
    assert [event.deadline_s for event in told] == [
        pytest.approx(901.0, abs=120.0),
        pytest.approx(301.0, abs=120.0),
        1.0,
        math.inf,
    ]


def test_a_node_whose_clock_is_ahead_is_left_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says by its own clock when it goes: five minutes ahead, that seems to be long after."""
    posted: list[ev.Event] = []
    ahead_s = 300.0

    async def hello() -> dict[str, object]:
        return {
            "raylet_pid": 1, "pid": 2, "lease_s": 60.0, "wall_time": time.time() + ahead_s,
            "host": "", "port": 0, "secret": b"",
        }  # fmt: skip

    async def hold() -> None:
        await asyncio.Event().wait()

    handle = SimpleNamespace(hello=Call(hello), hold=Call(hold))

    async def play() -> None:
        table = ClusterTable()
        table.add(NODE)
        nodes = nodes_of(table, posted.append)
        keepers = keepers_of(nodes, posted.append)
        await nodes.look()
        keepers.start(NODE)
        await asyncio.wait_for(nodes.views[NODE].greeted.wait(), 120.0)
        table.notices = {NODE: int((time.time() + ahead_s + 40.0) * 1000)}
        await nodes.look()

    monkeypatch.setattr("ray.remote", lambda _: _Booting(lambda **_: handle))
    asyncio.run(play())

    told = [event.deadline_s for event in posted if isinstance(event, ev.NodeDraining)]
    assert told == [pytest.approx(41.0, abs=10.0)]


def test_the_first_end_counts_of_what_a_node_knows_and_what_ray_was_told() -> None:
    """Kubernetes tells Ray and the cloud tells the machine; each may take its notice back."""
    posted: list[ev.Event] = []
    taken = Notice(what="aws: spot instance, stop", deadline_s=1e9, left_s=120.0)

    async def play() -> None:
        table = ClusterTable()
        table.add(NODE)
        nodes = nodes_of(table, posted.append)
        hear = nodes.notices.on_keeper
        hear(NODE, taken)  # of a node that a new controller has not met yet
        await nodes.look()
        likely = Notice(what="aws: rebalance recommendation", deadline_s=math.inf)
        hear(NODE, likely)
        hear(NODE, taken)
        hear(NODE, replace(taken, left_s=118.0))  # said again, a while later
        table.notices = {NODE: int(time.time() * 1000) + 60_000}
        await nodes.look()
        hear(NODE, None)
        table.notices = {}
        await nodes.look()
        assert (nodes.views[NODE].state, nodes.views[NODE].notice) == ("alive", "")

    asyncio.run(play())

    told = [event for event in posted if isinstance(event, ev.NodeDraining)]
    assert [(event.notice, event.deadline_s) for event in told] == [
        ("aws: rebalance recommendation", 1.0 + FAR_S),
        ("aws: spot instance, stop", 121.0),
        ("drained by Ray", pytest.approx(61.0, abs=50.0)),
        ("", math.inf),
    ]


def test_a_drain_from_before_a_restart_holds_and_can_be_taken_back() -> None:
    """Ray and keepers say theirs again; a person's was forgotten, and the run came back there."""
    posted: list[ev.Event] = []

    async def play() -> None:
        table = ClusterTable()
        table.add(NODE)
        nodes = nodes_of(table, posted.append, drained={NODE: 21.0})
        await nodes.look()
        view = nodes.views[NODE]
        assert (view.state, view.notice) == ("draining", "drained from the page")
        assert nodes.notices.withdraw(NODE)
        assert (view.state, view.notice) == ("alive", "")
        assert not nodes.notices.withdraw(NODE)

    asyncio.run(play())

    assert posted == [
        ev.NodeJoined(at_s=1.0, node=NODE),
        ev.NodeDraining(at_s=1.0, node=NODE, deadline_s=21.0, notice="drained from the page"),
        ev.NodeDraining(at_s=1.0, node=NODE, deadline_s=math.inf, notice=""),
    ]


def test_the_end_of_the_controllers_machine_is_reported_without_workers_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A head has no room for workers, and the cluster may go with it."""
    posted: list[ev.Event] = []

    async def play() -> list[str]:
        table = ClusterTable(notices={"c0c0": 0})
        nodes = nodes_of(table, posted.append, here="c0c0")
        told = []
        for table.notices in ({"c0c0": 0}, {}):
            await nodes.look()
            told.append(nodes.notices.own)
        return told

    assert asyncio.run(play()) == ["drained by Ray", ""]
    assert posted == [
        ev.ControllerDraining(at_s=1.0, deadline_s=1.0, notice="drained by Ray"),
        ev.ControllerDraining(at_s=1.0, deadline_s=math.inf),
    ]
    assert [message.partition(":")[0] for message in caplog.messages] == [
        "the provider takes the controller's machine"
    ] * 2


def test_a_machine_that_answers_nothing_is_lost_while_another_answers() -> None:
    """If all are silent at once it is the controller's own machine that is cut off."""
    posted: list[ev.Event] = []

    async def play(living: tuple[str, int]) -> list[bool]:
        table = ClusterTable()
        table.add(NODE, ("224.0.0.1", 9))
        table.add(OTHER, ("224.0.0.2", 9))
        nodes = nodes_of(table, posted.append)
        await nodes.look()
        was_named = [await is_silent(nodes.views[NODE], nodes.views, "10.0.0.1")]
        table.add(THIRD, living)
        await nodes.look()
        was_named.append(await is_silent(nodes.views[THIRD], nodes.views, "10.0.0.1"))
        for node in (NODE, OTHER):
            await asyncio.wait_for(nodes.views[node].lost.wait(), 120.0)
        keepers = keepers_of(nodes, posted.append)
        assert not await keepers.kill_worker(NODE, "w0001"), "it may compute on"
        return was_named

    with socket.create_server(("127.0.0.2", 0)) as server:
        assert asyncio.run(play(server.getsockname())) == [False, False]
    lost = {event.node: event.cause for event in posted if isinstance(event, ev.NodeLost)}
    assert lost == dict.fromkeys((NODE, OTHER), "its machine answers nothing")


def test_a_keeper_that_ray_is_slow_to_start_is_ended_with_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop stood still until Ray's head had taken it in."""
    killed: list[object] = []
    loop_goes_on = threading.Event()

    async def clear() -> None:
        pass

    handle = SimpleNamespace(clear=Call(clear))

    def boot(**_: object) -> SimpleNamespace:
        # Only the loop ends this wait.
        assert loop_goes_on.wait(120.0)
        return handle

    def kill(keeper: object, *, no_restart: bool) -> None:
        assert no_restart
        assert threading.current_thread() is not threading.main_thread()
        killed.append(keeper)

    async def play() -> None:
        table = ClusterTable()
        table.add(NODE)
        nodes = nodes_of(table, lambda _: None)
        keepers = keepers_of(nodes, lambda _: None)
        await nodes.look()
        for _ in range(2):
            keepers.start(NODE)
        ending = asyncio.ensure_future(keepers.close())
        await asyncio.sleep(0)
        loop_goes_on.set()
        await ending

    monkeypatch.setattr("ray.remote", lambda _: _Booting(boot))
    monkeypatch.setattr("ray.kill", kill)
    asyncio.run(play())

    assert killed == [handle]


class _Booting(Call):
    """A class of actors, each booted by ``remote``."""

    def options(self, **_: object) -> _Booting:
        return self
