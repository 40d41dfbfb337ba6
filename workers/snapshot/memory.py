"""A worker process's memory at the keeper of its node."""

from __future__ import annotations

import contextlib
from pathlib import Path

from workers.errors import ArenaError
from workers.keeper.arena import Arena
from workers.keeper.door import Lease, door_path, leave_arena, notify, reserve
from workers.keeper.retention import guard_name
from workers.snapshot.device import register, unregister

__all__ = ["SnapshotMemory"]


class SnapshotMemory:
    """A worker process's memory at its keeper; kept from attempt to attempt.

    Args:
        directory: Where the keeper of this node has its door.
        worker: Worker id, or what ``guard_name`` makes of it.
    """

    def __init__(self, directory: Path, worker: str) -> None:
        self._door = door_path(directory)
        self._directory = directory
        self._worker = worker
        self._generation = 0
        self._arena: Arena | None = None
        self._lease = Lease(self._door)
        self._is_registered = False
        self._beside: list[SnapshotMemory] = []

    @property
    def name(self) -> str:
        """Return the name under which the keeper has the arena."""
        return f"{self._worker}.{self._generation}"

    def beside(self, number: int) -> list[SnapshotMemory]:
        """Return as much other memory, for what this worker saves for other ranks.

        What there was of it beyond that is written no more: the keeper has it for as long as its
        versions may be needed.
        """
        for memory in self._beside[number:]:
            memory.give_up()
        for place in range(len(self._beside), number):
            self._beside.append(SnapshotMemory(self._directory, guard_name(place, self._worker)))
        return self._beside[:number]

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
            self._arena = reserve(self._door, self.name, body_bytes=body_bytes, attempt=attempt)
        if for_cuda and not self._is_registered:
            register(self._arena)
            self._is_registered = True
        return self._arena

    def tell(self) -> bool:
        """Let the keeper know of a finished slot; one that was restarted gets the memory back.

        Returns:
            Whether there is memory, and a keeper.
        """
        for memory in self._beside:
            memory.tell()
        if self._arena is None:
            return False
        return self._lease.ensure(self.name, self._arena) and notify(self._door, self.name)

    def successor(self) -> SnapshotMemory:
        """Return other memory of the same worker, where a thread still holds this."""
        other = SnapshotMemory(self._directory, self._worker)
        other._generation = self._generation
        other._beside = [memory.successor() for memory in self._beside]
        return other

    def give_up(self) -> None:
        """Leave the arena, and have the keeper let go of it once its versions are not needed."""
        if self._arena is not None:
            # A keeper that is away holds nothing that it would have to let go of.
            with contextlib.suppress(ArenaError):
                leave_arena(self._door, self.name)
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
