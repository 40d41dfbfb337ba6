"""Let the main thread of an actor rest while nobody is in a hurry.

Ray has the main thread of every actor wake 100 times a second to look for signals: in a keeper
that is three quarters of all it costs. The thread runs Python only to handle signals, so that is
where it rests. Meanwhile calls of the actor's methods wait, no longer than a slice each.
"""

from __future__ import annotations

import _thread
import signal
import threading
from typing import Any, Final

__all__ = ["SLICE_S", "Rest"]

#: How long a call waits at most. Between two slices Ray looks once for signals and for calls.
SLICE_S: Final = 0.2
#: From a slice's end to the signal that begins the next one: Ray gets its turn before.
_PAUSE_S: Final = 0.001


class Rest:
    """The rest of this process's main thread: there can be one, and SIGALRM is its own.

    To be made on the main thread; elsewhere nobody may handle signals, and it does nothing.
    """

    def __init__(self) -> None:
        self._over = threading.Event()
        self._over.set()
        self._may_begin = threading.current_thread() is threading.main_thread()
        if self._may_begin:
            signal.signal(signal.SIGALRM, self._take_slice)

    def begin(self) -> None:
        """Have the main thread rest from now on. By one thread, as ``end``; again is once."""
        if self._may_begin and self._over.is_set():
            self._over.clear()
            _thread.interrupt_main(signal.SIGALRM)

    def end(self) -> None:
        """Have it answer calls at once again."""
        self._over.set()

    def _take_slice(self, *_: Any) -> None:
        if not self._over.wait(SLICE_S):
            signal.setitimer(signal.ITIMER_REAL, _PAUSE_S)
