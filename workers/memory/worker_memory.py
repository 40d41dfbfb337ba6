"""A worker process's memory at the keeper of its node."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from workers.errors import ArenaError
from workers.memory.arena import Arena
from workers.memory.cuda import register, unregister
from workers.memory.descriptors import Lease, descriptor_socket, leave_arena, notify, reserve

__all__ = ["HandOver", "SnapshotMemory"]

#: A keeper is back in about a second, in 12 where many are started at once; recovery waits for it.
_HAND_OVER_S_MAX: Final = 30.0
_AGAIN_S: Final = 0.05


class SnapshotMemory:
    """A worker process's memory at its keeper; kept from attempt to attempt.

    Args:
        directory: Where the keeper of this node works.
        worker: Worker id, or what a name for memory beside makes of it.

    Attributes:
        directory: The same.
        worker: The same.
    """

    def __init__(self, directory: Path, worker: str) -> None:
        self._socket = descriptor_socket(directory)
        self.directory = directory
        self.worker = worker
        self._generation = 0
        self._arena: Arena | None = None
        self._lease = Lease(self._socket)
        self._is_registered = False
        self._beside: dict[str, SnapshotMemory] = {}

    @property
    def name(self) -> str:
        """Return the name under which the keeper has the arena."""
        return f"{self.worker}.{self._generation}"

    def beside(self, names: Sequence[str]) -> list[SnapshotMemory]:
        """Return other memory, for what this worker saves for other ranks.

        What there was of it under other names is written no more: the keeper has it for as long
        as its versions may be needed.

        Args:
            names: Whose each is, as ``workers.memory.retention`` names it.
        """
        for name, memory in self._beside.items():
            if name not in names:
                memory.give_up()
        for name in names:
            if name not in self._beside:
                self._beside[name] = SnapshotMemory(self.directory, name)
        return [self._beside[name] for name in names]

    def ensure(self, body_bytes: int, *, attempt: int, for_cuda: bool) -> Arena:
        """Return an arena whose slots hold ``body_bytes``; what it holds already stays in it.

        A larger one than before is a new one: the keeper has the old one for as long as its
        versions may be needed.

        Raises:
            ArenaError: The keeper refuses, or is not there.
        """
        if self._arena is None or self._arena.body_bytes < body_bytes:
            self.leave()
            self._generation += 1
            self._arena = reserve(self._socket, self.name, body_bytes=body_bytes, attempt=attempt)
        if for_cuda and not self._is_registered:
            register(self._arena)
            self._is_registered = True
        return self._arena

    def tell(self) -> bool:
        """Let the keeper know of a finished slot; one that was restarted gets the memory back.

        Returns:
            Whether there is memory, and a keeper.
        """
        for memory in list(self._beside.values()):
            memory.tell()
        if self._arena is None:
            return False
        is_told = self._lease.ensure(self.name, self._arena) and notify(self._socket, self.name)
        # The notice may have come to another keeper than the one that has the memory.
        return is_told and self._lease.holds(self.name)

    @property
    def is_reserved(self) -> bool:
        """Return whether there is memory."""
        return self._arena is not None

    def is_told(self) -> bool:
        """Return whether the keeper of now has been told of the memory; any thread may ask."""
        mine = self._arena is None or self._lease.holds(self.name)
        return mine and all(memory.is_told() for memory in list(self._beside.values()))

    def successor(self) -> SnapshotMemory:
        """Return other memory of the same worker, where a thread still holds this."""
        other = SnapshotMemory(self.directory, self.worker)
        other._generation = self._generation
        other._beside = {name: memory.successor() for name, memory in self._beside.items()}
        return other

    def give_up(self) -> None:
        """Leave the arena, and have the keeper let go of it once its versions are not needed.

        One that was asked for and refused is not asked for any more: that is no problem then.
        """
        if self._generation:
            # A keeper that is away holds nothing that it would have to let go of.
            with contextlib.suppress(ArenaError):
                leave_arena(self._socket, self.name)
            self.leave()

    def leave(self) -> None:
        """Write no more into the arena; the next one is another."""
        arena, self._arena = self._arena, None
        if arena is None:
            return
        self._lease.forget(self.name)
        if self._is_registered:
            unregister(arena)
            self._is_registered = False
        arena.close()


class HandOver:
    """Offers memory, between two attempts, to a keeper that is away, until it is back.

    What the next attempt resumes from is looked for at keepers, perhaps before this worker does
    anything else. ``end`` it before the memory is used again.
    """

    def __init__(self, memory: SnapshotMemory) -> None:
        self._memory = memory
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hand-over", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Offer it no more."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        end_s = time.monotonic() + _HAND_OVER_S_MAX
        while self._memory.is_reserved and not self._memory.tell():
            if self._over.wait(_AGAIN_S) or time.monotonic() > end_s:
                return
