"""Whether a peer copies an arena, and how far it is: the ranks wait for it with a snapshot."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Collection

from workers.keeper.shelf import Shelf
from workers.protocol import Held

__all__ = ["Attendance"]


class Attendance:
    """Tells the ranks which arenas some connection follows, and what was copied last.

    Args:
        shelf: The arenas.
    """

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._lock = threading.Lock()
        self._num_following: Counter[str] = Counter()

    def change(self, mine: set[str], names: Collection[str]) -> None:
        """Follow ``names`` from now on, by a connection that followed ``mine``, or still do.

        It is to be called again all the time: an arena may be handed to this keeper anew.
        """
        if not mine and not names:
            return
        with self._lock:
            self._num_following.update(set(names) - mine)
            self._num_following.subtract(mine - set(names))
            for name in mine | set(names):
                self._tell(name)
        mine.intersection_update(names)
        mine.update(names)

    def _tell(self, name: str) -> None:
        is_followed = self._num_following[name] > 0
        if not is_followed:
            del self._num_following[name]
        arena = self._shelf.arena(name)
        if arena is not None:
            # It may have been let go of meanwhile.
            with contextlib.suppress(ValueError):
                arena.attend(is_followed)

    def note_copied(self, name: str, held: Held) -> None:
        """Note it if it is the newest: of two that follow, the slower must not take that back."""
        with self._lock:
            arena = self._shelf.arena(name)
            if arena is not None and arena.versions()[-1:] == [held]:
                arena.note_copied(held)
