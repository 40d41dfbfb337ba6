"""Notes of the training thread, heard by a coroutine."""

import asyncio
import threading
from concurrent.futures import Future

from workers.process.runner import Notes
from workers.protocol import Noted


def note(step: int, attempt: int = 1) -> Noted:
    return Noted(attempt=attempt, step=step, text=f"step {step}")


def test_each_note_is_heard_once_and_the_last_ones_before_the_end() -> None:
    """The run may be over with the word that the worker has left."""

    async def hear() -> list[int]:
        notes, left = Notes(), Future[None]()
        notes.add(note(9, attempt=0))
        heard: list[int] = []

        def train() -> None:
            for step in (1, 2, 3):
                notes.add(note(step))
            left.set_result(None)

        thread = threading.Thread(target=train)
        thread.start()
        while new := await notes.after(1, len(heard), left=left):
            heard += [one.step for one in new]
        thread.join()
        return heard

    assert asyncio.run(hear()) == [1, 2, 3]


def test_the_end_of_an_attempt_without_notes_ends_the_wait() -> None:
    """The controller asks every first rank."""

    async def hear() -> tuple[Noted, ...]:
        left: Future[None] = Future()
        waiting = asyncio.ensure_future(Notes().after(1, 0, left=left))
        await asyncio.sleep(0)
        left.set_result(None)
        return await waiting

    assert asyncio.run(hear()) == ()
