"""Define the worker's Ray actor, which takes orders and returns outcomes.

Training runs in a separate thread. The actor's methods are coroutines on Ray's event loop, so they
answer while the training thread is stuck in a collective. One thread runs every attempt from start
to end: torch has sharding caches per thread, and only the thread that filled them can clear them.

``orchestrator.shell.capacity.workers`` calls ``hello``, ``hold``, then for each attempt ``enter``,
``attend`` and perhaps ``fence`` or ``yield_at_boundary``.
"""

import asyncio
import contextlib
import gc
import logging
import os
import queue
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ray

from workers.launchers import forget_place, ignore_schedulers
from workers.parent_death import end_with_parent
from workers.process import termination
from workers.protocol import (
    Assignment,
    Fenced,
    Formed,
    Noted,
    Outcome,
    Pace,
    SaveCosts,
    Superseded,
    Yielded,
)
from workers.telemetry import offer_stacks, stacks_path, write_stacks

log = logging.getLogger(__name__)

#: How long an otherwise ready worker waits for the top level of its script.
_SCRIPT_S = 20.0
#: Before a process ends itself, it waits this long, so that its last outcome is sent.
_ANSWER_S = 1.0

#: The reservation holds the resources. A dead worker is replaced, not restarted. Calls of dead
#: controllers stay pending, so there is room for many.
OPTIONS = {"num_cpus": 0, "max_restarts": 0, "max_concurrency": 10_000}


class Worker:
    """One training process. Between two membership changes it needs no orchestrator.

    ``worker`` is its id, such as ``w0007``. ``directory`` in shared memory is for this node's
    progress records and rings. ``on_cpu`` says that the process never gets a GPU.
    """

    def __init__(
        self, *, worker: str, directory: str, run_url: str, settings: Any, on_cpu: bool
    ) -> None:
        end_with_parent()
        ignore_schedulers()
        # This must come before any library reads it.
        forget_place(os.environ)
        with contextlib.suppress(OSError):
            # The folder comes last: a script may import from it, but it must not shadow a library.
            sys.path.append(str(Path.cwd()))
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        # Objects created by imports stay. If the collector does not search them again and again, a
        # worker is ready after 2.1 s of a core instead of 2.9 s.
        gc.disable()
        from workers.keeper import progress_path
        from workers.telemetry import ProgressRecord

        Path(directory).mkdir(parents=True, exist_ok=True)
        # This comes first, because it shows from outside that a long start makes progress.
        progress = ProgressRecord.create(progress_path(Path(directory), worker), worker=worker)
        progress.trains_here()
        from workers.process.runner import AttemptRunner

        self._node: str = ray.get_runtime_context().get_node_id()
        self._stacks = offer_stacks(stacks_path(Path(directory), worker))
        self._runner = AttemptRunner(
            worker=worker,
            directory=Path(directory),
            run_url=run_url,
            settings=settings,
            node=self._node,
            progress=progress,
        )
        self._outcomes: dict[int, Future[Outcome]] = {}
        self._ordered: set[int] = set()
        self._orders: queue.SimpleQueue[tuple[Assignment, tuple[int, ...]]] = queue.SimpleQueue()
        prepared: Future[None] = Future()
        self._has_read = threading.Event()
        threading.Thread(
            target=self._train_forever, args=(prepared, on_cpu), name="train", daemon=True
        ).start()
        prepared.result()
        gc.enable()
        termination.explain_handlers()
        termination.on_termination(self._runner.terminate)
        # Wait no longer for a slow script, because a process that is not ready for too long would
        # be killed. Then an attempt waits for the script.
        self._has_read.wait(_SCRIPT_S)

    async def hello(self) -> dict[str, Any]:
        """Return this worker's node, pid, and attempt (0 if none)."""
        return {
            "node": self._node,
            "pid": os.getpid(),
            "attempt": self._runner.attempt,
        }

    async def hold(self) -> None:
        """Never return: the call fails when this process ends, which informs the caller."""
        await asyncio.Event().wait()

    async def enter(self, assignment: Assignment, gpu_ids: tuple[int, ...]) -> None:
        """Join an attempt, unless it was joined or fenced earlier."""
        attempt = assignment.attempt
        if attempt not in self._ordered and not self._runner.is_fenced(attempt):
            self._ordered.add(attempt)
            # Stacks of an earlier attempt's fence say nothing about this one.
            os.ftruncate(self._stacks, 0)
            self._orders.put((assignment, gpu_ids))

    async def attend(self, attempt: int) -> Outcome:
        """Return how this worker left ``attempt``, once it has."""
        return await asyncio.wrap_future(self._future(attempt))

    async def notes(self, attempt: int, num_heard: int) -> tuple[Noted, ...]:
        """Return the notes of the training in ``attempt``, without the first ``num_heard``.

        Return once there are more, or return () once the attempt is left.
        """
        return await self._runner.notes.after(attempt, num_heard, left=self._future(attempt))

    async def formed(self, attempt: int) -> Formed | None:
        """Return how ``attempt`` was formed; None if it is not formed yet."""
        return self._runner.formed(attempt)

    async def fence(self, attempt: int) -> None:
        """Write the stacks, and leave ``attempt`` for good: its collectives fail at once."""
        if not self._runner.is_fenced(attempt):
            write_stacks(self._stacks)
        self._runner.fence(attempt)
        if attempt not in self._ordered:
            self._ordered.add(attempt)
            self._future(attempt).set_result(Fenced(attempt=attempt, step=0))

    async def yield_at_boundary(self, attempt: int, durable: bool = True) -> None:  # noqa: FBT001, FBT002
        """Leave ``attempt`` at the next step boundary on which all its ranks agree.

        The state is then in storage if ``durable``, otherwise at least in the keepers' memory.
        """
        self._runner.yield_at_boundary(attempt, durable=durable)

    async def keep_pace(self, attempt: int, pace: Pace) -> SaveCosts | None:
        """Set how often ``attempt`` saves; call it on one of its ranks.

        Return the cost of its steps and saves; None if the worker is not in ``attempt`` or has
        none.
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
        if on_cpu:
            self._runner.run_top_level()
        self._has_read.set()
        while True:
            assignment, gpu_ids = self._orders.get()
            outcome = self._runner.run(assignment, gpu_ids)
            # The attempt may end before ``attend`` is called.
            self._future(assignment.attempt).set_result(outcome)
            if isinstance(outcome, Superseded):
                # No controller takes over this process, and others need its device.
                log.critical("this worker ends; the run continues elsewhere: %s", outcome.why)
                time.sleep(_ANSWER_S)
                os._exit(1)
            if isinstance(outcome, Yielded) and outcome.why:
                time.sleep(_ANSWER_S)
                os._exit(self._runner.exit_code)
