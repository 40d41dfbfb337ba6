"""Threads for the calls that block, and tasks: the run's loop itself waits for nothing but events.

Ray, storage and the journal have threads of their own. A store that stalls holds up those that wait
for storage, but not the polling of nodes and reservations, nor a journal on another file system.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar

from orchestrator.shell.clock import monotonic_s

_P = ParamSpec("_P")
_T = TypeVar("_T")

#: Ray's head answers in milliseconds, or this process ends with it.
RAY: Final = ThreadPoolExecutor(8, thread_name_prefix="ray")
#: Reads are asked again every ten seconds, and a write waits for the one before.
STORAGE: Final = ThreadPoolExecutor(4, thread_name_prefix="storage")
#: One: lines keep their order.
JOURNAL: Final = ThreadPoolExecutor(1, thread_name_prefix="journal")

#: The loop looks at itself this often.
_LOOK_S: Final = 0.05


async def in_thread(
    threads: ThreadPoolExecutor, call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
) -> _T:
    """Have one of ``threads`` call ``call``; return what it returns, or raise what it raises."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(threads, partial(call, *args, **kwargs))


class Tasks(set[asyncio.Task[Any]]):
    """The running tasks that no other task awaits: asyncio itself does not keep them alive."""

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run ``coroutine`` in the background."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self.add(task)
        task.add_done_callback(self.discard)
        return task


class LoopWatch:
    """Measures for how long the loop did nothing else than one thing, or did not get to run.

    Attributes:
        longest_pause_s: The longest time that something due had to wait.
    """

    def __init__(self) -> None:
        self.longest_pause_s = 0.0

    async def watch_forever(self) -> None:
        """Measure until cancelled."""
        while True:
            due_s = monotonic_s() + _LOOK_S
            await asyncio.sleep(_LOOK_S)
            self.longest_pause_s = max(self.longest_pause_s, monotonic_s() - due_s)
