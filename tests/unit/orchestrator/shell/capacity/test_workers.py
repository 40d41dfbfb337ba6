"""The controller's side of worker processes; these are stood in for at Ray's handles."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError

from orchestrator.core import Event, WorkerExited
from orchestrator.shell import RunNames
from orchestrator.shell.capacity.workers import Workers
from tests.support.keeper_handles import Call


async def _false(_node: str) -> bool:
    return False


async def _nothing(_node: str, _worker: str) -> None:
    return None


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
        kill_on_node=_nothing,
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
