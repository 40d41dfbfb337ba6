"""Evidence of attempts that end: collected before any kill, stored in the background."""

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from orchestrator.core import RunStats, incident_folder
from orchestrator.core import actions as act
from orchestrator.shell.capacity import Keepers
from orchestrator.shell.threads import STORAGE, Tasks, in_thread
from ucp_core.errors import StorageError
from ucp_core.storage import Store, join
from workers.protocol import WorkerReport
from workers.telemetry import RINGS, STACKS

log = logging.getLogger(__name__)

#: Name of the file with the members' last reports, in the folder of the incident.
REPORTS: Final = "reports.json"
#: How long the kill of a worker waits for evidence of a hang.
KILL_S: Final = 0.5
#: How many incidents keep their evidence.
NUM_KEPT: Final = 20
#: How long the end of a run waits for evidence that is being stored.
CLOSE_S: Final = 10.0


class Evidence:
    """Has keepers collect evidence, and store it once the incident has its number.

    ``reports`` has the last report on each worker.
    """

    def __init__(
        self,
        *,
        keepers: Keepers,
        reports: Mapping[str, WorkerReport],
        store: Store,
        path: str,
        num_incidents: int,
    ) -> None:
        self._keepers = keepers
        self._reports = reports
        self._store = store
        self._path = path
        self._num_seen = num_incidents
        self._tasks = Tasks()
        self._taking: asyncio.Task[None] | None = None
        self._awaited: asyncio.Task[None] | None = None
        self._rows: dict[int, tuple[WorkerReport, ...]] = {}
        self._nodes: dict[int, tuple[str, ...]] = {}

    def collect(self, action: act.CollectEvidence) -> None:
        """Begin to collect evidence; if it is awaited, later calls of ``then`` wait for it."""
        attempt = action.attempt
        rows = tuple(row for row in self._reports.values() if row.attempt == attempt)
        self._rows, self._nodes = {attempt: rows}, {attempt: action.nodes}
        self._taking = self._tasks.spawn(self._take(attempt, action.nodes))
        self._awaited = self._taking if action.is_awaited else None

    def then(self, within_s: float, act: Callable[[], None]) -> None:
        """Call ``act`` once awaited evidence is collected, or after ``within_s`` at the latest."""
        if self._awaited is None or self._awaited.done():
            act()
        else:
            self._tasks.spawn(self._then(self._awaited, within_s, act))

    def follow(self, stats: RunStats) -> None:
        """Store the evidence of incidents that are new in ``stats``."""
        for incident in stats.incidents[self._num_seen :]:
            if incident.folder and incident.attempt in self._rows and self._taking is not None:
                self._tasks.spawn(self._keep(incident.number, incident.attempt, self._taking))
        self._num_seen = len(stats.incidents)

    async def close(self) -> None:
        """Wait, for a limited time, for evidence that is being stored."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_S)

    async def _take(self, attempt: int, nodes: tuple[str, ...]) -> None:
        await asyncio.gather(*(self._keepers.take_evidence(node, attempt) for node in nodes))

    @staticmethod
    async def _then(taking: asyncio.Task[None], within_s: float, act: Callable[[], None]) -> None:
        await asyncio.wait([taking], timeout=within_s)
        act()

    async def _keep(self, number: int, attempt: int, taking: asyncio.Task[None]) -> None:
        folder, nodes = incident_folder(number), self._nodes[attempt]
        reports = self._rows.pop(attempt)
        await asyncio.wait([taking])
        stored = (self._keepers.store_evidence(node, attempt, folder) for node in nodes)
        await asyncio.gather(*stored, in_thread(STORAGE, self._store_reports, number, reports))

    def _store_reports(self, number: int, reports: Sequence[WorkerReport]) -> None:
        """Store the reports, and delete the evidence of an old incident."""
        try:
            path = join(self._path, incident_folder(number), REPORTS)
            document = json.dumps(_document(reports), indent=1).encode()
            self._store.write_atomic(path, document, fsync=False)
            old = join(self._path, incident_folder(number - NUM_KEPT))
            if number > NUM_KEPT:
                for name in (STACKS, RINGS, REPORTS):
                    self._store.delete(join(old, name))
        except StorageError as error:
            log.warning("the evidence of incident %s is not stored: %s", number, error)


def _document(rows: Sequence[WorkerReport]) -> dict[str, Any]:
    """Return the reports as JSON values, with the members of each group listed only once."""
    members = {group.group: list(group.ranks) for row in rows for group in row.groups}
    workers = [asdict(row) for row in sorted(rows, key=lambda row: row.rank)]
    for row in workers:
        for group in row["groups"]:
            del group["ranks"]
    return {"groups": members, "workers": workers}
