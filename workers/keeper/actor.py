"""The keeper's Ray actor: reads what the node's trainers leave in shared memory and reports it.

A trainer sends no heartbeats. It stores its progress into a page and its collectives into a
record ring, both in shared memory; the keeper reads them from outside the process, so a
stopped or dead trainer is seen as well as a living one. Reports go out at a fixed period, and
at once when something happened that somebody waits for.

It also keeps the node's snapshots: see ``workers.keeper.node_memory``.

Counterparts: ``workers.records.progress`` and ``workers.records.ring`` write what is read here,
``orchestrator.shell.controller`` receives the reports.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import ray

from ucp_core.errors import UcpError
from workers.errors import WorkerError
from workers.keeper.node_memory import NodeMemory
from workers.keeper.watch import GONE, STILL_S, NodeWatch, clear
from workers.parent_death import end_with_parent
from workers.protocol import Inventory, KeeperOrder, NodeReport
from workers.settings import Settings

T = TypeVar("T")

log = logging.getLogger(__name__)

#: How often the pages are looked at: nobody waits for what is seen, it is the resolution of
#: incidents' times. A look costs about 20 us a worker. While all do steps, nothing is timed.
LOOK_S = 0.05
LOOK_STEPPING_S = 0.25
#: How often a report is sent while the trainers move, and once they stand still: a call costs
#: about 2 ms of processor time at its two ends, and only stillness has to be watched closely.
MOVING_PERIOD_S = 1.0
STILL_PERIOD_S = 0.1

OPTIONS = {
    "num_cpus": 0,
    "max_restarts": -1,
    # Calls are coroutines, and every controller that dies leaves the one behind that it held: a
    # keeper of which all are held would be deaf.
    "max_concurrency": 10_000,
    "enable_task_events": False,
}


class Keeper:
    """One node's keeper for one run. Detached; restarted by Ray when its process dies.

    Args:
        directory: Shared-memory directory for this node's pages and rings.
        controller: Gets the reports.
        run_url: The run directory; "" keeps no snapshots.
        settings: ``workers.settings.Settings`` as JSON; None keeps no snapshots.
    """

    def __init__(
        self,
        *,
        directory: str,
        controller: Any,
        run_url: str = "",
        settings: dict[str, Any] | None = None,
    ) -> None:
        end_with_parent()
        with contextlib.suppress(PermissionError):
            # Ray's workers run at niceness 15: beside saturated trainers a report would wait.
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        self._node = ray.get_runtime_context().get_node_id()
        self._controller = controller
        self._directory = Path(directory)
        self._watch = NodeWatch(node=self._node, directory=self._directory)
        self._task: asyncio.Task[None] | None = None
        self._reported_s = float("-inf")
        self._memory: NodeMemory | None = None
        self._why_no_memory = ""
        # A thread each: a store that stalls holds up flushes, and nothing else.
        self._orders, self._flushes = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        if run_url and settings is not None:
            self._open_memory(run_url, Settings.from_json(settings))

    async def hello(self) -> dict[str, Any]:
        """Start reporting if it has not begun; return who this is.

        Returns:
            node, pid, raylet_pid; and of its memory host, port and secret, ("", 0, b"") if it
            keeps no snapshots.
        """
        if self._task is None:
            self._task = asyncio.create_task(self._report_forever())
            self._task.add_done_callback(self._ended)
        host, port = self._memory.address if self._memory else ("", 0)
        return {
            "node": self._node,
            "pid": os.getpid(),
            "raylet_pid": os.getppid(),
            "host": host,
            "port": port,
            "secret": self._memory.secret if self._memory else b"",
        }

    async def hold(self) -> None:
        """Never return: the caller learns of this process's end by the call's failure."""
        await asyncio.Event().wait()

    async def kill(self, worker: str) -> None:
        """SIGKILL ``worker``. Ray only asks: a stopped one would not hear it, and wake later."""
        self._watch.kill(worker)

    async def clear(self) -> None:
        """Leave nothing in memory, nor on disk what is no checkpoint: the run is over."""
        if self._memory is not None:
            await asyncio.to_thread(self._memory.stop_storing)
        await asyncio.to_thread(clear, self._directory)

    async def held(self) -> Inventory:
        """Return what is held in memory now."""
        if self._memory is None:
            return Inventory(node=self._node, host="", port=0, parts=())
        return self._memory.inventory()

    async def order(self, order: KeeperOrder) -> None:
        """Go on under a new attempt. An order that was overtaken is not obeyed."""
        if self._memory is not None and self._memory.fence(order):
            await self._call(self._orders, self._memory.obey, order)

    async def flush(self, attempt: int, step: int) -> bool:
        """Store what is held of a version now; return whether it is committed then."""
        if self._memory is None:
            return False
        return await self._call(self._flushes, self._memory.flush, attempt, step)

    @staticmethod
    async def _call(thread: ThreadPoolExecutor, act: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(thread, act, *arguments)

    def _open_memory(self, run_url: str, settings: Settings) -> None:
        if not settings.snapshot.every_steps:
            return
        try:
            self._memory = NodeMemory(
                node=self._node,
                host=ray.util.get_node_ip_address(),
                directory=self._directory,
                run_url=run_url,
                settings=settings,
            )
        except (OSError, UcpError, WorkerError) as error:
            # The watch is needed all the same, and the state goes to storage.
            self._why_no_memory = f"no snapshots are kept on this node: {error}"

    async def _report_forever(self) -> None:
        while True:
            now_s = time.monotonic()
            try:
                await self._look(now_s)
            except (OSError, RuntimeError) as error:
                if not _is_short(error):
                    raise
                # What others have copied to here must not go for want of a descriptor.
                log.warning("no_report", extra={"reason": str(error)})
            await asyncio.sleep(LOOK_STEPPING_S if self._watch.is_stepping() else LOOK_S)

    async def _look(self, now_s: float) -> None:
        """Look at the pages, and report if it is time or there is news."""
        has_news = self._watch.look()
        period_s = MOVING_PERIOD_S if self._watch.still_s() < STILL_S else STILL_PERIOD_S
        if has_news or now_s - self._reported_s >= period_s:
            report = self._report()
            # Fire and forget: while the controller is down the report is lost, and the next one
            # says the same and more.
            self._controller.observe.remote(report)
            self._reported_s = now_s
            await self._tend(report)

    def _report(self) -> NodeReport:
        report = self._watch.report()
        if self._memory is None:
            problems = (self._why_no_memory,) if self._why_no_memory else ()
            return replace(report, problems=problems)
        return replace(
            report,
            inventory=self._memory.inventory(),
            stored_step=self._memory.stored_step,
            problems=self._memory.problems(),
        )

    @staticmethod
    def _ended(task: asyncio.Task[None]) -> None:
        """Reports that end are a bug of ours: say so, and have Ray start another keeper."""
        if not task.cancelled() and task.exception() is not None:
            log.critical("reports_failed", exc_info=task.exception())
            os._exit(1)

    async def _tend(self, report: NodeReport) -> None:
        if self._memory is not None:
            living = {each.worker for each in report.workers if each.os_state not in GONE}
            # In a thread: to free a large arena takes a while.
            await asyncio.to_thread(self._memory.tend, living)


def _is_short(error: OSError | RuntimeError) -> bool:
    """Return whether a process may have no more files, memory or threads for a moment."""
    if isinstance(error, OSError):
        return error.errno in {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
    return "start new thread" in str(error)
