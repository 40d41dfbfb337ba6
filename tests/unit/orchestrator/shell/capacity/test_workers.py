"""The controller's side of worker processes; these are stood in for at Ray's handles."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError

from orchestrator.core import Event, WorkerExited, WorkerReady
from orchestrator.shell import RunNames
from orchestrator.shell.capacity.workers import Workers
from tests.support.keeper_handles import Call

NODE = "a1b2" * 14


async def _false(_node: str) -> bool:
    return False


async def _done(_node: str, _worker: str) -> bool:
    return True


@pytest.mark.parametrize(
    ("error", "num_killed"),
    [(ActorUnavailableError("no connection", b"0" * 16), 1), (ActorDiedError(), 0)],
)
def test_a_worker_that_cannot_be_reached_after_a_restart_is_killed(
    monkeypatch: pytest.MonkeyPatch, error: RayError, num_killed: int
) -> None:
    """It is replaced, and trained or waited on unseen: nobody knew it when the run ended."""
    posted: list[Event] = []
    killed: list[Any] = []

    async def refuse() -> None:
        raise error

    handle = SimpleNamespace(hello=Call(refuse), hold=Call(refuse))
    workers = Workers(
        names=RunNames("test"),
        at_s=lambda: 0.0,
        post=posted.append,
        is_draining=lambda _: False,
        is_gone=_false,
        kill_on_node=_done,
        look_around=lambda _: "",
        boot={},
    )

    async def play() -> list[tuple[str, str, int]]:
        alive = await workers.survey([("w0001", "a", 60.0)])
        # As the machine orders for each that was not found.
        workers.kill("w0001")
        await asyncio.gather(*workers._tasks)
        return alive

    monkeypatch.setattr("ray.get_actor", lambda *_, **__: handle)
    monkeypatch.setattr("ray.kill", lambda found, **_: killed.append(found))

    assert asyncio.run(play()) == []
    assert killed == [handle] * num_killed
    assert [type(event) for event in posted] == [WorkerExited]


def test_nobody_is_put_beside_a_worker_that_may_still_live(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kill is lost with the network; it is told again until the node says that it worked."""
    heard: list[str] = []
    answers = iter([False, False, True])

    async def kill(node: str, worker: str) -> bool:
        is_gone = next(answers)
        heard.append(f"{worker} on {node} is {'gone' if is_gone else 'not confirmed'}")
        return is_gone

    async def hello() -> dict[str, int]:
        return {"pid": 7}

    async def hold() -> None:
        await asyncio.Event().wait()

    def boot(*, worker: str, directory: str) -> Any:
        assert directory
        heard.append(f"{worker} starts")
        return SimpleNamespace(hello=Call(hello), hold=Call(hold))

    seen: dict[tuple[str, type[Event]], asyncio.Event] = defaultdict(asyncio.Event)
    posted: list[WorkerReady | WorkerExited] = []

    def post(event: Event) -> None:
        assert isinstance(event, WorkerReady | WorkerExited)
        posted.append(event)
        seen[event.worker, type(event)].set()

    workers = Workers(
        names=RunNames("test"),
        at_s=lambda: 0.0,
        post=post,
        is_draining=lambda _: False,
        is_gone=_false,
        kill_on_node=kill,
        look_around=lambda _: "",
        boot={},
    )

    async def play() -> None:
        workers.start("w0001", NODE)
        await asyncio.wait_for(seen["w0001", WorkerReady].wait(), 120.0)
        workers.kill("w0001")
        await asyncio.wait_for(seen["w0001", WorkerExited].wait(), 120.0)
        # As the machine does when the node is back: one is started, is not wanted, is another.
        workers.start("w0002", NODE)
        await asyncio.sleep(0)
        workers.kill("w0002")
        workers.start("w0003", NODE)
        await asyncio.wait_for(seen["w0003", WorkerReady].wait(), 120.0)
        await workers.close()

    actor = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=boot))
    monkeypatch.setattr("ray.remote", lambda _: actor)
    monkeypatch.setattr("ray.kill", lambda *_, **__: None)
    asyncio.run(play())

    lost = f"w0001 on {NODE} is not confirmed"
    assert heard == ["w0001 starts", lost, lost, f"w0001 on {NODE} is gone", "w0003 starts"]
    exited = [event for event in posted if isinstance(event, WorkerExited)]
    assert [(event.worker, event.cause) for event in exited] == [
        ("w0001", "killed"),
        ("w0002", "killed"),
    ]


@pytest.mark.parametrize("why", ["killed", "over"])
def test_ray_that_does_not_answer_holds_up_nobody_and_what_it_starts_late_is_ended(
    monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """The loop stood still until Ray's head had taken in each process."""
    posted: list[Event] = []
    killed: list[Any] = []
    loop_goes_on = threading.Event()
    handle = SimpleNamespace()

    def boot(**_: object) -> Any:
        # Only the loop ends this wait.
        assert loop_goes_on.wait(120.0)
        return handle

    def end(found: Any, *, no_restart: bool) -> None:
        assert no_restart
        assert threading.current_thread() is not threading.main_thread()
        killed.append(found)

    workers = Workers(
        names=RunNames("test"),
        at_s=lambda: 0.0,
        post=posted.append,
        is_draining=lambda _: False,
        is_gone=_false,
        kill_on_node=_done,
        look_around=lambda _: "",
        boot={},
    )

    async def play() -> None:
        workers.start("w0001", NODE)
        await asyncio.sleep(0)
        if why == "killed":
            workers.kill("w0001")
        loop_goes_on.set()
        if why == "killed":
            await asyncio.wait(workers._tasks)
        await workers.close()

    actor = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=boot))
    monkeypatch.setattr("ray.remote", lambda _: actor)
    monkeypatch.setattr("ray.kill", end)
    asyncio.run(play())

    assert killed == [handle]
    assert [type(event) for event in posted] == ([WorkerExited] if why == "killed" else [])
