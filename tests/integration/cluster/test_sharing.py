"""Two runs on one real cluster: the urgent one gets its workers, and gives them back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from orchestrator.driver import replay_run
from orchestrator.driver.faults import wait_for
from orchestrator.driver.launch import Launched
from orchestrator.run_directory import read_run
from tests.support.history import read_history

pytestmark = [pytest.mark.ray, pytest.mark.chaos, pytest.mark.timeout(900)]

SEEN_S_MAX = 240.0


def _has(num_workers: int, above: int) -> Callable[[dict[str, Any]], bool]:
    """Return whether a run trains on so many, and has come further than a step."""
    return lambda status: (
        status["phase"] == "running"
        and len(status["workers"]) == num_workers
        and status["step"] > above
    )


def _await(run: Launched, num_workers: int, *, above: int) -> dict[str, Any]:
    status = wait_for(run, _has(num_workers, above), timeout_s=SEEN_S_MAX)
    assert status is not None, "the run is over"
    return status


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

    assert shared["shared"] == {"limit": 2, "runs": [urgent.names.run_id]}
    assert regained["shared"] is None
    record = read_run(patient.config.run.directory)
    kinds = [incident.kind for incident in record.incidents]
    assert kinds[0] == "share"
    assert set(kinds) == {"share", "growth", "stop"}, kinds
    assert [incident.lost_steps for incident in record.incidents] == [0] * len(kinds)
    history = read_history(patient.config.run.directory)
    history.check_exactly_once(patient.config, record.summary["steps"])
    assert replay_run(patient.config.run.directory)["same_decisions"]
