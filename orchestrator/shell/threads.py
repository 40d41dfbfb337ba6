"""Threads for blocking calls, and tasks: the run's loop itself waits only for events.

Ray, storage and the journal have separate threads. A store that stalls delays only calls that wait
for storage. It does not delay the polling of nodes and reservations, or a journal on another file
system.
"""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar

from orchestrator.shell.clock import monotonic_s

_P = ParamSpec("_P")
_T = TypeVar("_T")

#: For calls to Ray. Its head answers in milliseconds, or this process ends with it.
RAY: Final = ThreadPoolExecutor(8, thread_name_prefix="ray")
#: For storage: reads are repeated every ten seconds, and a write waits for the previous one.
STORAGE: Final = ThreadPoolExecutor(4, thread_name_prefix="storage")
#: For the journal: one thread, so that lines keep their order.
JOURNAL: Final = ThreadPoolExecutor(1, thread_name_prefix="journal")

#: How often the loop measures itself.
_LOOK_S: Final = 0.05


async def in_thread(
    threads: ThreadPoolExecutor, call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
) -> _T:
    """Run ``call`` in one of ``threads``; return what it returns, or raise what it raises."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(threads, partial(call, *args, **kwargs))


class Tasks(set[asyncio.Task[Any]]):
    """Running tasks that no other task awaits; asyncio itself would not keep them alive."""

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run ``coroutine`` in the background."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self.add(task)
        task.add_done_callback(self.discard)
        return task


class LoopWatch:
    """Measures in ``longest_pause_s`` the longest time that a due callback had to wait."""

    def __init__(self) -> None:
        self.longest_pause_s = 0.0

    async def watch_forever(self) -> None:
        """Measure until cancelled."""
        while True:
            due_s = monotonic_s() + _LOOK_S
            await asyncio.sleep(_LOOK_S)
            self.longest_pause_s = max(self.longest_pause_s, monotonic_s() - due_s)
