"""Waits of tests until a run trains, or has a keeper to kill."""

import os
import signal
from typing import Any

from orchestrator.driver.faults import wait_for
from orchestrator.driver.launch import Launched
from tests.support import train_paced, train_slowly

#: Generous: the machine of a test run is shared. Tight bounds are the benchmark's business.
ACT_S_MAX = 240.0
#: Settings of a run whose steps take time and hardly any processor: what is started beside it, and
#: what the test asks, has that.
PACED = {"run__script": train_paced.__file__, "run__arguments": "['0.2']"}
#: The same of the built-in training.
SLOW = {"run__script": train_slowly.__file__, "run__arguments": "['0.1']"}


def num_training(status: dict[str, Any]) -> int:
    """Return how many workers have a rank."""
    return sum(worker["rank"] >= 0 for worker in status["workers"])


def reach(
    run: Launched, step: int, *, workers: int | None = None, attempt: int = 0
) -> dict[str, Any]:
    """Return the status once the run trains at ``step`` or behind it."""
    status = wait_for(
        run,
        lambda s: (
            s["phase"] == "training"
            and s["step"] >= step
            and s["attempt"] >= attempt
            and (workers is None or num_training(s) == workers)
        ),
        timeout_s=ACT_S_MAX,
    )
    assert status is not None, f"the run ended before step {step}: {run.summary()}"
    return status


def kill_keeper_of(run: Launched, rank: int, number: signal.Signals = signal.SIGKILL) -> int:
    """Kill the keeper on the node of ``rank``, once it has one, or stop it; return its number."""

    def keepers(status: dict[str, Any]) -> list[tuple[str, int]]:
        nodes = {worker["node"] for worker in status["workers"] if worker["rank"] == rank}
        there = [view for view in status["nodes"] if view["node"] in nodes and view["keeper_pid"]]
        return [(view["node"], view["keeper_pid"]) for view in there]

    status = wait_for(run, lambda s: bool(keepers(s)), timeout_s=ACT_S_MAX)
    assert status is not None, f"the run ended before rank {rank} had a keeper"
    node, pid = keepers(status)[0]
    run.note_fault("keeper_kill", node)
    os.kill(pid, number)
    return pid
