"""Wait so that an abort can interrupt; run calls that cannot be interrupted in threads."""

import queue
import threading
from collections.abc import Callable
from typing import Final

#: How long an idle helper thread waits before it ends.
_IDLE_S_MAX: Final = 2.0


class Waiter:
    """An event that is set when its work is done or its attempt is aborted."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.finished = False

    def set(self) -> None:
        """Wake the waiting thread because the work is done."""
        self.finished = True
        self._event.set()

    def wake(self) -> None:
        """Wake the waiting thread because the attempt was aborted."""
        self._event.set()

    def wait(self, timeout_s: float | None) -> bool:
        """Block until woken; return False if ``timeout_s`` passed."""
        return self._event.wait(timeout_s)


class Helpers:
    """Daemon threads for calls that block in C++ and cannot be interrupted.

    An idle thread ends after a while, so that later attempts find no old threads.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_idle = 0

    def submit(self, task: Callable[[], None]) -> None:
        """Run ``task``, which must not raise, in a thread at once."""
        with self._lock:
            if self._num_idle > 0:
                self._num_idle -= 1
            else:
                threading.Thread(target=self._run, daemon=True, name="collectives").start()
            self._queue.put(task)

    def _run(self) -> None:
        while True:
            try:
                task = self._queue.get(timeout=_IDLE_S_MAX)
            except queue.Empty:
                with self._lock:
                    if not self._queue.empty():
                        continue
                    self._num_idle -= 1
                    return
            task()
            del task
            with self._lock:
                self._num_idle += 1


helpers = Helpers()
