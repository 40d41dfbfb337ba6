"""Two runs on one real cluster: the urgent one gets its workers, and gives them back."""

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import ray

from orchestrator.core import events as ev
from orchestrator.driver import replay_run
from orchestrator.driver.faults import wait_for
from orchestrator.driver.launch import Launched
from orchestrator.policies import Share
from orchestrator.report import read_run
from orchestrator.shell import CONTROLLER, RunNames, others
from orchestrator.shell.inbox import Inbox
from tests.support.history import read_history
from tests.support.snapshots import eventually

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

SEEN_S_MAX = 240.0


def _has(num_workers: int, above: int) -> Callable[[dict[str, Any]], bool]:
    """Return whether a run trains on so many, and has come further than a step."""
    return lambda status: (
        status["phase"] == "training"
        and len(status["workers"]) == num_workers
        and status["step"] > above
    )


def _await(run: Launched, num_workers: int, *, above: int) -> dict[str, Any]:
    status = wait_for(run, _has(num_workers, above), timeout_s=SEEN_S_MAX)
    assert status is not None, "the run is over"
    return status


class OtherController:
    """A controller's announcements, without a run."""

    def __init__(self, said: dict[str, Any]) -> None:
        self._said = said

    def share(self) -> dict[str, Any]:
        return self._said


def _begin_other(run: str, said: dict[str, Any]) -> Any:
    names = RunNames(run)
    options = {"name": CONTROLLER, "namespace": names.namespace, "num_cpus": 0}
    return ray.remote(OtherController).options(**options).remote(said)


def test_other_runs_are_asked_as_long_as_they_are_there(
    nodes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of another version must not keep the others from being heard."""
    assert nodes.nodes()
    monkeypatch.setattr(others, "POLL_S", 0.05)
    share = Share(run="urgent", priority=1, num_held=1, num_lacking=2, needs=(("CPU", 1.0),))
    seen: list[Any] = []
    poller = others.Others(Inbox(lambda: 0.0, seen.append), names=RunNames("own"))

    async def play() -> None:
        polling = asyncio.create_task(poller.poll_forever())
        urgent = _begin_other("urgent", asdict(share))
        strange = _begin_other("strange", {"words": 3})
        assert await asyncio.to_thread(eventually, lambda: has_seen(share))
        ray.kill(urgent)
        assert await asyncio.to_thread(eventually, has_seen)
        ray.kill(strange)
        polling.cancel()

    def has_seen(*shares: Share) -> bool:
        return seen[-1:] == [ev.OthersSeen(at_s=0.0, run="own", others=shares)]

    asyncio.run(play())


@pytest.mark.chaos
def test_an_urgent_run_takes_two_of_four_workers_and_gives_them_back(
    begin_endless: Callable[..., Launched],
) -> None:
    """Each controller decides alone; members leave at a step boundary, so nothing is lost."""
    patient = begin_endless(name="patient")
    _await(patient, 4, above=5)
    urgent = begin_endless(name="urgent", run__priority=1, workers__max=2)
    _await(urgent, 2, above=5)
    shared = _await(patient, 2, above=5)
    again = _await(patient, 2, above=shared["step"] + 5)
    assert _await(urgent, 2, above=10)["shared"] is None

    urgent.stop("the test has seen it")
    regained = _await(patient, 4, above=again["step"])
    patient.stop("the test has seen it")
    for run in (urgent, patient):
        assert wait_for(run, lambda _: False, timeout_s=SEEN_S_MAX) is None

    assert regained["shared"] is None
    record = read_run(patient.config.run.directory)
    kinds = [incident.kind for incident in record.incidents]
    assert kinds[0] == "share"
    assert record.incidents[0].evidence == f"giving 2 of its workers to {urgent.names.run_id}"
    assert set(kinds) == {"share", "growth", "stop"}, kinds
    assert [incident.lost_steps for incident in record.incidents] == [0] * len(kinds)
    history = read_history(patient.config.run.directory)
    history.check_exactly_once(patient.config, record.summary["steps"])
    assert replay_run(patient.config.run.directory)["same_decisions"]
