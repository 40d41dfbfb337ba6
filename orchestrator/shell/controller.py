"""The controller: one detached, restartable actor per run, around the pure machine.

Its loop takes an event, journals it, folds it and performs the actions. A restarted controller
folds the journal again and finds the living workers, which continue to train in the meantime.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Any, NoReturn

import ray

from ucp_core.errors import StorageError
from workers.launchers import crash_by_sigterm, ignore_schedulers

if TYPE_CHECKING:
    from workers.protocol import NodeReport

log = logging.getLogger(__name__)

OPTIONS = {
    "num_cpus": 0,
    "max_restarts": -1,
    "max_task_retries": -1,
    "max_concurrency": 64,
    # Each report is a call, and Ray's task events would double its cost.
    "enable_task_events": False,
}

#: A controller that cannot continue ends after this pause. Each start costs a second of a core, and
#: while a disk is full there are many starts.
GIVE_WAY_S = 2.0


class Controller:
    """Ray's handle on a run.

    The run has an event loop in a thread that starts with the process, so after a restart it needs
    no call.

    Args:
        config: The resolved ``RunConfig`` as JSON.
        claim: Number of the claim that starts or resumes the run under ``config``. Ray gives the
            same arguments to every later incarnation.
        token: Token of this claim; no other claim has it.
    """

    def __init__(self, *, run_id: str, config: dict[str, Any], claim: int, token: str) -> None:
        ignore_schedulers()
        crash_by_sigterm()
        with contextlib.suppress(PermissionError):
            # Ray's workers run at niceness 15; decisions must not queue behind training.
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        # Import these only now: at that niceness half a second of imports took two seconds beside
        # busy trainers.
        from orchestrator.shell.loop import Run

        self._loop = asyncio.new_event_loop()
        self._self = ray.get_runtime_context().current_actor
        try:
            self._run = Run(
                run_id=run_id, config=config, claim=claim, token=token, controller=self._self
            )
        except StorageError as error:
            # Ray does not restart an actor whose constructor raised, so the run would be lost.
            if ray.get_runtime_context().was_current_actor_reconstructed:
                _give_way("the controller ends because it cannot start", error)
            raise
        collect_seldom()
        threading.Thread(target=self._serve, name="run", daemon=True).start()

    # Even an empty answer would take a tenth of the call's time, and no caller waits for it.
    @ray.method(num_returns=0)
    def observe(self, report: NodeReport) -> None:
        """Take a keeper's report."""
        self._loop.call_soon_threadsafe(self._run.on_report, report)

    def status(self) -> dict[str, Any]:
        """Return what ``everstep status --json`` prints."""
        return asyncio.run_coroutine_threadsafe(self._run.status(), self._loop).result()

    def share(self) -> dict[str, Any]:
        """Return what the run reports to the others on the cluster, as plain values."""
        return asyncio.run_coroutine_threadsafe(self._run.share(), self._loop).result()

    def note_fault(self, fault: str, target: str, token: str) -> None:
        """Journal that a fault is being injected now. Raises ``TokenError``."""
        self._run.require_token(token)
        self._loop.call_soon_threadsafe(self._run.note_fault, fault, target)

    def stop(self, reason: str, token: str) -> None:
        """Stop the run at the next step boundary. Raises ``TokenError``."""
        self._run.require_token(token)
        self._loop.call_soon_threadsafe(self._run.request_stop, reason)

    def pid(self) -> int:
        """Return this process's id."""
        return os.getpid()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._run.serve())
        except Exception as error:  # noqa: BLE001  any error that ended the loop
            # For example, the journal cannot be written. Without its loop the process would look
            # like a live controller for ever, so end it; Ray starts the next one.
            _give_way("the controller ends because its loop failed", error)
        ray.kill(self._self, no_restart=True)


def collect_seldom() -> None:
    """Make garbage collection rare, and exclude what exists by now.

    Reports and decisions leave no cycles, so reference counts free them. With Python's thresholds,
    collections took a third of the time that the reports of 80,000 ranks cost. A collection of
    240,000 new objects stopped the loop for 85 ms.
    """
    gc.freeze()
    gc.set_threshold(20_000, 200, 50)


def _give_way(what: str, error: Exception) -> NoReturn:
    """End this process so that Ray starts the next controller."""
    log.critical(what, exc_info=error)
    time.sleep(GIVE_WAY_S)
    os._exit(1)
