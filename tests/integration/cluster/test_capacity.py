"""Placement groups of a run on a real cluster."""

import asyncio
from typing import Any

import pytest

from orchestrator.config import Alternative
from orchestrator.shell import RunNames
from orchestrator.shell.capacity.reservations import Capacity
from orchestrator.shell.inbox import Inbox
from tests.support.snapshots import eventually

pytestmark = pytest.mark.ray

NAMES = RunNames("run-capacity")


def _capacity(group: int = 1) -> Capacity:
    return Capacity(
        Inbox(at_s=lambda: 0.0, post=lambda _: None),
        names=NAMES,
        alternatives=[Alternative(resources={"CPU": 1.0})],
        group=group,
    )


def _left() -> list[str]:
    from ray.util import placement_group_table

    rows = placement_group_table().values()
    return [
        row["name"]
        for row in rows
        if row["name"].startswith(NAMES.reservation_prefix) and row["state"] != "REMOVED"
    ]


@pytest.mark.chaos
def test_a_run_that_is_over_leaves_nothing_that_any_of_its_controllers_asked_for(
    nodes: Any,
) -> None:
    """A group that comes after the next controller has looked is in no controller's books."""
    assert nodes.nodes()

    async def play() -> list[str]:
        dead, living = _capacity(), _capacity()
        await living.adopt({})
        await dead.request(1, ())
        await living.request(2, ())
        asked_for = _left()
        await living.release_all()
        return asked_for

    assert sorted(asyncio.run(play())) == [NAMES.reservation(1), NAMES.reservation(2)]
    assert _left() == []


def test_what_a_dead_controller_asked_for_late_is_given_back_while_the_run_goes_on(
    nodes: Any,
) -> None:
    """Else it holds a processor, or has the autoscaler buy a machine, for nothing."""
    assert nodes.nodes()

    async def play() -> tuple[list[str], list[tuple[int, str]]]:
        dead, living = _capacity(), _capacity()
        await living.adopt({})
        polling = asyncio.create_task(living.poll_forever())
        await dead.request(1, ())
        await living.request(2, ())
        assert await asyncio.to_thread(
            eventually, lambda: _left() == [NAMES.reservation(2)] and not living.pending()
        )
        polling.cancel()
        left = _left(), living.granted()
        await living.release_all()
        return left

    left, granted = asyncio.run(play())
    assert left == [NAMES.reservation(2)]
    assert [reservation for reservation, _ in granted] == [2]


def test_reservations_that_are_given_back_while_they_are_placed_leave_their_processors_to_others(
    nodes: Any,
) -> None:
    """Ray can forget what a node has put aside for them: no run ever gets it then."""
    assert nodes.nodes()
    import ray

    num_free = ray.cluster_resources()["CPU"]

    async def play() -> None:
        capacity = _capacity()
        for reservation in range(100):
            await asyncio.gather(capacity.request(reservation, ()), capacity.release(reservation))

    asyncio.run(play())
    assert _left() == []
    assert eventually(lambda: ray.available_resources().get("CPU") == num_free, within_s=20.0)


def test_workers_that_belong_together_get_one_node(nodes: Any) -> None:
    """Ray by itself would take one from each of the two."""
    assert len(nodes.nodes()) == 2

    async def play() -> list[tuple[int, str]]:
        capacity = _capacity(group=2)
        polling = asyncio.create_task(capacity.poll_forever())
        await asyncio.gather(capacity.request(1, ()), capacity.request(2, ()))
        assert await asyncio.to_thread(eventually, lambda: not capacity.pending())
        polling.cancel()
        granted = capacity.granted()
        await capacity.release_all()
        return granted

    granted = asyncio.run(play())
    assert [number for number, _ in granted] == [1, 2]
    assert len({node for _, node in granted}) == 1
