"""The keeper's Ray actor: reads what the node's trainers leave in shared memory and reports it.

A trainer sends no heartbeats. It stores its progress into a page and its collectives into a
record ring, both in shared memory; the keeper reads them from outside the process, so a
stopped or dead trainer is seen as well as a living one. Reports go out at a fixed period, and
at once when something happened that somebody waits for.

Counterparts: ``workers.progress`` and ``workers.collectives.ring`` write what is read here,
``orchestrator.shell.controller`` receives the reports.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from pathlib import Path
from typing import Any

import ray

from workers.keeper.watch import STILL_S, NodeWatch

#: How often the pages are looked at: nobody waits for what is seen, it is the resolution of
#: incidents' times. A look costs about 20 us a worker. While all do steps, nothing is timed.
LOOK_S = 0.05
LOOK_STEPPING_S = 0.15
#: How often a report is sent while the trainers move, and once they stand still: a call costs
#: about 2 ms of processor time at its two ends, and only stillness has to be watched closely.
MOVING_PERIOD_S = 1.0
STILL_PERIOD_S = 0.1

OPTIONS = {"num_cpus": 0, "max_restarts": -1, "max_concurrency": 8, "enable_task_events": False}


class Keeper:
    """One node's keeper for one run. Detached; restarted by Ray when its process dies."""

    def __init__(self, *, directory: str, controller: Any) -> None:
        with contextlib.suppress(PermissionError):
            # Ray's workers run at niceness 15: beside saturated trainers a report would wait.
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        self._node = ray.get_runtime_context().get_node_id()
        self._controller = controller
        self._watch = NodeWatch(node=self._node, directory=Path(directory))
        self._task: asyncio.Task[None] | None = None

    async def hello(self) -> dict[str, Any]:
        """Start reporting if it has not begun; return who this is: node, pid, raylet_pid."""
        if self._task is None:
            self._task = asyncio.create_task(self._report_forever())
        return {"node": self._node, "pid": os.getpid(), "raylet_pid": os.getppid()}

    async def hold(self) -> None:
        """Never return: the caller learns of this process's end by the call's failure."""
        await asyncio.Event().wait()

    async def kill(self, worker: str) -> None:
        """SIGKILL ``worker``. Ray only asks: a stopped one would not hear it, and wake later."""
        self._watch.kill(worker)

    async def _report_forever(self) -> None:
        reported_s = float("-inf")
        while True:
            now_s = time.monotonic()
            has_news = self._watch.look()
            period_s = MOVING_PERIOD_S if self._watch.still_s() < STILL_S else STILL_PERIOD_S
            if has_news or now_s - reported_s >= period_s:
                # Fire and forget: while the controller is down the report is lost, and the
                # next one says the same and more.
                self._controller.observe.remote(self._watch.report())
                reported_s = now_s
            await asyncio.sleep(LOOK_STEPPING_S if self._watch.is_stepping() else LOOK_S)
