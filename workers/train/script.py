"""Find the training function of a script, and run the code after it.

The script runs until it calls ``everstep.run``, on every worker. If code follows that call, rank 0
runs the script once more when the run is complete, and ``run`` returns at once.
"""

import dis
import inspect
import sys
import threading
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from workers.errors import TaskError
from workers.settings import Settings
from workers.train.finished import FinishedRun
from workers.train.session import Session

Task = Callable[[Session], None]

_reading = threading.local()
#: Instructions at the end of a function when nothing follows a call.
_ENDING: Final = frozenset(
    {"POP_TOP", "LOAD_CONST", "NOP", "STORE_FAST", "STORE_NAME", "JUMP_FORWARD", "CACHE"}
)
_RETURNS: Final = frozenset({"RETURN_VALUE", "RETURN_CONST"})
_OURS: Final = ("workers", "everstep", "orchestrator")


class _Handed(BaseException):
    """End the script at its call of ``run``; ``goes_on`` says whether code follows it.

    ``settings`` returns the settings with which the script would train alone.
    """

    def __init__(self, task: Task, settings: Callable[[], Settings], *, goes_on: bool) -> None:
        super().__init__()
        self.task, self.settings, self.goes_on = task, settings, goes_on


def load_task(path: str, arguments: Sequence[str] = ()) -> tuple[Task, bool]:
    """Return the function that the script at ``path`` passes to ``everstep.run``.

    Also return whether the script has code after that call. The script runs as ``__main__`` up to
    there, once per process, as ``python path arguments`` would run it: its directory is importable,
    ``sys.argv`` is its path and ``arguments``. It stays the process's ``__main__``, where pickle
    looks for its classes.
    """
    handed = _run_to_call(path, arguments)
    return handed.task, handed.goes_on


def script_settings(path: str, arguments: Sequence[str] = ()) -> Settings:
    """Return the settings that the script at ``path`` passes to ``everstep.run``.

    It runs up to there, as for ``load_task``.
    """
    return _run_to_call(path, arguments).settings()


def _run_to_call(path: str, arguments: Sequence[str]) -> _Handed:
    before = sys.modules["__main__"]
    handed: _Handed | None = None
    _reading.active = True
    try:
        _execute(path, arguments)
    except _Handed as found:
        handed = found
    except SystemExit as left:
        given = " ".join(arguments) or "none"
        raise TaskError(
            f"script: {path} exited with {left.code!r} before it called everstep.run(train); "
            f"its output is in logs/ of the run directory; its arguments (run.arguments): {given}",
            path=path,
        ) from left
    finally:
        _reading.active = False
        if handed is None:
            sys.modules["__main__"] = before
    if handed is None:
        raise TaskError(
            f"script: {path} ended without calling everstep.run(train); see `pydoc everstep`",
            path=path,
        )
    return handed


def finish_script(path: str, arguments: Sequence[str], run: FinishedRun) -> None:
    """Run the script of a complete run from its top, with ``everstep.run`` returning at once."""
    _reading.finished = run
    try:
        _execute(path, arguments)
    except SystemExit as left:
        if left.code:
            raise TaskError(
                f"script: {path} exited with {left.code!r} after everstep.run", path=path
            ) from left
    finally:
        _reading.finished = None


def finished_run() -> FinishedRun | None:
    """Return the run whose script runs the code after ``everstep.run``; None if there is none."""
    found: FinishedRun | None = getattr(_reading, "finished", None)
    return found


def runs_alone() -> bool:
    """Return whether no worker runs the script of this process."""
    return not getattr(_reading, "active", False) and finished_run() is None


def hand_over(task: Task, settings: Callable[[], Settings]) -> bool:
    """Pass ``task`` to ``load_task`` if that runs the script; else return whether the run is over.

    In a script that runs alone that is False. ``settings`` then returns its settings.
    """
    if getattr(_reading, "active", False):
        raise _Handed(task, settings, goes_on=_goes_on(inspect.currentframe()))
    return finished_run() is not None


def _execute(path: str, arguments: Sequence[str]) -> None:
    file = Path(path)
    try:
        source = file.read_bytes()
    except OSError as error:
        raise TaskError(f"script: {path} cannot be read: {error}", path=path) from error
    module = types.ModuleType("__main__")
    module.__dict__["__file__"] = str(file)
    directory = str(file.resolve().parent)
    if directory not in sys.path:
        sys.path.insert(0, directory)
    # These were the arguments of the worker process.
    sys.argv[:] = [str(file), *arguments]
    sys.modules["__main__"] = module
    # The script does not inherit this module's ``from __future__`` imports.
    code = compile(source, str(file), "exec", dont_inherit=True)
    exec(code, module.__dict__)  # noqa: S102  the user's script


def _goes_on(frame: types.FrameType | None) -> bool:
    """Return whether a function of the script has code after its current call."""
    while frame is not None and frame.f_code is not _execute.__code__:
        is_ours = frame.f_globals.get("__name__", "").partition(".")[0] in _OURS
        if not is_ours and _has_more(frame):
            return True
        frame = frame.f_back
    return False


def _has_more(frame: types.FrameType) -> bool:
    for one in dis.get_instructions(frame.f_code):
        if one.offset > frame.f_lasti:
            if one.opname in _RETURNS:
                return False
            if one.opname not in _ENDING:
                return True
    return False
