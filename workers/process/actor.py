"""The worker's Ray actor: orders in, outcomes out. Training runs in a thread of its own.

The actor's methods are coroutines on Ray's event loop, so they answer while the training
thread is stuck in a collective. One thread builds, trains and clears every attempt: torch
keeps sharding caches per thread, and only the thread that filled them can empty them.

Counterpart: ``orchestrator.shell.capacity.workers`` calls what is here, in this order: ``hello``,
``hold``,
then per attempt ``enter``, ``attend`` and perhaps ``fence`` or ``yield_at_boundary``.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ray

from workers.parent_death import end_with_parent
from workers.protocol import Assignment, Fenced, Formed, Outcome, Pace, SaveCosts

#: It reserves nothing, because a slot does that; a dead one is replaced and not restarted. Calls
#: are coroutines, and every controller that dies leaves some of those behind that it held.
OPTIONS = {"num_cpus": 0, "max_restarts": 0, "max_concurrency": 10_000}


class Worker:
    """One training process. It needs no orchestrator between two membership changes.

    Args:
        worker: Worker id, as ``w0007``.
        directory: Shared-memory directory for this node's pages and rings.
        run_url: The run directory.
        settings: ``workers.settings.Settings`` as JSON.
        on_cpu: Whether it will never be given a GPU.
    """

    def __init__(
        self, *, worker: str, directory: str, run_url: str, settings: Any, on_cpu: bool
    ) -> None:
        end_with_parent()
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        from workers.process.runner import AttemptRunner

        self._node: str = ray.get_runtime_context().get_node_id()
        Path(directory).mkdir(parents=True, exist_ok=True)
        self._runner = AttemptRunner(
            worker=worker,
            directory=Path(directory),
            run_url=run_url,
            settings=settings,
            node=self._node,
        )
        self._outcomes: dict[int, Future[Outcome]] = {}
        self._ordered: set[int] = set()
        self._orders: queue.SimpleQueue[tuple[Assignment, tuple[int, ...]]] = queue.SimpleQueue()
        prepared: Future[None] = Future()
        threading.Thread(
            target=self._train_forever, args=(prepared, on_cpu), name="train", daemon=True
        ).start()
        prepared.result()

    async def hello(self) -> dict[str, Any]:
        """Return who this is: node, pid, and the attempt it is in (0 if none)."""
        return {
            "node": self._node,
            "pid": os.getpid(),
            "attempt": self._runner.attempt,
        }

    async def hold(self) -> None:
        """Never return: the caller learns of this process's end by the call's failure."""
        await asyncio.Event().wait()

    async def enter(self, assignment: Assignment, gpu_ids: tuple[int, ...]) -> None:
        """Join an attempt. Twice is once; an attempt that was fenced before is not entered."""
        attempt = assignment.attempt
        if attempt not in self._ordered and not self._runner.is_fenced(attempt):
            self._ordered.add(attempt)
            self._orders.put((assignment, gpu_ids))

    async def attend(self, attempt: int) -> Outcome:
        """Return how this worker left ``attempt``, when it has."""
        return await asyncio.wrap_future(self._future(attempt))

    async def formed(self, attempt: int) -> Formed | None:
        """Return what forming ``attempt`` took; None if it has not formed."""
        return self._runner.formed(attempt)

    async def fence(self, attempt: int) -> None:
        """Leave ``attempt`` and never enter it again: wakes every collective it waits in."""
        self._runner.fence(attempt)
        if attempt not in self._ordered:
            self._ordered.add(attempt)
            self._future(attempt).set_result(Fenced(attempt=attempt, step=0))

    async def yield_at_boundary(self, attempt: int, durable: bool = True) -> None:  # noqa: FBT001, FBT002
        """Leave ``attempt`` at the next step boundary that all its ranks agree on.

        With ``durable`` the state is in storage then, and else at least in keepers' memory.
        """
        self._runner.yield_at_boundary(attempt, durable=durable)

    async def keep_pace(self, attempt: int, pace: Pace) -> SaveCosts | None:
        """Have ``attempt`` save so often, which one of its ranks is to be told.

        Returns:
            What its steps and saves cost; None if it is not here.
        """
        return self._runner.keep_pace(attempt, pace)

    def _future(self, attempt: int) -> Future[Outcome]:
        return self._outcomes.setdefault(attempt, Future())

    def _train_forever(self, prepared: Future[None], on_cpu: bool) -> None:  # noqa: FBT001
        try:
            self._runner.prepare(on_cpu=on_cpu)
        except Exception as error:  # noqa: BLE001  the constructor raises it, and Ray reports it
            prepared.set_exception(error)
            return
        prepared.set_result(None)
        while True:
            assignment, gpu_ids = self._orders.get()
            outcome = self._runner.run(assignment, gpu_ids)
            # It may have ended before anybody asked how.
            self._future(assignment.attempt).set_result(outcome)
