"""The live page's data: the run's document, its curves, and the last phases of each worker."""

import asyncio
import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from itertools import islice

from orchestrator.config import RunConfig
from orchestrator.report import Curves, RunDocument, live_part, log_tail, page_document, report_of
from orchestrator.shell.clock import monotonic_s
from orchestrator.shell.threads import STORAGE, Tasks, in_thread
from ucp_core.errors import StorageError
from ucp_core.storage import LocalStore, Store, join
from workers.protocol import WorkerPhase, WorkerReport
from workers.repeated import Repeated

log = logging.getLogger(__name__)

#: A document serves all requests for this long.
_FRESH_S = 0.9
#: Shortest time between two reads of new lines: listing an object store costs money.
_LOCAL_S, _REMOTE_S = 1.0, 10.0
#: Storage that stalls delays the page at most this long.
_WAIT_S = 0.3
#: The first read covers this many bytes at the end of a file: 8,000 steps or more, in 50 ms.
_FIRST_BYTES = 2 << 20
#: How many nodes the page shows, those in trouble first, with their workers: a document for 80,000
#: workers had 16 MB.
NUM_NODES = 128
#: With more workers than this, past phases are kept only of those that the page shows.
_NUM_NOTED = 2048
#: For how many seconds the phases of each worker are kept.
_SECONDS_KEPT = 60
#: A letter for each phase, in their order.
_LETTERS = dict(zip(WorkerPhase, "imlfbruscx", strict=True))


class Live:
    """Makes the document of the page, at most once a second.

    When the page is first opened, its curves cover the last 8,000 steps or more. ``told`` returns
    the run's document, with at most ``NUM_NODES`` nodes.
    """

    def __init__(
        self,
        *,
        config: RunConfig,
        store: Store,
        path: str,
        told: Callable[[], RunDocument],
        reports: Mapping[str, WorkerReport],
        at_s: Callable[[], float],
    ) -> None:
        self._config = config
        self._store = store
        self._path = path
        self._told = told
        self._reports = reports
        self.at_s = at_s
        self.curves = Curves(store, path, -_FIRST_BYTES)
        self._looked_s = self._made_s = -math.inf
        self._looking = Tasks()
        self._failures = Repeated(log)
        self._seconds: dict[str, str] = {}
        self._shown: list[str] = []
        self._document = b""
        self._reporting = asyncio.Lock()
        self.tag = ""

    async def watch_forever(self) -> None:
        """Note each second what each worker does, until cancelled."""
        while True:
            self.note()
            await asyncio.sleep(1.0)

    def note(self) -> None:
        """Note what each worker does now; with many workers, only of those that the page shows."""
        before, reports = self._seconds, self._reports
        noted: Iterable[str] = reports
        if len(reports) > _NUM_NOTED:
            noted = self._shown or islice(reports, _NUM_NOTED)
        self._seconds = {
            worker: (before.get(worker, "") + _LETTERS[reports[worker].phase])[-_SECONDS_KEPT:]
            for worker in noted
            if worker in reports
        }

    async def document(self) -> bytes:
        """Return the document as JSON; ``tag`` identifies its content."""
        if monotonic_s() - self._made_s >= _FRESH_S:
            await self.look()
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
        """Return the report of the run so far; one at a time, as each reads the whole journal."""
        async with self._reporting:
            return await in_thread(STORAGE, report_of, self._config.run.directory)

    def made(self) -> bytes:
        """Return the document as it is now."""
        told, config = self._told(), self._config
        rows = (*told.status["workers"], *told.status["standbys"])
        self._shown = [row["worker"] for row in rows]
        board = config.logging.tensorboard
        board = join(config.run.directory, "tensorboard") if board is True else board or ""
        limits = {"min_workers": config.workers.min, "max_workers": config.workers.max}
        document = page_document(
            told,
            self.curves,
            incidents=told.stats.incidents,
            name=config.run.name,
            url=config.run.directory,
            tensorboard=board,
            **live_part(told, self._seconds, **limits),
        )
        return json.dumps(document, separators=(",", ":")).encode()

    async def look(self) -> None:
        """Read the curves' new points in a thread, unless that was done a moment ago.

        Wait for storage only briefly: while it stalls, the page shows what is known.
        """
        period_s = _LOCAL_S if isinstance(self._store, LocalStore) else _REMOTE_S
        if not self._looking and monotonic_s() - self._looked_s >= period_s:
            self._looked_s = monotonic_s()
            self._looking.spawn(self._look())
        if self._looking:
            await asyncio.wait(self._looking, timeout=_WAIT_S)

    async def _look(self) -> None:
        try:
            await in_thread(STORAGE, self.curves.read)
            self._failures.passed()
        except StorageError as error:
            # The page shows what is known; the next read finds the rest.
            self._failures.failed("the page lacks the newest points of its curves", error)
