"""The costs of a run's capacity without requests, and its release."""

import asyncio
import contextlib
from collections.abc import Callable
from contextvars import Context
from typing import Any

import pytest

from orchestrator.config import Alternative
from orchestrator.core import events as ev
from orchestrator.shell import RunNames
from orchestrator.shell.capacity import reservations as module
from orchestrator.shell.capacity.reservations import Capacity
from orchestrator.shell.inbox import Inbox


class _Loop(asyncio.SelectorEventLoop):
    """Counts what it is asked to wake for."""

    num_timers = 0

    def call_at(  # type: ignore[override]  # its callbacks have as many types as arguments
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        self.num_timers += 1
        return super().call_at(when, callback, *args, context=context)


def test_nothing_wakes_while_all_reservations_are_placed() -> None:
    """A run nearly always has all its reservations: to look for them then is work for nothing."""

    async def idle() -> None:
        capacity = Capacity(
            Inbox(at_s=lambda: 0.0, post=lambda _: None),
            names=RunNames("r"),
            alternatives=[Alternative(resources={"CPU": 1.0})],
        )
        polling = asyncio.create_task(capacity.poll_forever())
        for _ in range(10):
            await asyncio.sleep(0)
        polling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await polling

    loop = _Loop()
    try:
        loop.run_until_complete(idle())
    finally:
        loop.close()

    assert loop.num_timers == 0


def test_reservations_are_given_back_while_ray_does_not_place_them_those_that_wait_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Resources that Ray has put aside for a placement would be lost."""
    names = RunNames("r")
    done, waits = ("CREATED", "FINISHED"), ("PENDING", "NO_RESOURCES")
    moments = [
        {1: done, 2: ("PENDING", "QUEUED"), 3: waits},
        {1: done, 2: ("PENDING", "QUEUED"), 3: waits},
        {2: ("PREPARED", "QUEUED")},
        {2: done},
    ]
    looks: list[int] = []
    removed: list[tuple[int, str]] = []

    def table() -> dict[str, Any]:
        looks.append(len(looks))
        return {
            str(reservation): {
                "name": names.reservation(reservation),
                "state": state,
                "stats": {"scheduling_state": scheduling},
            }
            for reservation, (state, scheduling) in moments[looks[-1]].items()
        }

    monkeypatch.setattr(module, "placement_group_table", table)
    monkeypatch.setattr(module, "get_placement_group", lambda name: name)
    monkeypatch.setattr(
        module, "remove_placement_group", lambda name: removed.append((looks[-1], name))
    )
    given = Capacity(
        Inbox(at_s=lambda: 0.0, post=lambda _: None),
        names=names,
        alternatives=[Alternative(resources={"CPU": 1.0})],
    )

    asyncio.run(given.release_all())

    assert removed == [
        (1, names.reservation(3)),
        (1, names.reservation(1)),
        (3, names.reservation(2)),
    ]


def test_a_reservation_given_back_as_it_is_placed_is_not_granted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both are seen to in one turn of the loop: the controller ended, and was begun again."""
    names = RunNames("r")
    placed = {
        "name": names.reservation(1),
        "state": "CREATED",
        "stats": {"scheduling_state": "FINISHED"},
        "bundles_to_node_id": {0: "a"},
    }
    granted: list[ev.Event] = []
    capacity = Capacity(
        Inbox(at_s=lambda: 0.0, post=granted.append),
        names=names,
        alternatives=[Alternative(resources={"CPU": 1.0})],
    )

    async def play() -> None:
        loop = asyncio.get_running_loop()
        releases: list[asyncio.Task[None]] = []

        async def in_a_turn(_: object, do: Callable[..., Any], *arguments: Any) -> Any:
            if do == capacity._rows and not releases:
                # In the next turn, in which the answer is looked at, but before that.
                loop.call_soon(lambda: releases.append(loop.create_task(capacity.release(1))))
            await asyncio.sleep(0)
            return do(*arguments)

        monkeypatch.setattr(module, "in_thread", in_a_turn)
        await capacity.request(1, ())
        polling = asyncio.create_task(capacity.poll_forever())
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(capacity._grants) == len(releases) == 1
        await asyncio.gather(*capacity._grants.values(), *releases)
        polling.cancel()

    monkeypatch.setattr(module, "placement_group", lambda *_, **__: "group")
    monkeypatch.setattr(module, "placement_group_table", lambda: {"1": placed})
    monkeypatch.setattr(module, "get_placement_group", lambda name: name)
    monkeypatch.setattr(module, "remove_placement_group", lambda _: None)

    asyncio.run(play())

    assert granted == []


#: More than enough for a request to be made again, if there were room for it.
LOOKS = 50


def test_what_ray_has_room_for_and_does_not_place_is_requested_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After the clock of its head was set back, Ray would try it when the clock has caught up."""
    names = RunNames("r")
    made: list[str] = []
    removed: list[str] = []
    room = {"avoided": {"CPU": 1.0}, "full": {"CPU": 0.5}}
    granted: list[ev.Event] = []

    def make(*_: object, name: str, **__: object) -> str:
        made.append(name)
        return name

    looks = 0

    def table() -> dict[str, Any]:
        nonlocal looks
        looks += 1
        # Only the second request, which comes once there is room, is tried.
        state = ("CREATED", "FINISHED") if len(made) > 1 else ("PENDING", "NO_RESOURCES")
        row = {"name": names.reservation(1), "bundles_to_node_id": {0: "free"}}
        return {"1": {**row, "state": state[0], "stats": {"scheduling_state": state[1]}}}

    capacity = Capacity(
        Inbox(at_s=lambda: 0.0, post=granted.append),
        names=names,
        alternatives=[Alternative(resources={"CPU": 1.0})],
    )

    async def play() -> tuple[list[str], int]:
        await capacity.request(1, ("avoided",))
        polling = asyncio.create_task(capacity.poll_forever())
        while looks < LOOKS:  # noqa: ASYNC110  the fake of Ray does not notify
            await asyncio.sleep(0)
        without_room = list(made)
        room["free"] = {"CPU": 1.0}
        while not granted:  # noqa: ASYNC110  the fake of Ray does not notify
            await asyncio.sleep(0.01)
        polling.cancel()
        return without_room, len(made)

    monkeypatch.setattr(module, "POLL_S", 0.001)
    monkeypatch.setattr(module, "ROOM_LOOK_S", 0.0)
    monkeypatch.setattr(module, "available_resources_per_node", lambda: room)
    monkeypatch.setattr(module, "placement_group", make)
    monkeypatch.setattr(module, "placement_group_table", table)
    monkeypatch.setattr(module, "get_placement_group", lambda name: name)
    monkeypatch.setattr(module, "remove_placement_group", removed.append)

    without_room, num_made = asyncio.run(asyncio.wait_for(play(), 10.0))

    assert without_room == [names.reservation(1)]
    assert (num_made, removed) == (2, [names.reservation(1)])
    assert capacity.granted() == [(1, "free")]


def test_a_request_made_again_costs_no_group_that_ray_places_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A new request makes Ray try the others, too; what it sets aside for them would be lost."""
    names = RunNames("r")
    made: list[str] = []
    removed: list[str] = []
    granted: list[ev.Event] = []
    both_granted = asyncio.Event()

    def grant(event: ev.Event) -> None:
        granted.append(event)
        if len(granted) == len((1, 2)):
            both_granted.set()

    def make(*_: object, name: str, **__: object) -> str:
        made.append(name)
        return name

    def table() -> dict[str, Any]:
        is_tried = len(made) > len((1, 2))
        state = ("CREATED", "FINISHED") if is_tried else ("PENDING", "NO_RESOURCES")
        return {
            str(number): {
                "name": names.reservation(number),
                "bundles_to_node_id": {0: "free"},
                "state": state[0],
                "stats": {"scheduling_state": state[1]},
            }
            for number in (1, 2)
        }

    capacity = Capacity(
        Inbox(at_s=lambda: 0.0, post=grant),
        names=names,
        alternatives=[Alternative(resources={"CPU": 1.0})],
    )

    async def play() -> None:
        await capacity.request(1, ())
        await capacity.request(2, ())
        polling = asyncio.create_task(capacity.poll_forever())
        await both_granted.wait()
        polling.cancel()

    monkeypatch.setattr(module, "POLL_S", 0.001)
    monkeypatch.setattr(module, "ROOM_LOOK_S", 0.0)
    monkeypatch.setattr(module, "available_resources_per_node", lambda: {"free": {"CPU": 2.0}})
    monkeypatch.setattr(module, "placement_group", make)
    monkeypatch.setattr(module, "placement_group_table", table)
    monkeypatch.setattr(module, "get_placement_group", lambda name: name)
    monkeypatch.setattr(module, "remove_placement_group", removed.append)

    asyncio.run(asyncio.wait_for(play(), 10.0))

    assert removed == [names.reservation(1)]
