"""Find the training function of a script: run the script until it calls ``everstep.run``."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Sequence
from pathlib import Path

from workers.errors import TaskError
from workers.train.session import Session

__all__ = ["Task", "hand_over", "load_task"]

Task = Callable[[Session], None]

_reading = threading.local()


class _Handed(BaseException):
    """Ends the script at its call of ``run``; what follows there is not for every attempt."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task = task


def load_task(path: str, arguments: Sequence[str] = ()) -> Task:
    """Return the function that the script at ``path`` gives to ``everstep.run``.

    The script runs as ``__main__`` up to that call, once per process; its directory becomes
    importable and ``sys.argv`` is its path and ``arguments``, as with ``python path arguments``.

    Raises:
        TaskError: There is no such file, or it never calls ``run``, or it exits before.
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
    # What is there are the arguments of the process around it, which no script knows.
    sys.argv[:] = [str(file), *arguments]
    _reading.active = True
    try:
        # As Python would run it: what this module imports from the future is not the script's.
        code = compile(source, str(file), "exec", dont_inherit=True)
        exec(code, module.__dict__)  # noqa: S102  the user's script
    except _Handed as handed:
        return handed.task
    except SystemExit as left:
        given = " ".join(arguments) or "none"
        raise TaskError(
            f"script: {path} exited with {left.code!r} before it called everstep.run(train); "
            f"what it printed is in the worker's log; its arguments (run.arguments): {given}",
            path=path,
        ) from left
    finally:
        _reading.active = False
    raise TaskError(
        f"script: {path} ended without calling everstep.run(train); see `pydoc everstep`",
        path=path,
    )


def hand_over(task: Task) -> None:
    """Give ``task`` to ``load_task`` if that is what runs the script; else do nothing."""
    if getattr(_reading, "active", False):
        raise _Handed(task)
