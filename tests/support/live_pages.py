"""The live page of a run that no Ray runs: its parts, made by hand."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from orchestrator.config import load
from orchestrator.core import RunState, RunStats, describe
from orchestrator.errors import TokenError
from orchestrator.shell.capacity import NodeView
from orchestrator.shell.serve import Live, RunCollector, Sources
from ucp_core.storage import LocalStore
from workers.protocol import StepCost, WorkerReport

TOKEN = "a run's token"  # noqa: S105  of a test


def live_page(
    directory: Path,
    *,
    stats: RunStats | None = None,
    reports: Mapping[str, WorkerReport] | None = None,
    nodes: int = 0,
    described: Mapping[str, Any] | None = None,
) -> Live:
    """Return the page of a run in ``directory``."""
    text = f"run: {{directory: {directory}, name: shown}}\nworkers: {{max: 4}}\n"
    state = {**describe(RunState()), **(described or {})}
    views = {
        name: NodeView(node=name, raylet_address=("127.0.0.1", 1))
        for name in (f"{number:02d}" * 28 for number in range(nodes))
    }
    redundancy = {
        "step": 0,
        "stored_step": 0,
        "node_losses_survived": 0,
        "mechanism": "",
        "problems": [],
        "keepers": [],
    }
    return Live(
        config=load(f"{text}train: {{steps: 60}}\n"),
        store=LocalStore(),
        path=str(directory),
        sources=Sources(
            stats=stats or RunStats(),
            reports=reports or {},
            costs={worker: StepCost(7, 0.3, 0.0) for worker in reports or {}},
            views=views,
            at_s=lambda: 100.0,
            described=lambda: state,
            redundancy=lambda: redundancy,
        ),
    )


async def require(_name: str, token: str, _what: Mapping[str, Any]) -> str:
    """Do nothing, for who has the token."""
    refuse_others(token)
    return "done"


def refuse_others(token: str) -> None:
    """Raise without the token."""
    if token != TOKEN:
        raise TokenError("that is not the token of the run")


def collector(status: Callable[[], dict[str, Any]] = dict) -> RunCollector:
    """Return the metrics of a run with that status."""
    return RunCollector(
        run="shown",
        run_id="shown-1",
        status=status,
        stats=RunStats(),
        samples_per_step=1,
        tokens_per_step=0,
    )


def outside_address() -> str:
    """Return an address of this machine that others may reach."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
