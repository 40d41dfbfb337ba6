"""Injected faults, for the demo, the chaos tests and the benchmarks.

Only for simulated nodes on this machine, because processes are signalled by pid.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from orchestrator.driver.launch import Launched
from orchestrator.errors import CapacityError

#: How often a condition is checked.
LOOK_S = 0.05
#: A dead controller is restarted within this; one that gets little processor time answers sooner.
ANSWER_S_MAX = 60.0


def member(status: dict[str, Any], rank: int) -> dict[str, Any]:
    """Return the worker with ``rank`` in ``status``."""
    found = [worker for worker in status["workers"] if worker["rank"] == rank]
    if not found:
        raise CapacityError(f"rank {rank} is not in the run now", rank=rank)
    return dict(found[0])


def signal_rank(run: Launched, rank: int, number: signal.Signals) -> dict[str, Any]:
    """Send ``number`` to the process of ``rank``; return its worker."""
    victim = member(_status_with(run, rank), rank)
    run.note_fault(number.name, victim["worker"])
    os.kill(victim["pid"], number)
    return victim


def kill_node_of(run: Launched, rank: int) -> str:
    """Kill the simulated node of ``rank`` with its raylet; return the node's id."""
    assert run.cluster is not None, "only simulated nodes can be killed"
    node = str(member(_status_with(run, rank), rank)["node"])
    run.note_fault("node_kill", node)
    run.cluster.kill_node(node)
    return node


def kill_keeper_of(run: Launched, rank: int) -> str:
    """Kill the keeper on the node of ``rank``; return the node's id."""
    status = _status_with(run, rank, lambda s: _keeper_of(s, rank)[1] is not None)
    node, pid = _keeper_of(status, rank)
    assert pid is not None, "the condition waits for it"
    run.note_fault("keeper_kill", node)
    os.kill(pid, signal.SIGKILL)
    return node


def _keeper_of(status: dict[str, Any], rank: int) -> tuple[str, int | None]:
    """Return the node of ``rank`` and its keeper's pid, None while the keeper is starting."""
    node = str(member(status, rank)["node"])
    pids = (view["keeper_pid"] for view in status["nodes"] if view["node"] == node)
    return node, next(pids, None)


def _status_with(
    run: Launched, rank: int, condition: Callable[[dict[str, Any]], bool] = lambda _: True
) -> dict[str, Any]:
    """Return a status that has ``rank`` and meets ``condition``.

    An earlier fault may still be under repair, because steps are reported a second late.
    """
    status = wait_for(
        run,
        lambda s: any(worker["rank"] == rank for worker in s["workers"]) and condition(s),
        timeout_s=ANSWER_S_MAX,
    )
    if status is None:
        raise CapacityError(f"the run ended before anything happened to rank {rank}", rank=rank)
    return status


def wait_for(
    run: Launched,
    condition: Callable[[dict[str, Any]], bool],
    *,
    timeout_s: float,
    on_status: Callable[[dict[str, Any] | None], None] = lambda _: None,
) -> dict[str, Any] | None:
    """Return the first status that meets ``condition``; None if the run ended first.

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
    raise CapacityError(f"the run did not get there within {timeout_s:.0f} s: {status}")
