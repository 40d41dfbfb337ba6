"""Whether peers copy an arena, and how far they are: its rank waits for them with a snapshot."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection, Hashable
from typing import Final

from workers.keeper.slots import NodeSlots
from workers.protocol import Held

__all__ = ["PeerLiveness"]

#: How often it is said that peers are still there, at most: far below what that is good for.
_RENEW_S: Final = 0.2


class PeerLiveness:
    """Tells the ranks which arenas are followed, and what all who follow have got.

    Safe to call from several threads. A follower is whatever tells one from another.

    Args:
        slots: The arenas.
    """

    def __init__(self, slots: NodeSlots) -> None:
        self._slots = slots
        self._lock = threading.Lock()
        #: Of every follower, by arena, what it said to have got last.
        self._got: dict[Hashable, dict[str, Held | None]] = {}
        self._renewed_s = 0.0

    def follows(self, follower: Hashable) -> bool:
        """Return whether it follows anything."""
        return follower in self._got

    def follow(self, follower: Hashable, names: Collection[str]) -> None:
        """Have it follow these from now on and no others; () once it is gone."""
        if self._got.get(follower, {}).keys() == set(names):
            self.renew()
            return
        with self._lock:
            before = self._got.pop(follower, {})
            if names:
                self._got[follower] = {name: before.get(name) for name in names}
            for name in before.keys() | set(names):
                self._tell(name)

    def renew(self) -> None:
        """Say that whoever follows still does; to be called whenever one gives a sign."""
        now_s = time.monotonic()
        if not self._got or now_s - self._renewed_s < _RENEW_S:
            return
        with self._lock:
            self._renewed_s = now_s
            for name in {name for names in self._got.values() for name in names}:
                self._tell(name)

    def note_got(self, follower: Hashable, name: str, held: Held) -> None:
        """Take note of what a follower has, or need not have.

        One that says so over a new connection, because the one that it followed by is gone, says
        it once, and before it has asked for a listing there: it follows from now on.
        """
        with self._lock:
            self._got.setdefault(follower, {})[name] = held
            self._tell(name)

    def _tell(self, name: str) -> None:
        arena = self._slots.arena(name)
        if arena is None:
            return
        got = [names[name] for names in self._got.values() if name in names]
        # The arena may be let go of meanwhile.
        with contextlib.suppress(ValueError):
            arena.set_followed(bool(got))
            newest = arena.newest()
            if newest is not None and got and all(each == newest for each in got):
                arena.note_copied(newest)
