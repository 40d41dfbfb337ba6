"""Run a script's code after ``everstep.run`` on rank 0, once all ranks have left the attempt.

The others wait, so that the attempt lasts as long as that code. The file ``BEHIND`` in the run
directory records its end.
"""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from ucp_core.errors import StorageError
from ucp_core.storage import join
from workers.protocol import BEHIND, Assignment, Completed, Fenced
from workers.telemetry import ProgressRecord
from workers.train.context import WorkerContext
from workers.train.finished import FinishedRun
from workers.train.script import finish_script

#: Shortest and longest pause between two checks for the end of rank 0.
_LOOK_S: Final = 0.1
_LOOK_S_MAX: Final = 2.0


def run_behind(
    completed: Completed, assignment: Assignment, context: WorkerContext
) -> Completed | Fenced:
    """Wait until rank 0 has run the code; raise the code's exception."""
    run = context.settings.run
    path = join(context.directory, BEHIND)
    mark = json.dumps({"attempt": assignment.attempt, "step": completed.step}).encode()
    if assignment.rank == 0:
        there = FinishedRun(context.store, context.directory, assignment.lineage)
        with _progressing(context.progress):
            finish_script(run.script, run.arguments, there)
        context.store.write_atomic(path, mark, fsync=False)
        return completed
    pause_s = _LOOK_S
    while True:
        # The file does not exist yet, or storage is unavailable; then rank 0 waits for storage,
        # too.
        with suppress(StorageError):
            if context.store.read(path) == mark:
                return completed
        if context.fenced(assignment.attempt):
            return Fenced(attempt=assignment.attempt, step=completed.step)
        context.progress.moved(1)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LOOK_S_MAX)


@contextmanager
def _progressing(progress: ProgressRecord) -> Iterator[None]:
    """Report that the worker still makes progress: such code may take any time."""
    ends = threading.Event()

    def show() -> None:
        while not ends.wait(_LOOK_S):
            progress.moved(1)

    thread = threading.Thread(target=show, name="behind", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()
