from __future__ import annotations

import asyncio
import math
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest

from orchestrator.core import (
    Bounds,
    ControllerDraining,
    Event,
    NodeDraining,
    NodeJoined,
    NodeLost,
)
from orchestrator.shell import RunNames
from orchestrator.shell.capacity.nodes import FAR_S, Nodes, view_of
from workers.protocol import Notice

ROW = {
    "NodeID": "a1b2",
    "NodeManagerAddress": "10.0.0.7",
    "NodeManagerPort": 4711,
    "Labels": {"ray.io/node-id": "a1b2", "rack": "r7"},
}


@pytest.mark.parametrize(("label", "rack"), [("rack", "r7"), ("zone", ""), ("", "")])
def test_a_label_says_what_a_node_fails_together_with(label: str, rack: str) -> None:
    """A cluster of which only some nodes are labelled is common; those without fail alone."""
    view = view_of(ROW, label)

    assert (view.rack, view.raylet_address) == (rack, ("10.0.0.7", 4711))


def _nodes(post: Callable[[Event], None]) -> Nodes:
    return Nodes(
        names=RunNames("test"),
        needs=[{}],
        rack_label="",
        boot={},
        at_s=lambda: 1.0,
        post=post,
        on_keeper=lambda _: None,
        bounds=Bounds(),
    )


def test_a_node_that_was_not_seen_yet_is_not_taken_for_lost() -> None:
    """A worker that dies while a controller restarts would have all others of its node killed."""
    nodes = _nodes(lambda _: None)
    assert not asyncio.run(nodes.is_gone("a1b2"))
    nodes._met.set()
    assert asyncio.run(nodes.is_gone("a1b2"))


def test_a_node_that_went_while_no_controller_looked_is_reported() -> None:
    """Its workers would be taken for the guilty, and it for alive as long as the run lasts."""
    posted: list[Event] = []
    nodes = _nodes(posted.append)
    for _ in range(2):
        nodes._compare({"NodeID": "a1b2", "Alive": False})
    assert posted == [NodeLost(at_s=1.0, node="a1b2", cause="Ray declared it dead")]


def test_a_node_that_is_back_is_as_near_to_its_end_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was silent for a while under notice: the run takes it in as a new one, and for good."""
    posted: list[Event] = []
    node = "a1b2" * 14

    async def play() -> str:
        nodes = _nodes(posted.append)
        row = {**ROW, "NodeID": node, "Alive": True, "Resources": {}}
        nodes._compare(row)
        nodes._heed({node: 0})
        nodes.lost(node, "it was silent")
        await _forget(nodes, node)
        nodes._compare(row)
        nodes._heed({node: 0})
        for task in nodes.views[node].tasks:
            task.cancel()
        return nodes.views[node].state

    monkeypatch.setattr("orchestrator.shell.capacity.nodes.ray", _Ray())

    assert asyncio.run(play()) == "draining"
    assert [type(event) for event in posted] == [
        NodeJoined,
        NodeDraining,
        NodeLost,
        NodeJoined,
        NodeDraining,
    ]


def test_a_notice_is_followed_as_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A provider may come sooner than it said, or not at all; what dies is not called back."""
    posted: list[Event] = []
    node, other = "a1b2" * 14, "c3d4" * 14

    async def play() -> list[str]:
        nodes = _nodes(posted.append)
        for name in (node, other):
            nodes._compare({**ROW, "NodeID": name, "Alive": True, "Resources": {}})
        now_ms = int(time.time() * 1000)
        states = []
        later, sooner = {node: now_ms + 900_000}, {node: now_ms + 300_000, other: 0}
        for notices in (later, later, sooner, {}):
            if not notices:
                nodes.lost(other, "it died")
            nodes._heed(notices)
            states.append(nodes.views[node].state)
        for view in nodes.views.values():
            for task in view.tasks:
                task.cancel()
        assert (nodes.is_draining(node), nodes.is_draining(other)) == (False, True)
        return states

    monkeypatch.setattr("orchestrator.shell.capacity.nodes.ray", _Ray())

    assert asyncio.run(play()) == ["draining", "draining", "draining", "alive"]
    told = [event for event in posted if isinstance(event, NodeDraining)]
    assert [event.node for event in told] == [node, node, other, node]
    assert [event.deadline_s for event in told] == [
        pytest.approx(901.0, abs=120.0),
        pytest.approx(301.0, abs=120.0),
        1.0,
        math.inf,
    ]


def test_a_node_whose_clock_is_ahead_is_left_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says by its own clock when it goes: five minutes ahead, that seems to be long after."""
    posted: list[Event] = []
    node, ahead_s = "a1b2" * 14, 300.0

    async def play() -> None:
        nodes = _nodes(posted.append)
        nodes._compare({**ROW, "NodeID": node, "Alive": True, "Resources": {}})
        view = nodes.views[node]
        said = {
            "raylet_pid": 1, "pid": 2, "lease_s": 60.0, "wall_time": time.time() + ahead_s,
            "host": "", "port": 0, "secret": b"",
        }  # fmt: skip
        view.keeper = SimpleNamespace(hello=_Answers(said), hold=_Answers(None))
        view.tasks.append(asyncio.ensure_future(nodes._accompany(view)))
        await view.greeted.wait()
        nodes._heed({node: int((time.time() + ahead_s + 40.0) * 1000)})
        for task in view.tasks:
            task.cancel()

    monkeypatch.setattr("orchestrator.shell.capacity.nodes.ray", _Ray())
    asyncio.run(play())

    told = [event.deadline_s for event in posted if isinstance(event, NodeDraining)]
    assert told == [pytest.approx(41.0, abs=10.0)]


class _Answers:
    """A method of an actor: answers, or takes for ever where it has no answer."""

    def __init__(self, answer: object) -> None:
        self._answer = answer

    async def remote(self) -> object:
        if self._answer is None:
            await asyncio.Event().wait()
        return self._answer


def test_the_first_end_counts_of_what_a_node_knows_and_what_ray_was_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kubernetes tells Ray and the cloud tells the machine; each may take its notice back."""
    posted: list[Event] = []
    node = "a1b2" * 14
    taken = Notice(what="aws: spot instance, stop", deadline_s=1e9, left_s=120.0)

    async def play() -> None:
        nodes = _nodes(posted.append)
        nodes.on_notice(node, taken)  # of a node that a new controller has not met yet
        nodes._compare({**ROW, "NodeID": node, "Alive": True, "Resources": {}})
        likely = Notice(what="aws: rebalance recommendation", deadline_s=math.inf)
        in_a_minute = {node: int(time.time() * 1000) + 60_000}
        nodes.on_notice(node, likely)
        nodes.on_notice(node, taken)
        nodes.on_notice(node, replace(taken, left_s=118.0))  # said again, a while later
        nodes._heed(in_a_minute)
        nodes.on_notice(node, None)
        nodes._heed({})
        for task in nodes.views[node].tasks:
            task.cancel()
        assert (nodes.views[node].state, nodes.views[node].notice) == ("alive", "")

    monkeypatch.setattr("orchestrator.shell.capacity.nodes.ray", _Ray())
    asyncio.run(play())

    told = [event for event in posted if isinstance(event, NodeDraining)]
    assert [(event.notice, event.deadline_s) for event in told] == [
        ("aws: rebalance recommendation", 1.0 + FAR_S),
        ("aws: spot instance, stop", 121.0),
        ("drained by Ray", pytest.approx(61.0, abs=50.0)),
        ("", math.inf),
    ]


def test_the_end_of_the_controllers_machine_is_told_though_no_worker_is_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A head has no room for workers, and the cluster may go with it."""
    posted: list[Event] = []
    nodes = _nodes(posted.append)
    nodes._here = "c0c0"
    nodes._heed({"c0c0": 0})
    assert nodes.own_notice == "drained by Ray"
    nodes._heed({})
    assert nodes.own_notice == ""
    assert posted == [
        ControllerDraining(at_s=1.0, deadline_s=1.0, notice="drained by Ray"),
        ControllerDraining(at_s=1.0, deadline_s=math.inf),
    ]
    assert [record.message for record in caplog.records] == ["controller_draining"] * 2


def test_a_machine_that_answers_nothing_is_lost_while_another_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If all are silent at once it is the controller's own machine that is cut off."""
    posted: list[Event] = []
    nowhere, nobody, there = ("a1b2" * 14, "c3d4" * 14, "e5f6" * 14)

    async def join(nodes: Nodes, node: str, address: tuple[str, int]) -> None:
        host, port = address
        row = {"NodeID": node, "NodeManagerAddress": host, "NodeManagerPort": port, "Labels": {}}
        nodes._compare({**row, "Alive": True, "Resources": {}})

    async def play(living: tuple[str, int]) -> list[bool]:
        nodes = _nodes(posted.append)
        await join(nodes, nowhere, ("224.0.0.1", 9))
        await join(nodes, nobody, ("224.0.0.2", 9))
        view = nodes.views[nowhere]
        was_named = [await nodes._is_silent(view)]
        await join(nodes, there, living)
        was_named.append(await nodes._is_silent(nodes.views[there]))
        await asyncio.wait_for(view.lost.wait(), 120.0)
        await asyncio.wait_for(nodes.views[nobody].lost.wait(), 120.0)
        for task in nodes.views[there].tasks:
            task.cancel()
        assert not await nodes.kill_worker(nowhere, "w0001"), "it may compute on"
        return was_named

    monkeypatch.setattr("orchestrator.shell.capacity.nodes.ray", _Ray())
    with socket.create_server(("127.0.0.2", 0)) as server:
        assert asyncio.run(play(server.getsockname())) == [False, False]
    lost = {event.node: event.cause for event in posted if isinstance(event, NodeLost)}
    assert lost == dict.fromkeys((nowhere, nobody), "its machine answers nothing")


def test_a_keeper_that_ray_is_slow_to_start_is_ended_with_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop stood still until Ray's head had taken it in."""
    killed: list[object] = []
    loop_goes_on = threading.Event()

    async def clear() -> None:
        pass

    handle = SimpleNamespace(clear=SimpleNamespace(remote=clear))

    class SlowRay:
        util = _Ray.util

        def remote(self, _: type) -> SimpleNamespace:
            return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self.boot))

        def boot(self, **_: object) -> SimpleNamespace:
            # Only the loop ends this wait.
            assert loop_goes_on.wait(120.0)
            return handle

        def get_actor(self, _name: str, *, namespace: str) -> SimpleNamespace:
            assert namespace
            return handle

        def kill(self, keeper: object, *, no_restart: bool) -> None:
            assert no_restart
            assert threading.current_thread() is not threading.main_thread()
            killed.append(keeper)

    async def play() -> None:
        nodes, node = _nodes(lambda _: None), "a1b2" * 14
        nodes._compare({**ROW, "NodeID": node, "Alive": True, "Resources": {}})
        for _ in range(2):
            nodes.start_keeper(node)
        ending = asyncio.ensure_future(nodes.end_keepers())
        await asyncio.sleep(0)
        loop_goes_on.set()
        await ending

    monkeypatch.setattr("orchestrator.shell.capacity.nodes.ray", SlowRay())
    asyncio.run(play())

    assert killed == [handle]


async def _forget(nodes: Nodes, node: str) -> None:
    """Have the watcher find out that a lost node takes connections."""
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    view = nodes.views[node]
    view.raylet_address = server.sockets[0].getsockname()
    await nodes._look_again(view)
    server.close()
    assert node not in nodes.views


class _Ray:
    """Starts no actor, on the machine 10.0.0.1."""

    util = SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1")

    def remote(self, *_args: object, **_kwargs: object) -> _Ray:
        return self

    options = remote
