"""The curves of a run for its page, read from its directory while somebody looks."""

from __future__ import annotations

import asyncio
import logging
import math

from orchestrator.run_directory import METRICS, VALIDATION, VALUES, Curve, Point, further_curves
from orchestrator.shell.clock import monotonic_s
from orchestrator.shell.threads import STORAGE, Tasks, in_thread
from ucp_core.errors import StorageError
from ucp_core.storage import LocalStore, Store, appended_sizes, join, read_appended
from workers.repeated import Repeated

log = logging.getLogger(__name__)

#: New lines are looked for this often at most: a listing of an object store costs money.
_LOCAL_S, _REMOTE_S = 1.0, 10.0
#: A stalled storage holds the page up for this long at most.
_WAIT_S = 0.3
#: The first look reads this much of the end of a file: 8,000 steps or more, in 50 ms.
_FIRST_BYTES = 2 << 20


class Curves:
    """Losses and further numbers by step, with as many points as can be seen.

    In a run of more than 8,000 steps they begin there when the page is first opened.

    Args:
        store: Holds the run directory.
        path: The run directory in it.
    """

    def __init__(self, store: Store, path: str) -> None:
        self._store = store
        self._path = path
        self._looked_s = -math.inf
        self._looking = Tasks()
        self._read_bytes: dict[str, int] = {}
        self._rests: dict[str, bytes] = {}
        self._curves = {name: Curve() for name in (METRICS, VALIDATION, VALUES)}
        self._failures = Repeated(log)
        self.loss: list[Point] = []
        self.validation: list[Point] = []
        self.further: dict[str, list[Point]] = {}

    @property
    def tokens_per_step(self) -> int:
        """Return those of the last step; 0 where the script counts samples alone."""
        return self._curves[METRICS].tokens_per_step

    async def look(self) -> None:
        """Read what is new, in a thread, unless that was done a moment ago.

        Waits for storage only for a moment: while it stalls, the page shows what is known.
        """
        period_s = _LOCAL_S if isinstance(self._store, LocalStore) else _REMOTE_S
        if not self._looking and monotonic_s() - self._looked_s >= period_s:
            self._looked_s = monotonic_s()
            self._looking.spawn(self._look())
        if self._looking:
            await asyncio.wait(self._looking, timeout=_WAIT_S)

    async def _look(self) -> None:
        try:
            await in_thread(STORAGE, self._read)
            self._failures.passed()
        except StorageError as error:
            # The page shows what it knows; the next look finds the rest.
            self._failures.failed("the page lacks the newest points of its curves", error)

    def _read(self) -> None:
        for name, curve in self._curves.items():
            folder, _, file = name.rpartition("/")
            size_bytes = appended_sizes(self._store, join(self._path, folder)).get(file, 0)
            begin = self._read_bytes.get(name)
            if begin is None:
                begin = max(0, size_bytes - _FIRST_BYTES)
            if size_bytes > begin:
                new = read_appended(self._store, join(self._path, name), begin, size_bytes - begin)
                lines, _, rest = (self._rests.get(name, b"") + new).rpartition(b"\n")
                self._rests[name] = rest
                curve.add(lines.decode(errors="replace"))
            self._read_bytes[name] = max(begin, size_bytes)
        curves = self._curves
        self.loss, self.validation = curves[METRICS].points(), curves[VALIDATION].points()
        self.further = further_curves(curves[METRICS], curves[VALUES])
