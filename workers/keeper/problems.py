"""What protects less than was asked for, in words: it is reported, and training goes on."""

from __future__ import annotations

import threading
import time
from typing import Final

__all__ = ["Problems"]

#: How long a problem is reported that nobody says the end of.
_TOLD_S: Final = 60.0
#: A line is for people; a thousand of them are for nobody.
_NUM_MAX: Final = 32


class Problems:
    """The problems of one keeper by subject. Safe to call from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: dict[str, str] = {}
        self._told: dict[str, float] = {}

    def note(self, subject: str, line: str) -> None:
        """Take note of how a subject is; "" if it is in no problem any more."""
        with self._lock:
            self._lines.pop(subject, None)
            if line:
                self._lines[subject] = line

    def tell(self, line: str) -> None:
        """Take note of something that happened; it is forgotten after a while."""
        with self._lock:
            self._told[line] = time.monotonic()

    def lines(self) -> tuple[str, ...]:
        """Return what there is, the newest first where it is too much."""
        with self._lock:
            now_s = time.monotonic()
            self._told = {k: at_s for k, at_s in self._told.items() if now_s - at_s < _TOLD_S}
            lines = dict.fromkeys([*self._lines.values(), *self._told])
        return tuple(reversed(lines))[:_NUM_MAX]
