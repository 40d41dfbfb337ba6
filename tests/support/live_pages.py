"""The live page of a run that no Ray runs: its parts, made by hand."""

import socket
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from orchestrator.config import load
from orchestrator.core import RunState, RunStats, describe
from orchestrator.errors import TokenError
from orchestrator.report import RunDocument, Scale, Seen, tell
from orchestrator.shell.capacity import NodeView, told_nodes
from orchestrator.shell.serve import NUM_NODES, Live, RunCollector
from ucp_core.storage import LocalStore, Store
from workers.protocol import StepCost, WorkerReport

TOKEN = "a run's token"  # noqa: S105  of a test


def live_page(
    directory: Path,
    *,
    stats: RunStats | None = None,
    reports: Mapping[str, WorkerReport] | None = None,
    nodes: int = 0,
    described: Mapping[str, Any] | None = None,
    store: Store | None = None,
) -> Live:
    """Return the page of a run in ``directory``."""
    text = f"run: {{directory: {directory}, name: shown}}\nworkers: {{max: 4}}\n"
    state = {**describe(RunState()), **(described or {})}
    names = [f"{number:02d}" * 28 for number in range(nodes)]
    views = {name: NodeView(node=name, raylet_address=("127.0.0.1", 1)) for name in names}
    config, told = load(f"{text}train: {{steps: 60}}\n"), reports or {}
    seen = Seen(
        at_s=100.0,
        reports=told,
        seen_at_s=dict.fromkeys(told, 100.0),
        costs={worker: StepCost(7, 0.3, 0.0) for worker in told},
        nodes=told_nodes(views, state, 100.0, NUM_NODES),
        node_states=Counter(view.state for view in views.values()),
    )
    redundancy = {
        "step": 0,
        "stored_step": 0,
        "node_losses_survived": 0,
        "mechanism": "",
        "problems": [],
        "keepers": [],
    }
    return Live(
        config=config,
        store=store or LocalStore(),
        path=str(directory),
        told=lambda: tell(state, stats or RunStats(), config, seen=seen, redundancy=redundancy),
        reports=told,
        at_s=lambda: 100.0,
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
    return RunCollector(run="shown", run_id="shown-1", told=lambda: told_of(status(), RunStats()))


def told_of(status: dict[str, Any], stats: RunStats, samples: int = 1) -> RunDocument:
    """Return the document of a run with that status and those numbers."""
    return RunDocument(
        stats=stats, scale=Scale(0, samples, 0), cost=status.get("cost", {}), status=status
    )


def outside_address() -> str:
    """Return an address of this machine that others may reach."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
