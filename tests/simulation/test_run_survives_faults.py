import json
import subprocess
import sys

import pytest

from orchestrator.simulation import run_campaign
from orchestrator.simulation.__main__ import main
from orchestrator.simulation.history import History, run_history

NUM_HISTORIES = 2000
CHUNK = 250


@pytest.mark.parametrize("first", range(0, NUM_HISTORIES, CHUNK))
def test_every_promise_holds_in_every_history(first: int) -> None:
    """Faults meet each other in orders that nobody thinks of; S1 to S3, S5, S6, L1 and L2 hold."""
    campaign = run_campaign(range(first, first + CHUNK))

    assert not campaign.failures, "\n".join(
        f"{failure.violation}: {failure.command}" for failure in campaign.failures
    )
    assert campaign.num_faults > 3 * CHUNK
    assert campaign.num_attempts > 1.5 * CHUNK
    assert campaign.num_events > 40 * CHUNK


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(87763, id="a keeper is away when newcomers load"),
        pytest.param(232651, id="a copy comes after keepers were asked"),
    ],
)
def test_a_history_that_failed_once_holds(seed: int) -> None:
    """They are too rare to be among those above."""
    run_history(seed)


def test_a_seed_is_one_history_in_every_process() -> None:
    """Sets of strings iterate by PYTHONHASHSEED; no order may be taken from one."""
    command = [sys.executable, "-m", "orchestrator.simulation", "--seed", "24", "--show"]
    outputs = [
        subprocess.run(
            command, env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=False
        ).stdout
        for seed in ("1", "2")
    ]

    assert outputs[0] == outputs[1]
    assert "every promise held" in outputs[0]


def test_a_seed_is_one_history() -> None:
    """A failure is worth nothing if it does not come back."""
    assert run_history(7) == run_history(7)


def test_histories_without_faults_lose_nothing() -> None:
    """What the checkers count must come from the faults, not from the virtual cluster."""
    for seed in range(40):
        history = History(seed, fault_limit=0)
        history.cluster.start_failure = 0.0
        if history.expected != "completed" or history.cluster.delay_s > 0.01:
            continue
        history.cluster.loss = history.cluster.doubling = 0.0
        result = history.run()
        assert result.num_lost_steps == 0


def test_the_command_reports_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Machines read it; the exit code alone says whether a promise was broken."""
    assert main(["--histories", "5", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)

    assert report["histories"] == 5
    assert report["violations"] == 0
    assert report["failures"] == []
