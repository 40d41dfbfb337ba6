"""The live page's data: the run so far, its nodes and workers, its safe steps."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from orchestrator.config import RunConfig
from orchestrator.core import RunStats, suspects_shown
from orchestrator.report import Scale, report_of, run_document, what_it_does, what_survives
from orchestrator.run_directory import log_tail
from orchestrator.shell.capacity import NodeView
from orchestrator.shell.clock import monotonic_s
from orchestrator.shell.serve.curves import Curves
from orchestrator.shell.serve.status import cost_document
from orchestrator.shell.threads import STORAGE, in_thread
from ucp_core.storage import Store, join
from workers.protocol import StepCost, WorkerPhase, WorkerReport

#: A document serves all who ask within this.
_FRESH_S = 0.9
#: The phases of each worker in the last seconds.
_SECONDS_KEPT = 60
_LETTERS = {
    WorkerPhase.IDLE: "i",
    WorkerPhase.FORMING: "m",
    WorkerPhase.LOADING: "l",
    WorkerPhase.FORWARD: "f",
    WorkerPhase.BACKWARD: "b",
    WorkerPhase.REDUCING: "r",
    WorkerPhase.UPDATING: "u",
    WorkerPhase.SAVING: "s",
    WorkerPhase.SCRIPT: "c",
    WorkerPhase.LEAVING: "x",
}


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the content of the page comes from."""

    stats: RunStats  #: The folded journal.
    reports: Mapping[str, WorkerReport]  #: Last report of every worker.
    costs: Mapping[str, StepCost]  #: The last that a worker told of its own work.
    views: Mapping[str, NodeView]  #: The nodes.
    at_s: Callable[[], float]  #: Returns the present on the run's clock.
    described: Callable[[], dict[str, Any]]  #: Returns ``core.describe``.
    redundancy: Callable[[], dict[str, Any]]  #: Returns that key of the status document.


class Live:
    """Makes the document of the page, at most once a second."""

    def __init__(self, *, config: RunConfig, store: Store, path: str, sources: Sources) -> None:
        self._config = config
        self._store = store
        self._path = path
        self._sources = sources
        self._curves = Curves(store, path)
        self._seconds: dict[str, str] = {}
        self._made_s = -math.inf
        self._document = b""
        self._reporting = asyncio.Lock()
        self.tag = ""

    @property
    def at_s(self) -> float:
        """Return the present on the run's clock."""
        return self._sources.at_s()

    async def watch_forever(self) -> None:
        """Note each second what each worker does, until cancelled."""
        while True:
            self.note()
            await asyncio.sleep(1.0)

    def note(self) -> None:
        """Note what each worker does now."""
        before, rows = self._seconds, self._sources.reports
        self._seconds = {
            worker: (before.get(worker, "") + _LETTERS[row.phase])[-_SECONDS_KEPT:]
            for worker, row in rows.items()
        }

    async def document(self) -> bytes:
        """Return the document as JSON; ``tag`` names its content."""
        if monotonic_s() - self._made_s >= _FRESH_S:
            await self._curves.look()
            self._document = self.made()
            self.tag = f'"{blake2b(self._document, digest_size=12).hexdigest()}"'
            self._made_s = monotonic_s()
        return self._document

    async def log(self, attempt: int, rank: int) -> str:
        """Return the last lines of a rank; attempt 0 is the newest in which it printed."""
        return await in_thread(
            STORAGE, log_tail, self._store, self._path, attempt=attempt, rank=rank
        )

    async def report(self) -> str:
        """Return the report of the run so far; one at a time, for it reads the whole journal."""
        async with self._reporting:
            return await in_thread(STORAGE, report_of, self._config.run.directory)

    def made(self) -> bytes:
        """Return the document as it is now."""
        return json.dumps(self._content(), separators=(",", ":")).encode()

    def _content(self) -> dict[str, Any]:
        config, sources = self._config, self._sources
        stats, described = sources.stats, sources.described()
        redundancy = sources.redundancy()
        keepers = {row["node"]: row for row in redundancy["keepers"]}
        return run_document(
            stats=stats,
            incidents=stats.incidents,
            scale=Scale(
                goal=config.train.steps,
                samples=config.train.global_batch,
                tokens=config.tokens_per_step or self._curves.tokens_per_step,
            ),
            cost=cost_document(stats, config),
            loss=self._curves.loss,
            validation=self._curves.validation,
            curves=self._curves.further,
            tensorboard=_tensorboard(config),
            why_refused=next((row["why"] for row in described["capacity"] if row["why"]), ""),
            name=config.run.name,
            url=config.run.directory,
            sentence=what_it_does(described),
            since_s=round(stats.phase_since_s, 3),
            safe=_safe(redundancy),
            live={
                "workers": [self._worker(row) for row in described["members"]],
                "standbys": [self._worker(row) for row in described["standbys"]],
                "nodes": [_node(each, keepers) for each in sources.views.values()],
                "suspects": [
                    {name: one[name] for name in ("kind", "worker", "evidence")}
                    for one in suspects_shown(described["suspects"], stats.busy(sources.at_s()))
                ],
                "min_workers": config.workers.min,
                "max_workers": config.workers.max,
            },
        )

    def _worker(self, row: dict[str, Any]) -> dict[str, Any]:
        name = row["worker"]
        cost = self._sources.costs.get(name)
        compute_s = None if cost is None else round(cost.compute_s, 4)
        report = self._sources.reports.get(name)
        device_bytes = report.facts.device_bytes if report is not None else math.nan
        return {
            **row,
            "seconds": self._seconds.get(name, ""),
            "compute_s": compute_s,
            "device_bytes": device_bytes if math.isfinite(device_bytes) else None,
        }


def _node(view: NodeView, keepers: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    keeper = keepers.get(view.node, {})
    return {
        "node": view.node,
        "state": view.state,
        "notice": view.notice,
        "held_bytes": keeper.get("held_bytes", 0),
        "budget_bytes": keeper.get("budget_bytes", 0),
    }


def _safe(redundancy: Mapping[str, Any]) -> list[list[str]]:
    """Return what a fault now would leave: rows of name, text and level."""
    step, stored = redundancy["step"], redundancy["stored_step"]
    survives, is_well = what_survives(redundancy)
    memory = [f"step {step}: {survives}", "good" if is_well else "warn"] if step else ["nothing"]
    return [
        ["in memory", *memory],
        ["in storage", f"step {stored}" if stored else "nothing yet"],
        *(["problem", text, "warn"] for text in redundancy["problems"]),
    ]


def _tensorboard(config: RunConfig) -> str:
    """Return the folder of TensorBoard's files; "" without one."""
    asked = config.logging.tensorboard
    return join(config.run.directory, "tensorboard") if asked is True else asked or ""
