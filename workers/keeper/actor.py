"""The keeper: a node's Ray actor that watches its trainers and keeps their snapshots.

Trainers send no heartbeats. They write progress and collectives into shared memory; the keeper
reads both from outside, so it also sees a stopped or dead trainer. It reports to the controller at
a fixed period, and at once after an event that the controller waits for.

``workers.keeper.node_memory`` keeps the snapshots. ``workers.telemetry`` writes the records that
the keeper reads, and ``orchestrator.shell.controller`` receives the reports.
"""

import asyncio
import contextlib
import errno
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import ray

from ucp_core.errors import StorageError, UcpError
from ucp_core.storage import join, open_store
from workers.errors import WorkerError
from workers.keeper.node_memory import NodeMemory
from workers.keeper.notices import NoticeWatch, sources_of
from workers.keeper.peers import rate_to, unreached
from workers.keeper.reach import Reach
from workers.keeper.sockets import Sockets
from workers.keeper.trainer_watch import STILL_S, NodeWatch, clear, ring_path
from workers.launchers import crash_by_sigterm, ignore_schedulers
from workers.parent_death import end_with_parent
from workers.protocol import GONE, Ending, Flow, Inventory, KeeperOrder, NodeReport, Notice, Peer
from workers.settings import Settings
from workers.telemetry import Evidence, Lease, copies, lease_s, take_stacks

T = TypeVar("T")

log = logging.getLogger(__name__)

#: Period of reading the progress records, which takes about 20 us a worker. It is the resolution of
#: the times in incidents. While all trainers step, nothing is timed.
LOOK_S = 0.05
LOOK_STEPPING_S = 0.25
#: Period of the reports while trainers move, and while they stand still. A call costs about 2 ms of
#: processor time at its two ends, and only stillness needs a close watch.
MOVING_PERIOD_S = 1.0
STILL_PERIOD_S = 0.1
#: In a large run the second period is at least this much per rank. The controller receives the
#: reports of all nodes, and 2,000 of them a second would take all its time.
STILL_PERIOD_S_EACH = 5e-4
#: Shortest period of reading connections, which takes 10 us for each connection of the machine.
FLOWS_PERIOD_S = 0.5
#: Time for a killed process to be gone: it takes milliseconds, unless a device holds it. The
#: controller waits longer than this for the answer.
KILLED_S = 0.3
#: Time for processes to write their stacks, which takes 5 ms. One that needs longer is stopped or
#: frozen.
EVIDENCE_S = 0.3

OPTIONS = {
    "num_cpus": 0,
    "max_restarts": -1,
    # A dead controller leaves a waiting call behind; with few threads a keeper could answer no
    # other.
    "max_concurrency": 10_000,
    "enable_task_events": False,
}


class Keeper:
    """One node's keeper for one run. It is detached; Ray restarts it when its process dies.

    Args:
        directory: Shared-memory directory with the node's progress records and record rings.
        controller: Receives the reports.
        run_url: The run directory; without it the keeper keeps no snapshots.
        settings: The run's settings; without them the keeper keeps no snapshots.
        claim: Claim of the run on its directory; orders may name a later claim.
        notices: Arguments of ``workers.keeper.notices.sources_of``.
    """

    def __init__(
        self,
        *,
        directory: str,
        controller: Any,
        run_url: str = "",
        settings: Settings | None = None,
        claim: int = 0,
        notices: Mapping[str, str] | None = None,
    ) -> None:
        end_with_parent()
        ignore_schedulers()
        crash_by_sigterm()
        with contextlib.suppress(PermissionError):
            # Ray's workers run at niceness 15, so a report would wait beside busy trainers.
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        self._node = ray.get_runtime_context().get_node_id()
        self._controller = controller
        self._directory = Path(directory)
        self._watch = NodeWatch(node=self._node, directory=self._directory)
        self._lease_s = lease_s(os.environ)
        self._lease = Lease(self._directory, self._lease_s)
        self._reach = Reach(self._cut_off)
        self._notices = NoticeWatch(sources_of(**(notices or {})))
        self._notice: Notice | None = None
        host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
        self._head = (host, int(port))
        self._task: asyncio.Task[None] | None = None
        self._reported_s = self._flows_s = float("-inf")
        self._sockets = Sockets()
        self._memory: NodeMemory | None = None
        self._why_no_memory = ""
        # Each has its own thread, so that a store that stalls delays only flushes.
        self._orders, self._flushes = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        # A search need not wait for the probe of a link that was lost earlier.
        self._probes = ThreadPoolExecutor(4)
        self._run_url = run_url
        #: Stacks of the last attempt that ended, and its rings once they are copied.
        self._evidence: tuple[int, dict[str, str], Future[dict[str, bytes]]] | None = None
        self._taking, self._storing = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        if run_url and settings is not None:
            self._open_memory(run_url, settings, claim)

    async def hello(self) -> dict[str, Any]:
        """Start the reports, once, and return the keeper's identity.

        Keys: node, pid, raylet_pid, lease_s, wall_time, and where its snapshots are served: host,
        port and secret, or ("", 0, b"") without snapshots.
        """
        self._lease.renew()
        if self._task is None:
            self._task = asyncio.create_task(self._report_forever())
            self._task.add_done_callback(self._ended)
        host, port = self._memory.address if self._memory else ("", 0)
        return {
            "node": self._node,
            "pid": os.getpid(),
            "raylet_pid": os.getppid(),
            "lease_s": self._lease_s,
            "wall_time": time.time(),  # noqa: TID251  as Ray counts the end of a drained node
            "host": host,
            "port": port,
            "secret": self._memory.secret if self._memory else b"",
        }

    async def hold(self) -> None:
        """Never return: the call fails when this process ends."""
        await asyncio.Event().wait()

    async def kill(self, worker: str) -> bool:
        """Send SIGKILL to ``worker``; return whether its process is known to be gone.

        Ray only requests the end, which a stopped process ignores.
        """
        self._watch.kill(worker)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILLED_S):
                while self._watch.lives(worker):  # noqa: ASYNC110  the kernel tells its parent only
                    await asyncio.sleep(KILLED_S / 30)
        return not self._watch.lives(worker)

    async def kill_node(self) -> None:
        """Send SIGKILL to the raylet, whose processes end with it, as in a power cut."""
        os.kill(os.getppid(), signal.SIGKILL)

    async def take_evidence(self, attempt: int) -> None:
        """Take stacks and rings of the node's workers in ``attempt``, and drop earlier ones.

        Return once all have written their stacks, or soon after ``EVIDENCE_S``. Rings are copied
        after that, because their content stays.
        """
        subjects = self._watch.subjects(attempt)
        stacks = await self._call(self._taking, take_stacks, subjects, EVIDENCE_S)
        rings = {each.worker: ring_path(self._directory, each.worker) for each in subjects}
        self._evidence = (attempt, stacks, self._taking.submit(copies, rings))

    async def store_evidence(self, attempt: int, folder: str) -> bool:
        """Store the evidence of ``attempt`` below ``folder``; return whether it is stored.

        It is not stored if none was taken, or if storage refuses.
        """
        if self._evidence is None or self._evidence[0] != attempt or not self._run_url:
            return False
        (_, stacks, rings), self._evidence = self._evidence, None
        return await self._call(self._storing, self._store_evidence, stacks, rings, folder)

    def _store_evidence(
        self, stacks: dict[str, str], rings: Future[dict[str, bytes]], folder: str
    ) -> bool:
        taken = Evidence(stacks=stacks, rings=rings.result())
        try:
            store, path = open_store(self._run_url)
            taken.store(store, join(path, folder))
        except StorageError as error:
            log.warning("the evidence for %s is not stored: %s", folder, error)
            return False
        return True

    async def ending(self, pid: int, wait_s: float) -> Ending:
        """Return how a process of this node ended, if that is known within ``wait_s``."""
        return await asyncio.to_thread(self._watch.endings.of, pid, wait_s)

    async def clear(self) -> None:
        """Remove the node's memory and unfinished checkpoints, because the run is over."""
        if self._memory is not None:
            await asyncio.to_thread(self._memory.stop_storing)
        await asyncio.to_thread(clear, self._directory)

    async def held(self) -> Inventory:
        """Return the versions that the node holds in memory."""
        if self._memory is None:
            return Inventory(node=self._node, parts=())
        return self._memory.inventory()

    async def order(self, order: KeeperOrder) -> None:
        """Switch to a new attempt; ignore an order that is older than the current attempt."""
        is_obeyed = self._memory is None or self._memory.fence(order)
        if is_obeyed:
            self._reach.follow(frozenset((self._head, *order.others)))
        if self._memory is not None and is_obeyed:
            await self._call(self._orders, self._memory.obey, order)

    async def probe(self, peers: dict[str, tuple[str, int]]) -> list[str]:
        """Return the nodes in ``peers``, addresses by node, that this one does not reach."""
        return await self._call(self._probes, unreached, peers)

    async def rate_to(self, peer: Peer) -> float | None:
        """Return the bytes per second that arrive at a peer's node; None if it is not reached."""
        with contextlib.suppress(OSError):
            return await self._call(self._probes, rate_to, peer)
        return None

    async def flush(self, attempt: int, step: int) -> bool:
        """Store a version now; return whether it is committed."""
        if self._memory is None:
            return False
        return await self._call(self._flushes, self._memory.flush, attempt, step)

    @staticmethod
    async def _call(thread: ThreadPoolExecutor, act: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(thread, act, *arguments)

    def _open_memory(self, run_url: str, settings: Settings, claim: int) -> None:
        if not settings.snapshot.every_steps:
            return
        try:
            self._memory = NodeMemory(
                node=self._node,
                host=ray.util.get_node_ip_address(),
                directory=self._directory,
                run_url=run_url,
                settings=settings,
                claim=claim,
            )
        except (OSError, UcpError, WorkerError) as error:
            # The keeper still watches the node; state goes to storage.
            self._why_no_memory = f"this node keeps no snapshots: {error}"

    async def _report_forever(self) -> None:
        while True:
            now_s = time.monotonic()
            try:
                await self._look(now_s)
            except (OSError, RuntimeError) as error:
                if not _is_short(error):
                    raise
                # Copies of other nodes' snapshots must survive a shortage of descriptors.
                log.warning("the keeper makes no report now: %s", error)
            await asyncio.sleep(LOOK_STEPPING_S if self._watch.is_stepping() else LOOK_S)

    async def _look(self, now_s: float) -> None:
        """Read the progress records, and report if it is time or there is news."""
        self._lease.look()
        notice = self._notices.notice()
        has_news = self._watch.look() or notice != self._notice
        is_still = self._watch.still_s() >= STILL_S
        period_s = still_period_s(self._watch.num_ranks) if is_still else MOVING_PERIOD_S
        if has_news or now_s - self._reported_s >= period_s:
            self._notice = notice
            report = self._report(now_s)
            # Do not await the call: if the controller is down, the next report says the same and
            # more.
            self._controller.observe.remote(report)
            self._reported_s = now_s
            if self._memory is not None:
                living = {each.worker for each in report.workers if each.os_state not in GONE}
                # In a thread, because freeing a large arena takes a while.
                await asyncio.to_thread(self._memory.tend, living)

    def _report(self, now_s: float) -> NodeReport:
        report = replace(
            self._watch.report(),
            notice=self._notice,
            problems=self._problems(),
            flows=self._flows(now_s),
        )
        if self._memory is None:
            return report
        stored_attempt, stored_step = self._memory.stored
        return replace(
            report,
            inventory=self._memory.inventory(),
            stored_step=stored_step,
            stored_attempt=stored_attempt,
        )

    def _flows(self, now_s: float) -> tuple[Flow, ...] | None:
        if now_s - self._flows_s < FLOWS_PERIOD_S:
            return None
        self._flows_s = now_s
        return self._sockets.look(self._watch.pids())

    def _problems(self) -> tuple[str, ...]:
        found = self._memory.problems() if self._memory else ()
        if self._why_no_memory:
            found = (self._why_no_memory,)
        return (*found, *self._notices.problems())

    def _cut_off(self) -> None:
        """End the node's trainers: it reaches no other node, and the run continues without it.

        Its memory stays, so that a returning controller can find it.
        """
        log.critical("no other node is reached: ending %s", ", ".join(self._watch.workers))
        for worker in self._watch.workers:
            self._watch.kill(worker)

    @staticmethod
    def _ended(task: asyncio.Task[None]) -> None:
        """Exit if the reports failed, which is a bug; Ray then starts another keeper."""
        if not task.cancelled() and task.exception() is not None:
            log.critical("the keeper ends because its reports failed", exc_info=task.exception())
            os._exit(1)


def still_period_s(num_ranks: int) -> float:
    """Return the period of reports on trainers that stand still, by the number of ranks."""
    return min(max(STILL_PERIOD_S, STILL_PERIOD_S_EACH * num_ranks), MOVING_PERIOD_S)


def _is_short(error: OSError | RuntimeError) -> bool:
    """Return whether the process briefly lacks descriptors, memory or threads."""
    if isinstance(error, OSError):
        return error.errno in {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
    return "start new thread" in str(error)
