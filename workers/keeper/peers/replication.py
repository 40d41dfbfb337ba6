"""A thread that replicates versions of peers' ranks, and retries peers that are not reached."""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Final

from ucp_core.errors import StorageError
from workers.errors import ArenaError
from workers.keeper.peers.client import WireClient
from workers.niceness import be_nice
from workers.protocol import Held

#: How long a peer may hold back a listing without news.
POLL_S: Final = 1.0
#: Pause before the next try to reach a peer; it doubles up to the maximum.
_PAUSE_S_MIN: Final = 0.05
_PAUSE_S_MAX: Final = 2.0
#: Failures are reported only after this long, because a connection may break once.
_PROBLEM_S: Final = 1.0


class Replication(ABC):
    """Common part of the mirrors, which start its ``_thread`` when they are complete.

    Args:
        what: Says what the thread does for the peers; a problem appends "fails".
        clients: The peers, by their place.

    Attributes:
        problems: The present problems, one line by subject; "" is the peers themselves. Each change
            replaces the mapping, so that any thread may read it.
    """

    def __init__(self, what: str, clients: Mapping[int, WireClient], niceness: int = 0) -> None:
        self._niceness = niceness
        self._what = what
        self._clients = clients
        #: Versions that peers know to be protected, by place and arena, and the number of
        #: connections at that time.
        self._told: dict[tuple[int, str], Held] = {}
        self._told_over = dict.fromkeys(clients, 0)
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
        for client in self._clients.values():
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
                    self._note_problem("", f"{self._what} fails: {error}; trying again")
            self._hang_up()
            pause_s = _PAUSE_S_MIN * 2 ** min(self._num_failures, 16)
            self._stopping.wait(min(pause_s, _PAUSE_S_MAX))
        self._hang_up()

    def _hang_up(self) -> None:
        for client in self._clients.values():
            client.close()

    def _news_for(self, place: int, safe: Mapping[str, Held]) -> dict[str, Held]:
        """Return the protected versions that a peer does not know of yet, by arena.

        After a new connection, which continuing a read may have made, the peer needs all of them
        again.
        """
        if self._told_over[place] != self._clients[place].num_connections:
            self._told_over[place] = self._clients[place].num_connections
            self._told = {key: held for key, held in self._told.items() if key[0] != place}
        news = {name: held for name, held in safe.items() if self._told.get((place, name)) != held}
        self._told |= {(place, name): held for name, held in news.items()}
        return news

    def _is_well(self) -> None:
        self._num_failures, self._failing_s = 0, float("inf")
        self._note_problem("", "")

    def _note_problem(self, subject: str, line: str) -> None:
        if self.problems.get(subject, "") != line:
            others = {name: told for name, told in self.problems.items() if name != subject}
            self.problems = {**others, subject: line} if line else others
