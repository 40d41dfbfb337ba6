"""When evidence is awaited, for how long, and where it ends; keepers are stood in for at Ray."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.core import RunStats
from orchestrator.core import actions as act
from orchestrator.core.log.incident import Incident
from orchestrator.shell.capacity import NodeView
from orchestrator.shell.evidence import NUM_KEPT, Evidence
from tests.support.histories import ATTEMPT, WORKERS, calm, group
from tests.support.keeper_handles import Call, ClusterTable, keepers_of, nodes_of
from ucp_core.storage import MemoryStore

WAIT_S_MAX = 60.0
ORDER = act.CollectEvidence(attempt=ATTEMPT, nodes=("n0",), is_awaited=True)


async def _nothing(*_: Any) -> None:
    return None


def _evidence(
    store: MemoryStore,
    take: Callable[..., Awaitable[Any]] = _nothing,
    keep: Callable[..., Awaitable[Any]] = _nothing,
) -> Evidence:
    """Return the evidence of a run with one node, whose keeper answers so."""
    nodes = nodes_of(ClusterTable(), lambda _: None)
    keeper = SimpleNamespace(take_evidence=Call(take), store_evidence=Call(keep))
    nodes.views["n0"] = NodeView("n0", ("", 0), keeper=keeper)
    world = (group("world", range(4), 9, waiting_s=2.0),)
    reports = {w: replace(calm(w, rank), groups=world) for rank, w in enumerate(WORKERS)}
    return Evidence(
        keepers=keepers_of(nodes, lambda _: None),
        reports=reports,
        store=store,
        path="run",
        num_incidents=0,
    )


def test_a_kill_in_a_hang_waits_for_the_evidence() -> None:
    """Once it is killed, nothing is left."""

    async def play() -> None:
        release, done = asyncio.Event(), asyncio.Event()

        async def take(attempt: int) -> None:
            assert attempt == ATTEMPT
            await release.wait()

        evidence = _evidence(MemoryStore(), take)
        evidence.collect(ORDER)
        evidence.then(WAIT_S_MAX, done.set)
        await asyncio.sleep(0)
        assert not done.is_set()
        release.set()
        await asyncio.wait_for(done.wait(), WAIT_S_MAX)

    asyncio.run(play())


def test_a_keeper_that_does_not_answer_delays_evidence_briefly() -> None:
    """Its node may be what failed."""

    async def play() -> None:
        done = asyncio.Event()

        async def take(_: int) -> None:
            await asyncio.Event().wait()

        evidence = _evidence(MemoryStore(), take)
        evidence.collect(ORDER)
        evidence.then(0.01, done.set)
        await asyncio.wait_for(done.wait(), WAIT_S_MAX)

    asyncio.run(play())


@pytest.mark.parametrize("is_awaited", [True, False])
def test_a_crash_is_not_held_up(is_awaited: bool) -> None:  # noqa: FBT001
    """A recovery takes 0.4 s in all."""

    async def play() -> None:
        async def take(_: int) -> None:
            await asyncio.Event().wait()

        evidence = _evidence(MemoryStore(), take)
        acted: list[str] = []
        evidence.then(WAIT_S_MAX, lambda: acted.append("before"))
        evidence.collect(act.CollectEvidence(attempt=ATTEMPT, nodes=("n0",), is_awaited=is_awaited))
        evidence.then(WAIT_S_MAX, lambda: acted.append("after"))
        assert acted == (["before"] if is_awaited else ["before", "after"])

    asyncio.run(play())


def test_reports_are_stored_and_old_evidence_is_dropped() -> None:
    """A run that fails once an hour for a month would keep gigabytes of rings."""
    store, folders = MemoryStore(), list[tuple[int, str]]()
    for number, name in ((1, "stacks/w0.txt"), (1, "rings/w0.ring"), (2, "rings/w0.ring")):
        store.write_atomic(f"run/incidents/{number:04d}/{name}", b"x", fsync=False)
    store.write_atomic("run/incidents/0001/incident.json", b"{}", fsync=False)

    async def keep(attempt: int, folder: str) -> None:
        folders.append((attempt, folder))

    async def play() -> None:
        evidence = _evidence(store, keep=keep)
        evidence.collect(ORDER)
        number = NUM_KEPT + 1
        old = [Incident(number=each, kind="growth") for each in range(1, number)]
        folder = f"incidents/{number:04d}"
        new = Incident(number=number, kind="hang", attempt=ATTEMPT, folder=folder)
        evidence.follow(RunStats(incidents=[*old, new]))
        await evidence.close()

    asyncio.run(play())

    assert folders == [(ATTEMPT, "incidents/0021")]
    reports = json.loads(store.read("run/incidents/0021/reports.json"))
    assert [row["worker"] for row in reports["workers"]] == list(WORKERS)
    # By each of two thousand ranks, the world's ranks would be four million numbers.
    assert reports["groups"] == {"world": [0, 1, 2, 3]}
    assert "ranks" not in reports["workers"][0]["groups"][0]
    assert store.list("run/incidents/0001") == ("incident.json",)
    assert store.list("run/incidents/0002") == ("rings",)
