"""One attempt of one worker, from forming its groups to leaving them.

``run_attempt`` always returns an outcome, and leaves nothing of the attempt in the process: no
group, no model, no thread. A collective's exception passes through the training script's own loop,
so the script also releases its objects.
"""

import errno
import functools
import logging
import mmap
import traceback
from types import TracebackType
from typing import Final

import torch
import torch.distributed as dist

from ucp_core.errors import SupersededError, UcpError
from workers import collectives
from workers.errors import (
    CorruptError,
    DivergedError,
    LayoutRefusedError,
    NodeShortError,
    NotFiniteError,
    WorkerError,
)
from workers.memory import HandOver, SnapshotMemory
from workers.parallel import build_mesh
from workers.protocol import (
    DEVICE_MEMORY,
    Assignment,
    Completed,
    Fenced,
    Outcome,
    PeerLost,
    Raised,
    Superseded,
    Unloadable,
    WorkerPhase,
    Yielded,
)
from workers.settings import Settings
from workers.state import HostBuffer
from workers.train.behind import run_behind
from workers.train.boundary import YieldSignal
from workers.train.context import WorkerContext
from workers.train.executor import use_deterministic_kernels
from workers.train.lm import train_language_model
from workers.train.loading import UnloadableSignal
from workers.train.script import Task, load_task
from workers.train.session import Session

__all__ = ["WorkerContext", "run_attempt", "task_of"]

log = logging.getLogger(__name__)

#: How long an attempt waits for memory of the previous one, if that ran out of it.
_LEFTOVERS_S: Final = 5.0

#: Memory that a process must be able to map for an attempt.
_ROOM_BYTES: Final = 64 << 20
#: Resources that a node can run out of: memory, space in shared memory, descriptors.
_SHORT: Final = frozenset({errno.ENOMEM, errno.ENOSPC, errno.EMFILE, errno.ENFILE})


class _Process:
    """Memory that the process keeps from attempt to attempt."""

    buffer = HostBuffer()
    memory: SnapshotMemory | None = None
    hand_over: HandOver | None = None
    is_short = False


def require_room() -> None:
    """Raise ``OSError`` if this process cannot map memory for an attempt.

    Without memory a new thread ends before it runs, and ``Thread.start`` waits for it forever
    (python/cpython, issue 140746). So call this before any thread of an attempt starts.
    """
    mmap.mmap(-1, _ROOM_BYTES).close()


def run_attempt(
    assignment: Assignment, context: WorkerContext, task: Task | None = None
) -> Outcome:
    """Train in ``assignment`` until this worker leaves it; return how it left.

    Always call this in the same thread, because DTensor keeps a cache per thread, which must be
    cleared afterwards. By default the task is that of the settings' script, or the built-in one.
    """
    context.progress.enter(WorkerPhase.FORMING)
    is_of_script = task is None and bool(context.settings.run.script)
    if _Process.hand_over is not None:
        _Process.hand_over.end()
        _Process.hand_over = None
    if _Process.is_short:
        # Connections of the last attempt may hold memory that this one needs.
        collectives.wait_for_leftovers(_LEFTOVERS_S)
        _free_device_memory()
    try:
        outcome = _RunningAttempt(assignment, context).run(task)
        _Process.is_short = isinstance(outcome, Raised) and outcome.refuses == DEVICE_MEMORY
    finally:
        context.progress.enter(WorkerPhase.LEAVING)
        collectives.leave()
        _free_device_memory()
    if is_of_script and isinstance(outcome, Completed):
        return _run_behind(outcome, assignment, context)
    return outcome


def _run_behind(completed: Completed, assignment: Assignment, context: WorkerContext) -> Outcome:
    """Run the code that the script has after its call of ``run``, if any."""
    run = context.settings.run
    if not _load_once(run.script, run.arguments)[1]:
        return completed
    if assignment.rank == 0:
        # The script creates its earlier objects again.
        _load_once.cache_clear()
    try:
        return run_behind(completed, assignment, context)
    except Exception as error:  # noqa: BLE001  the user's code: an outcome, as in a step
        return Raised(
            attempt=assignment.attempt,
            step=completed.step + 1,
            error=f"{type(error).__name__}: {error}",
            traceback=_user_traceback(error),
        )


class _RunningAttempt:
    """Hold the session, to close it whatever happens."""

    def __init__(self, assignment: Assignment, context: WorkerContext) -> None:
        self._assignment = assignment
        self._context = context
        self._session: Session | None = None

    def run(self, task: Task | None) -> Outcome:
        attempt = self._assignment.attempt
        try:
            return self._train(task)
        except YieldSignal as signal:
            return Yielded(attempt=attempt, step=signal.step)
        except UnloadableSignal as signal:
            step = self._assignment.resume_step
            return Unloadable(attempt=attempt, step=step, found=signal.found)
        except KeyboardInterrupt:
            # Ctrl-C of a script that runs alone; a worker's training thread gets none.
            raise
        except BaseException as error:  # noqa: BLE001  the edge: it becomes an outcome
            outcome = self._outcome_of(error)
            self._take_final()
            return outcome
        finally:
            self._close()

    def _train(self, task: Task | None) -> Outcome:
        assignment, context = self._assignment, self._context
        require_room()
        task = task or task_of(context.settings)
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
        if device_type == "cuda":
            _prepare_device(context)
        collectives.form(
            backend="nccl" if device_type == "cuda" else "gloo",
            store_host=assignment.store_host,
            store_port=assignment.store_port,
            attempt=assignment.attempt,
            rank=assignment.rank,
            world_size=assignment.layout.world_size,
            ring_path=context.ring_path,
            timeout_s=context.settings.parallel.forming_timeout_s,
        )
        axes = assignment.layout.coordinates(assignment.rank)
        data_rank = assignment.layout.data_rank(assignment.rank)
        collectives.locate((data_rank, axes["pp"], axes["tp"]), context.node)
        collectives.places().tell = context.progress.waits_at
        mesh = build_mesh(
            assignment.layout,
            device_type=device_type,
            attempt=assignment.attempt,
            rank=assignment.rank,
        )
        for group in mesh.exchanging(deterministic=context.settings.train.deterministic):
            collectives.connect_pairs(group)
        collectives.set_timeout(context.settings.parallel.patient_timeout_s)
        self._session = Session(assignment, context, mesh, _Process.buffer, _memory(context))
        task(self._session)
        self._session.finish()
        return Completed(
            attempt=assignment.attempt, step=self._session.step, ended=self._session.ended
        )

    def _outcome_of(self, error: BaseException) -> Outcome:
        attempt = self._assignment.attempt
        step = self._session.step if self._session is not None else self._assignment.resume_step
        described = f"{type(error).__name__}: {error}"
        if self._context.fenced(attempt):
            log.info("left_fenced", extra={"attempt": attempt, "step": step, "error": described})
            return Fenced(attempt=attempt, step=step)
        kinds = collectives.GroupError | dist.DistError
        if any(isinstance(cause, kinds) for cause in collectives.causes(error)):
            unreached = collectives.unreached(error)
            return PeerLost(attempt=attempt, step=step, detail=described, unreached=unreached)
        if isinstance(error, SupersededError):
            return Superseded(attempt=attempt, step=step, why=str(error))
        if self._session is None and getattr(error, "errno", None) in _SHORT:
            raise NodeShortError(f"this node has no room for an attempt: {error}") from error
        if isinstance(error, DivergedError):
            # A step whose copies or results differ does not count as completed.
            step = error.facts["step"] - 1
        return Raised(
            attempt=attempt,
            step=step + 1,
            error=described,
            traceback=_user_traceback(error),
            refuses=_refuses(error),
            ranks=tuple(error.facts["ranks"])
            if isinstance(error, NotFiniteError | DivergedError)
            else (),
            sound_step=error.facts["sound_step"] if isinstance(error, CorruptError) else -1,
        )

    def _take_final(self) -> None:
        """Take a final snapshot: no step is lost if all ranks do."""
        if self._session is not None:
            if self._session.device.type == "cuda":
                # A device that waits for peers would block the copy.
                try:
                    collectives.abort(self._assignment.attempt)
                except Exception as error:  # noqa: BLE001  a device that failed, for one
                    log.warning("the collectives of the attempt could not be aborted: %s", error)
            self._session.take_final()

    def _close(self) -> None:
        session, self._session = self._session, None
        if session is not None and not session.close():
            # A write still reads these buffers and cannot be interrupted: leave them to it.
            _Process.buffer = HostBuffer()
            if _Process.memory is not None:
                _Process.memory = _Process.memory.successor()
        # Next the controller requests the keepers' versions. A restarted keeper must have this
        # memory by then, and a restarting one is worth the wait.
        if _Process.memory is not None and not _Process.memory.tell():
            _Process.hand_over = HandOver(_Process.memory)


def _prepare_device(context: WorkerContext) -> None:
    """Set this process's limits on its GPU, before it uses it."""
    share = context.settings.gpu_share
    if share < 1:
        # A rank that needs more than its part fails, but no other rank does.
        torch.cuda.set_per_process_memory_fraction(share)
        collectives.share_device(context.worker, share)
    if context.settings.train.deterministic:
        use_deterministic_kernels()


def _free_device_memory() -> None:
    """Return memory of the attempt to the device: the next one has tensors of other sizes."""
    if torch.cuda.is_initialized():
        try:
            torch.cuda.empty_cache()
            if not _Process.is_short:
                # A peak that reached the end of memory counts in the next attempt too.
                torch.cuda.reset_peak_memory_stats()
        except RuntimeError as error:
            # A device that failed; ``workers.process`` handles it.
            log.warning("device memory of the attempt is not freed: %s", error)


def _memory(context: WorkerContext) -> SnapshotMemory | None:
    """Return this process's memory at the keeper of its node."""
    if context.keeper_directory is None:
        return None
    if _Process.memory is None:
        _Process.memory = SnapshotMemory(context.keeper_directory, context.worker)
    return _Process.memory


_load_once = functools.lru_cache(maxsize=1)(load_task)


def task_of(settings: Settings) -> Task:
    """Return the task to train; a script runs up to its call of ``run``, once per process."""
    if settings.run.script:
        return _load_once(settings.run.script, settings.run.arguments)[0]
    return train_language_model


def _refuses(error: BaseException) -> str:
    """Return why the layout cannot train, in the form of ``Raised``.

    "" if the layout is not the cause.
    """
    for cause in collectives.causes(error):
        if isinstance(cause, LayoutRefusedError):
            return str(cause.facts["axis"])
        if isinstance(cause, torch.OutOfMemoryError):
            return DEVICE_MEMORY
    return ""


def _user_traceback(error: BaseException) -> str:
    """Return the traceback from the user's first frame on.

    Our own errors need no frames of ours: return the message, or the user's code that caused it.
    """
    first, cause = _user_frame(error), error.__cause__
    if first is None and isinstance(error, WorkerError | UcpError):
        if cause is not None and _user_frame(cause) is not None:
            return _user_traceback(cause)
        return "".join(traceback.format_exception_only(error))
    return "".join(traceback.format_exception(type(error), error, first or error.__traceback__))


def _user_frame(error: BaseException) -> TracebackType | None:
    frame = error.__traceback__
    while frame is not None and not collectives.is_of_script(frame.tb_frame):
        frame = frame.tb_next
    return frame
