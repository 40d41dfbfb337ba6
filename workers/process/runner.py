"""Run attempts one after the other in a worker process, and let others end them.

The training thread calls ``run``; any other thread may call ``fence`` and ``yield_at_boundary``. A
fence is final: a fenced attempt is never entered.
"""

import asyncio
import gc
import logging
import os
import signal
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from ucp_core.errors import HeldError, StorageError
from ucp_core.storage import held, open_store
from workers import collectives
from workers.errors import NodeShortError
from workers.keeper import progress_path, ring_path
from workers.process import device, termination
from workers.process.output import HeldOutput, OutputLog, log_of
from workers.process.warm_up import import_for, open_built_in, run_top_level, warm_up
from workers.protocol import (
    Assignment,
    Completed,
    Formed,
    Noted,
    Outcome,
    Pace,
    Raised,
    SaveCosts,
    Superseded,
    WorkerPhase,
    Yielded,
)
from workers.settings import Settings
from workers.telemetry import ProgressRecord, has_run_out
from workers.train import WorkerContext, require_room, run_attempt

log = logging.getLogger(__name__)


class Notes:
    """Notes of attempts: the training thread adds them, coroutines of one loop wait for them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._attempt = 0
        self._notes: tuple[Noted, ...] = ()
        #: Completed by the next note.
        self._news: Future[None] = Future()

    def add(self, note: Noted) -> None:
        """Add a note; forget those of earlier attempts."""
        with self._lock:
            kept = self._notes if note.attempt == self._attempt else ()
            self._attempt, self._notes = note.attempt, (*kept, note)
            news, self._news = self._news, Future()
        news.set_result(None)

    async def after(self, attempt: int, num_heard: int, *, left: Future[Any]) -> tuple[Noted, ...]:
        """Return the notes of ``attempt`` without the first ``num_heard``, once there are some.

        Return () once ``left`` is done and there are none.
        """
        while True:
            with self._lock:
                news = self._news
                notes = self._notes[num_heard:] if attempt == self._attempt else ()
            if notes or left.done():
                return notes
            waits = [asyncio.wrap_future(news), asyncio.wrap_future(left)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)


class AttemptRunner:
    """Runs one attempt at a time in the caller's thread.

    ``directory`` in shared memory is for the progress record and the ring. ``node`` is a Ray node
    id in hexadecimal. If ``progress`` is None, the runner creates the record.
    """

    def __init__(
        self,
        *,
        worker: str,
        directory: Path,
        run_url: str,
        settings: Settings,
        node: str = "",
        progress: ProgressRecord | None = None,
    ) -> None:
        store, path = open_store(run_url)
        self._directory = directory
        self._formed: dict[int, Formed] = {}
        self._fenced: set[int] = set()
        self._yielding: set[int] = set()
        self._durably: set[int] = set()
        self._signal = 0
        self._paces: dict[int, Pace] = {}
        self._costs: dict[int, Callable[[], SaveCosts]] = {}
        self._lock = threading.Lock()
        self._held = HeldOutput()
        self._holding = threading.Lock()
        self.notes = Notes()
        self._progress = progress or ProgressRecord.create(
            progress_path(directory, worker), worker=worker
        )
        self._context = WorkerContext(
            worker=worker,
            settings=settings,
            store=store,
            directory=path,
            progress=self._progress,
            ring_path=str(ring_path(directory, worker)),
            fenced=self.is_fenced,
            yield_requested=self._leaves,
            yield_durable=self._durably.__contains__,
            node=node,
            keeper_directory=directory,
            on_formed=self._note_formed,
            pace=lambda attempt: self._paces.get(attempt, Pace()),
            on_costs=self._note_costs,
            on_note=self.notes.add,
        )
        self.attempt = 0

    def prepare(self, *, on_cpu: bool) -> None:
        """Do one-time work that would slow down the first attempt.

        Raise ``WorkerError`` if that fails. There is no warm-up on GPUs, because the GPU is only
        known once it is reserved.
        """
        self._progress.trains_here()
        settings = self._context.settings
        if settings.run.script:
            import_for(settings.run.script)
        else:
            open_built_in(settings)
        if on_cpu:
            warm_up(settings)
        # Imports stay, so garbage collection after an attempt need not scan them.
        gc.collect()
        gc.freeze()

    def run_top_level(self) -> None:
        """Run the script up to its call of ``everstep.run``, so that no attempt waits for it.

        This never fails: the script raises its errors again in the attempt. Its output goes to the
        log of the first attempt.
        """
        with log_of(self._held):
            came_there = run_top_level(self._context.settings)
        if not came_there:
            # The script prints its output again, too.
            self._held = HeldOutput()

    def run(self, assignment: Assignment, gpu_ids: tuple[int, ...]) -> Outcome:
        """Train in the attempt until this worker leaves it; never raise an error.

        End the process if its device fails for good, or if its node has no room for an attempt.
        """
        if device.has_failed():
            os._exit(device.EXIT_CODE)
        _end_without_room()
        # This takes effect because the process has imported torch, but not used CUDA yet.
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpu_ids))
        self.attempt = assignment.attempt
        self._progress.assign(assignment.attempt, assignment.rank)
        context = self._context
        output = OutputLog(
            context.store, context.directory, attempt=assignment.attempt, rank=assignment.rank
        )
        self._held.hand_over(output)
        left = threading.Event()
        if assignment.rank == 0:
            # Storage that does not answer must not delay an attempt.
            threading.Thread(target=self._hold, args=(left,), daemon=True).start()
        try:
            with log_of(output):
                outcome = run_attempt(assignment, context)
        except NodeShortError as error:
            # There is no outcome here either: the run continues with workers of other nodes.
            _end(output, f"{error}; so this process ends\n")
        except BaseException as error:  # noqa: BLE001  the edge: a bug of ours is an outcome too
            outcome = Raised(
                attempt=assignment.attempt,
                step=assignment.resume_step,
                error=f"{type(error).__name__}: {error}",
                traceback=traceback.format_exc(),
            )
        finally:
            left.set()
        if isinstance(outcome, Yielded) and self._signal:
            name = signal.Signals(self._signal).name
            outcome = replace(outcome, why=f"process {os.getpid()} got {name}")
        if isinstance(outcome, Raised):
            output.add(outcome.traceback)
        if device.has_failed() and not device.is_of_script(outcome):
            # There is no outcome, because the error is not the script's. The run continues without
            # this worker.
            _end(
                output, f"the GPU failed, so this process ends, and another takes over: {outcome}\n"
            )
        if isinstance(outcome, Completed | Raised | Superseded):
            # This process may be ended next, so its output is written first.
            output.close()
        else:
            # A recovering run does not wait for storage.
            output.close(wait_s=0.0)
        self.attempt = 0
        self._progress.assign(0, -1)
        self._progress.enter(WorkerPhase.IDLE)
        return outcome

    def _hold(self, left: threading.Event) -> None:
        """Hold the run's directory until the attempt is left: it may have no controller."""
        context = self._context
        try:
            # Closing the file of one attempt would release the lock of the next.
            with (
                self._holding,
                held(context.store, context.directory, shared=True, is_named=False),
            ):
                left.wait()
        except (HeldError, StorageError) as error:
            # A script that took over the run has a newer claim, which ends this one.
            log.warning("the lock on the run directory is not held: %s", error)

    def formed(self, attempt: int) -> Formed | None:
        """Return how ``attempt`` was formed; None if it is not formed yet."""
        return self._formed.get(attempt)

    def fence(self, attempt: int) -> None:
        """End ``attempt`` here: its collectives fail at once, and its writes are not committed.

        There is one exception: this worker takes a final snapshot in memory before it reports that
        it has left.
        """
        with self._lock:
            self._fenced.add(attempt)
        collectives.abort(attempt)

    def is_fenced(self, attempt: int) -> bool:
        """Return whether ``attempt`` was fenced."""
        return attempt in self._fenced

    def yield_at_boundary(self, attempt: int, *, durable: bool) -> None:
        """Request that the training thread leaves ``attempt`` at the next boundary.

        All ranks agree on it. With ``durable`` the state must then be in storage; this is final.
        """
        with self._lock:
            if durable:
                # This comes before the request, because a reader of the request must see it.
                self._durably.add(attempt)
            self._yielding.add(attempt)

    def terminate(self, number: int) -> None:
        """End the process for a signal at the next step boundary; outside of attempts, at once."""
        self._signal = number
        if not self.attempt:
            os._exit(self.exit_code)

    @property
    def exit_code(self) -> int:
        """Return the exit code with which the process ends if a signal requested it."""
        return termination.exit_code(self._signal)

    def _leaves(self, attempt: int) -> bool:
        """Return whether to leave ``attempt``: on request, by a signal, or without a lease."""
        if self._signal:
            self.yield_at_boundary(attempt, durable=False)
        if attempt not in self._yielding and has_run_out(self._directory):
            log.warning("no controller has answered for too long: leaving attempt %s", attempt)
            self.yield_at_boundary(attempt, durable=True)
        return attempt in self._yielding

    def keep_pace(self, attempt: int, pace: Pace) -> SaveCosts | None:
        """Set how often ``attempt`` saves; return its costs, or None if it does not run here."""
        self._paces = {attempt: pace}
        costs = self._costs.get(attempt)
        return costs() if costs is not None else None

    def _note_costs(self, attempt: int, costs: Callable[[], SaveCosts]) -> None:
        self._costs = {attempt: costs}

    def _note_formed(self, formed: Formed) -> None:
        self._formed = {formed.attempt: formed}


def _end_without_room() -> None:
    """End this process if it cannot map memory for an attempt."""
    try:
        require_room()
    except OSError as error:
        # The log of the attempt needs a thread.
        words = f"this node has no room for an attempt: {error}; so this process ends\n"
        os.write(2, words.encode())
        os._exit(device.EXIT_CODE)


def _end(output: OutputLog, words: str) -> NoReturn:
    """End this process, with ``words`` at the end of its log."""
    output.add(words)
    output.close()
    os._exit(device.EXIT_CODE)
