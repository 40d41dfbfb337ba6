"""Training: sessions, steps, attempts, and scripts that run alone or in a worker."""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
    from workers.train.context import WorkerContext
    from workers.train.executor import Step, all_agree
    from workers.train.finished import FinishedRun, fill, registered_state
    from workers.train.loading import Needed, Start, Target, load_initial, refuse_uncounted
    from workers.train.loop import require_room, run_attempt, task_of
    from workers.train.script import Task, finished_run, runs_alone
    from workers.train.session import Session
    from workers.train.standalone import attempt_alone, run


__getattr__ = lazy_door(__name__)
