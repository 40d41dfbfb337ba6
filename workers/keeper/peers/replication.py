"""A thread that replicates what peers' ranks write, and retries while a peer is unreachable."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

from ucp_core.errors import StorageError
from workers.errors import ArenaError
from workers.keeper.arena_table import be_nice
from workers.keeper.peers.client import WireClient

#: How long a peer may hold back a listing without news.
POLL_S: Final = 1.0
#: Pause before the next try to reach a peer, doubled up to the maximum.
_PAUSE_S_MIN: Final = 0.05
_PAUSE_S_MAX: Final = 2.0
#: Failures are reported only after this long: a connection may break once.
_PROBLEM_S: Final = 1.0


class Replication(ABC):
    """Common part of the mirrors: ``_thread``, which they start when they are complete.

    Args:
        what: What is done for the peers; a problem appends "fails".

    Attributes:
        problems: What is wrong now, a line by subject; "" is the peers themselves. Replaced at each
            change, so that any thread may read it.
    """

    def __init__(self, what: str, clients: Sequence[WireClient], niceness: int = 0) -> None:
        self._niceness = niceness
        self._what = what
        self._clients = tuple(clients)
        self.problems: dict[str, str] = {}
        self._stopping = threading.Event()
        self._num_failures = 0
        self._failing_s = float("inf")
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)

    @abstractmethod
    def _replicate(self) -> None:
        """Replicate over fresh connections until something fails or ``_stopping`` is set."""

    def stop(self) -> None:
        """Stop at once; the copies stay."""
        self._stopping.set()
        for client in self._clients:
            client.abort()
        self._thread.join()

    def _run(self) -> None:
        be_nice(self._niceness)
        while not self._stopping.is_set():
            try:
                self._replicate()
            except (StorageError, ArenaError, OSError) as error:
                if self._stopping.is_set():
                    break
                self._num_failures += 1
                self._failing_s = min(self._failing_s, time.monotonic())
                if time.monotonic() - self._failing_s >= _PROBLEM_S:
                    self._note_problem("", f"{self._what} fails: {error}; trying on")
            self._hang_up()
            pause_s = _PAUSE_S_MIN * 2 ** min(self._num_failures, 16)
            self._stopping.wait(min(pause_s, _PAUSE_S_MAX))
        self._hang_up()

    def _hang_up(self) -> None:
        for client in self._clients:
            client.close()

    def _is_well(self) -> None:
        """Note that the peers answer."""
        self._num_failures, self._failing_s = 0, float("inf")
        self._note_problem("", "")

    def _note_problem(self, subject: str, line: str) -> None:
        """Set the problem of a subject; "" says that it has passed."""
        if self.problems.get(subject, "") != line:
            others = {name: told for name, told in self.problems.items() if name != subject}
            self.problems = {**others, subject: line} if line else others
