"""Inject faults, for the demo, the chaos tests and the benchmarks.

Only for simulated nodes on this machine, because processes get signals by pid.
"""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from orchestrator.driver.launch import Launched
from orchestrator.errors import CapacityError

#: Period of checks of a condition.
LOOK_S = 0.05
#: A dead controller is restarted within this time, even with little processor time.
ANSWER_S_MAX = 60.0


def member(status: dict[str, Any], rank: int) -> dict[str, Any]:
    """Return the worker of ``rank`` in ``status``."""
    found = [worker for worker in status["workers"] if worker["rank"] == rank]
    if not found:
        raise CapacityError(f"rank {rank} is not in the run now", rank=rank)
    return dict(found[0])


def signal_rank(run: Launched, rank: int, number: signal.Signals) -> dict[str, Any]:
    """Send ``number`` to the process of ``rank``; return its worker."""
    victim = _await_member(run, rank)
    run.note_fault(number.name, victim["worker"])
    os.kill(victim["pid"], number)
    return victim


def kill_node_of(run: Launched, rank: int) -> str:
    """Kill the simulated node of ``rank`` with its raylet; return the node's id."""
    assert run.cluster is not None, "only simulated nodes can be killed"
    node = str(_await_member(run, rank)["node"])
    run.note_fault("node_kill", node)
    run.cluster.kill_node(node)
    return node


def _await_member(run: Launched, rank: int) -> dict[str, Any]:
    """Return the worker of ``rank``, once the run has one.

    The run may still be recovering from an earlier fault, because it reports steps a second late.
    """
    status = wait_for(
        run,
        lambda s: any(worker["rank"] == rank for worker in s["workers"]),
        timeout_s=ANSWER_S_MAX,
    )
    if status is None:
        raise CapacityError(f"the run ended before anything happened to rank {rank}", rank=rank)
    return member(status, rank)


def wait_for(
    run: Launched,
    condition: Callable[[dict[str, Any]], bool],
    *,
    timeout_s: float,
    on_status: Callable[[dict[str, Any] | None], None] = lambda _: None,
) -> dict[str, Any] | None:
    """Return the first status for which ``condition`` holds; None if the run ended first.

    Raises ``CapacityError`` after ``timeout_s``.
    """
    deadline_s = time.monotonic() + timeout_s
    status: dict[str, Any] | None = None
    while time.monotonic() < deadline_s:
        if run.summary() is not None:
            return None
        status = run.status()
        on_status(status)
        if status is not None and condition(status):
            return status
        time.sleep(LOOK_S)
    raise CapacityError(f"the run did not reach that state within {timeout_s:.0f} s: {status}")
