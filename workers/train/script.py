"""Find the training function of a script: run the script until it calls ``everstep.run``."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Sequence
from pathlib import Path

from workers.errors import TaskError
from workers.train.session import Session

Task = Callable[[Session], None]

_reading = threading.local()


class _Handed(BaseException):
    """Ends the script at its call of ``run``."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task = task


def load_task(path: str, arguments: Sequence[str] = ()) -> Task:
    """Return the function that the script at ``path`` passes to ``everstep.run``.

    The script runs as ``__main__`` up to that call, once per process, as ``python path arguments``
    would run it: its directory is importable, ``sys.argv`` is its path and ``arguments``. It stays
    the process's ``__main__``, where pickle looks for its classes.

    Raises:
        TaskError: There is no such file, or it exits or ends before it calls ``run``.
    """
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
    _reading.active = True
    before = sys.modules["__main__"]
    sys.modules["__main__"] = module
    task: Task | None = None
    try:
        # The script does not inherit this module's ``from __future__`` imports.
        code = compile(source, str(file), "exec", dont_inherit=True)
        exec(code, module.__dict__)  # noqa: S102  the user's script
    except _Handed as handed:
        task = handed.task
    except SystemExit as left:
        given = " ".join(arguments) or "none"
        raise TaskError(
            f"script: {path} exited with {left.code!r} before it called everstep.run(train); "
            f"its output is in logs/ of the run directory; its arguments (run.arguments): {given}",
            path=path,
        ) from left
    finally:
        _reading.active = False
        if task is None:
            sys.modules["__main__"] = before
    if task is None:
        raise TaskError(
            f"script: {path} ended without calling everstep.run(train); see `pydoc everstep`",
            path=path,
        )
    return task


def hand_over(task: Task) -> None:
    """Pass ``task`` to ``load_task`` if that runs the script; else do nothing."""
    if getattr(_reading, "active", False):
        raise _Handed(task)
