"""Hold a worker process's memory at the keeper of its node."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from workers.errors import ArenaError
from workers.memory.arena import Arena
from workers.memory.checksums import Checksums
from workers.memory.cuda import register, unregister
from workers.memory.descriptors import adopt, descriptor_socket, leave_arena, notify, reserve

#: A keeper is back in about a second, or in 12 s if many start at once; recovery waits for it.
_HAND_OVER_S_MAX: Final = 30.0
_AGAIN_S: Final = 0.05


class SnapshotMemory:
    """A worker process's memory at its keeper; kept from attempt to attempt.

    Args:
        directory: Directory of this node's keeper.
        worker: Worker id, or a name of ``workers.memory.retention`` for further memory.
        checksums: Computes checksums; by default a new ``Checksums`` object for this process.
    """

    def __init__(self, directory: Path, worker: str, checksums: Checksums | None = None) -> None:
        self._socket = descriptor_socket(directory)
        self.directory = directory
        self.worker = worker
        self.checksums = checksums or Checksums()
        self._generation = 0
        self._arena: Arena | None = None
        #: The keeper that has the arena.
        self._keeper: tuple[int, int] | None = None
        self._is_registered = False
        self._beside: dict[str, SnapshotMemory] = {}

    @property
    def name(self) -> str:
        """Return the name that the keeper uses for the arena."""
        return f"{self.worker}.{self._generation}"

    def beside(self, names: Sequence[str]) -> list[SnapshotMemory]:
        """Return further memory for the shares that this worker saves for other ranks.

        Memory under names not given here is released. The keeper holds it as long as its versions
        may be needed.
        """
        for name, memory in self._beside.items():
            if name not in names:
                memory.give_up()
        for name in names:
            if name not in self._beside:
                self._beside[name] = SnapshotMemory(self.directory, name, self.checksums)
        return [self._beside[name] for name in names]

    def ensure(self, body_bytes: int, *, attempt: int, for_cuda: bool) -> Arena:
        """Return an arena whose buffers hold ``body_bytes``, with its current versions.

        To grow, reserve a new arena; the keeper holds the old one as long as its versions may be
        needed. Raise ``ArenaError`` if the keeper refuses, or is not running.
        """
        if self._arena is None or self._arena.body_bytes < body_bytes:
            self.leave()
            self._generation += 1
            self._arena = reserve(self._socket, self.name, body_bytes=body_bytes, attempt=attempt)
            self.checksums.attach(self._arena)
        if for_cuda and not self._is_registered:
            register(self._arena)
            self._is_registered = True
        return self._arena

    def tell(self) -> bool:
        """Notify the keeper of a finished buffer; hand the memory to a restarted keeper.

        Return whether the keeper has the memory. This never raises an error. Without a keeper the
        memory lives as long as this process.
        """
        for memory in list(self._beside.values()):
            memory.tell()
        keeper = self._running()
        if self._arena is None or keeper is None:
            return False
        if keeper != self._keeper:
            try:
                adopt(self._socket, self.name, self._arena)
            except ArenaError:
                return False
            self._keeper = keeper
        # A new keeper that does not have the memory yet may have received the notice.
        return notify(self._socket, self.name) and self._running() == keeper

    def _running(self) -> tuple[int, int] | None:
        """Return an identity of the running keeper, from its socket; None without a keeper."""
        try:
            status = self._socket.stat()
        except OSError:
            return None
        return status.st_ino, status.st_ctime_ns

    @property
    def is_reserved(self) -> bool:
        """Return whether this worker has memory."""
        return self._arena is not None

    def is_told(self) -> bool:
        """Return whether the running keeper has all of the memory. Any thread may call this."""
        keeper = self._running()
        mine = self._arena is None or (keeper is not None and keeper == self._keeper)
        return mine and all(memory.is_told() for memory in list(self._beside.values()))

    def successor(self) -> SnapshotMemory:
        """Return a new object for the same worker's memory, while a thread still holds this one."""
        other = SnapshotMemory(self.directory, self.worker, self.checksums)
        other._generation = self._generation
        other._beside = {name: memory.successor() for name, memory in self._beside.items()}
        return other

    def give_up(self) -> None:
        """Leave the arena; the keeper frees it once its versions are not needed.

        A refused reservation is withdrawn, so that it is no longer reported as a problem.
        """
        if self._generation:
            # A keeper that is not running holds nothing.
            with contextlib.suppress(ArenaError):
                leave_arena(self._socket, self.name)
            self.leave()

    def leave(self) -> None:
        """Stop writing into the arena; the next reservation makes a new one."""
        arena, self._arena = self._arena, None
        if arena is None:
            return
        self._keeper = None
        self.checksums.detach(arena)
        if self._is_registered:
            unregister(arena)
            self._is_registered = False
        arena.close()


class HandOver:
    """Hands memory to a keeper that restarts between two attempts.

    The next attempt resumes from the versions that keepers hold, perhaps before this worker does
    anything else. Call ``end`` before the memory is used again.
    """

    def __init__(self, memory: SnapshotMemory) -> None:
        self._memory = memory
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hand-over", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop offering the memory."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        end_s = time.monotonic() + _HAND_OVER_S_MAX
        while self._memory.is_reserved and not self._memory.tell():
            if self._over.wait(_AGAIN_S) or time.monotonic() > end_s:
                return
