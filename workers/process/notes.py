"""What the training notes for the record while an attempt goes on; a caller waits for it."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import Any

from workers.protocol import Noted

__all__ = ["Notes"]


class Notes:
    """Notes of attempts; the training thread adds them, coroutines of one loop wait for them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._attempt = 0
        self._notes: tuple[Noted, ...] = ()
        #: Done with the next note.
        self._news: Future[None] = Future()

    def add(self, note: Noted) -> None:
        """Add a note; those of earlier attempts are forgotten."""
        with self._lock:
            kept = self._notes if note.attempt == self._attempt else ()
            self._attempt, self._notes = note.attempt, (*kept, note)
            news, self._news = self._news, Future()
        news.set_result(None)

    async def after(self, attempt: int, num_heard: int, *, left: Future[Any]) -> tuple[Noted, ...]:
        """Return the notes of ``attempt`` but the first ``num_heard``, once there are some.

        () once ``left`` is done and there are none.
        """
        while True:
            with self._lock:
                news = self._news
                notes = self._notes[num_heard:] if attempt == self._attempt else ()
            if notes or left.done():
                return notes
            waits = [asyncio.wrap_future(news), asyncio.wrap_future(left)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
