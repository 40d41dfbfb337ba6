"""All arenas of one node, within a budget; it announces changes to them."""

import contextlib
import os
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Final

from workers.errors import ArenaError
from workers.memory import (
    NUM_BUFFERS,
    Arena,
    HeldArena,
    in_use,
    is_guard,
    owner_of,
    reapable,
    split_name,
)
from workers.protocol import Held

#: Memory to leave free for all other processes when an arena is made.
_SPARE_BYTES: Final = 64 << 20
#: A dead worker's arena is reused if it is at most this many times as large as needed.
_WASTE_MAX: Final = 2

_MEMINFO = Path("/proc/meminfo")
_CGROUPS = Path("/sys/fs/cgroup")


def available_bytes(meminfo: Path = _MEMINFO, cgroups: Path = _CGROUPS) -> int:
    """Return the memory that can be used now without paging or killing.

    The limit of a container (cgroups of version 1 or 2) may be below the machine's memory.
    """
    left = meminfo_bytes("MemAvailable", meminfo)
    if left is None:
        raise ValueError(f"{meminfo} does not give the available memory")
    found = [left]
    for directory, limit, usage, idle in (
        (cgroups, "memory.max", "memory.current", "inactive_file"),
        (
            cgroups / "memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        ),
    ):
        # Without a limit there is no such file, or no number in it.
        with contextlib.suppress(OSError, ValueError):
            left = int((directory / limit).read_text()) - int((directory / usage).read_text())
            found.append(left + _stat_bytes(directory / "memory.stat", idle))
    return max(0, min(found))


def meminfo_bytes(name: str, path: Path = _MEMINFO) -> int | None:
    """Return an amount of the machine's memory in bytes; None if the kernel does not name it."""
    for line in path.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    return None


def _stat_bytes(path: Path, name: str) -> int:
    """Return a count from a file.

    It is for memory that the kernel charges to the container but would free at once.
    """
    for line in path.read_text().splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


class ArenaTable:
    """The arenas of one node by name, within a budget. Thread-safe.

    | who writes | name |
    |---|---|
    | a worker of this node | ``{worker}.{generation}`` |
    | this keeper: a copy of another node's arena | ``{node[:12]}/{worker}.{generation}`` |
    | a worker of this node, for another rank | ``replica{number}/{worker}.{generation}`` |
    | a worker of this node: a parity of other ranks | ``replica-parity/{worker}.{generation}`` |

    Args:
        budget_bytes: Memory that all arenas together may take.
        available: Returns the memory that the node has left.
        dead: Returns the workers of the node whose process is gone, and whose arenas are reused.
    """

    def __init__(
        self,
        *,
        budget_bytes: int,
        available: Callable[[], int] = available_bytes,
        dead: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self.budget_bytes = budget_bytes
        self._available = available
        self._dead = dead
        self._arenas: dict[str, Arena] = {}
        self._claims: dict[str, int] = {}
        #: New name of a renamed arena, and the attempt since which it has it.
        self._renamed: dict[str, tuple[str, int]] = {}
        self._asked: dict[str, int] = {}
        self._listed: dict[str, frozenset[str]] = {}
        self._lock = threading.Lock()
        self._news, self._num_news = threading.Condition(), 0
        self._pins, self._num_pins = threading.Condition(), 0
        self.attempt = 0
        #: Claim of the run that the node trains for; 0 while unknown.
        self.claim = 0
        self.lineage: tuple[tuple[int, int], ...] = ()

    def reserve(self, name: str, *, body_bytes: int) -> Arena:
        """Return the arena of that name, or a new one whose memory is claimed at once.

        A new worker inherits the arena of a dead one with its content: the writer spares versions
        that may be needed, no memory has to be faulted in, and the budget need not hold both
        arenas. Raise ``ArenaError`` if the arena exceeds the budget or the memory, or an existing
        one has smaller buffers.
        """
        node, _, generation = split_name(name)
        is_own = not node or is_guard(name)
        dead = self._dead() if is_own else ()
        with self._lock:
            if is_own:
                self._ask(owner_of(name), generation)
            arena = self._arenas.get(name)
            if arena is not None:
                _check_fits(name, arena, body_bytes)
                return arena
            arena = self._inherit(name, body_bytes, dead)
            if arena is None:
                self._claim(name, NUM_BUFFERS * body_bytes)
        if arena is None:
            arena = self._create(name, body_bytes)
        self.tell()
        return arena

    def leave(self, name: str) -> None:
        """Note that an arena is no longer written, so that it is freed once nothing needs it."""
        with self._lock:
            self._ask(owner_of(name), split_name(name)[2] + 1)

    def adopt(self, name: str, fd: int) -> None:
        """Adopt an arena that a worker still holds; a restarted keeper has none."""
        with self._lock:
            held = self._arenas.get(name)
            if held is not None and os.path.sameopenfile(held.fd, fd):
                os.close(fd)
                return
            arena = self._arenas[name] = Arena(fd)
            # Its followers were connected to the previous keeper.
            arena.set_followed(False)
        if held is not None:
            held.close()
        self.tell()

    def hand_out(self, name: str) -> int:
        """Return a new file descriptor of an arena, for another process."""
        with self._lock:
            arena = self._find(name)
            if arena is None:
                raise ArenaError(f"no snapshot of {name} is held on this node", arena=name)
            return os.dup(arena.fd)

    def arena(self, name: str) -> Arena | None:
        """Return the arena of that name, or None."""
        with self._lock:
            return self._arenas.get(name)

    def find(self, name: str) -> Arena | None:
        """Return the arena that has, or recently had, that name, for reading."""
        with self._lock:
            return self._find(name)

    def drop(self, name: str) -> None:
        """Free an arena. Its memory returns once no other process holds it."""
        with self._lock:
            held = self._arenas.pop(name, None)
        if held is not None:
            # Outside the lock, because freeing a large arena takes a while.
            held.close()
        self.tell()

    def arenas(self) -> dict[str, Arena]:
        """Return all arenas by name."""
        with self._lock:
            return dict(sorted(self._arenas.items()))

    def versions(self) -> dict[str, list[Held]]:
        """Return the versions in every arena, oldest first."""
        return {name: arena.versions() for name, arena in self.arenas().items()}

    def tell(self) -> None:
        """Wake the threads that wait for news, and those that wait for pins if there are any.

        Finished copies need no call, because no caller waits for them.
        """
        with self._news:
            self._num_news += 1
            self._news.notify_all()
        if any(arena.pinned() is not None for arena in self.arenas().values()):
            self.tell_pins()

    def tell_pins(self) -> None:
        """Wake the threads that wait for pins."""
        with self._pins:
            self._num_pins += 1
            self._pins.notify_all()

    def wait_news(self, after: int, timeout_s: float) -> int:
        """Wait for news later than number ``after``; return the latest number.

        News is a finished buffer, or an arena that was added or removed. On timeout, return
        ``after``.
        """
        with self._news:
            self._news.wait_for(lambda: self._num_news > after, timeout_s)
            return self._num_news

    def wait_pins(self, after: int, timeout_s: float | None) -> int:
        """Wait as ``wait_news`` does, for news while a buffer is pinned until it is stored."""
        with self._pins:
            self._pins.wait_for(lambda: self._num_pins > after, timeout_s)
            return self._num_pins

    def fence(self, attempt: int, lineage: Sequence[tuple[int, int]]) -> None:
        """Note a new attempt: reservations of older ones are refused from now on."""
        with self._lock:
            # Names that are older than the attempt that just ended are not requested again.
            self._renamed = {
                old: (new, since)
                for old, (new, since) in self._renamed.items()
                if since >= self.attempt
            }
            self.attempt, self.lineage = attempt, tuple(lineage)
        self.tell_pins()

    def quarantine(self, bad: Iterable[tuple[str, int, int]]) -> None:
        """Drop versions that could not be loaded, so that they are never offered again.

        ``bad`` has ``(arena, buffer, sequence)`` of each. A newer version in the buffer stays.
        """
        has_changed = False
        for name, buffer, sequence in bad:
            arena = self.find(name)
            held = arena.held(buffer) if arena is not None else None
            if arena is not None and held is not None and held.sequence == sequence:
                with contextlib.suppress(ValueError):
                    # Another thread may free the arena.
                    arena.quarantine(held)
                has_changed = True
        if has_changed:
            self.tell()

    def note_listed(self, node: str, names: Collection[str]) -> None:
        """Note the arenas of another node to copy; () once this node no longer follows it."""
        with self._lock:
            self._listed[node[:12]] = frozenset(names)

    def reap(self, *, living: Collection[str], stored_step: int) -> list[str]:
        """Free every arena that nothing needs, and return their names.

        ``living`` are the workers of this node whose process exists. ``stored_step`` is the newest
        step that is committed to storage and counts.
        """
        with self._lock:
            asked = dict.fromkeys(living, 0) | {
                owner: generation
                for owner, generation in self._asked.items()
                if owner.rpartition("/")[2] in living
            }
            self._asked = dict(asked)
        arenas = self.arenas()
        used = in_use(list(arenas), living=asked, listed=self._listed, attempt=self.attempt)
        if len(used) == len(arenas):
            return []
        held_arenas = [
            HeldArena(
                name=name,
                # A pinned buffer stays until it is stored or its storing is given up.
                in_use=name in used or arena.pinned() is not None,
                versions=tuple(arena.versions()),
            )
            for name, arena in arenas.items()
        ]
        doomed = reapable(held_arenas, lineage=self.lineage, stored_step=stored_step)
        for name in doomed:
            self.drop(name)
        return doomed

    def _ask(self, owner: str, generation: int) -> None:
        self._asked[owner] = max(generation, self._asked.get(owner, 0))

    def _find(self, name: str) -> Arena | None:
        return self._arenas.get(self._renamed.get(name, (name, 0))[0])

    def _inherit(self, name: str, body_bytes: int, dead: Collection[str]) -> Arena | None:
        """Rename the smallest large-enough arena of a dead worker; None if there is none."""
        kind = split_name(name)[0]
        left = [
            (arena.body_bytes, old)
            for old, arena in self._arenas.items()
            if split_name(old)[0] == kind and split_name(old)[1] in dead
            if body_bytes <= arena.body_bytes <= _WASTE_MAX * body_bytes
        ]
        if not left:
            return None
        _, old = min(left)
        arena = self._arenas[name] = self._arenas.pop(old)
        # Followers must find it under its new name first.
        arena.set_followed(False)
        self._renamed[old] = name, self.attempt
        for earlier, (now, since) in self._renamed.items():
            if now == old:
                self._renamed[earlier] = name, since
        return arena

    def _create(self, name: str, body_bytes: int) -> Arena:
        """Make a claimed arena, outside the lock, because faulting in a large one takes long."""
        arena = None
        try:
            arena = Arena.create(name, body_bytes=body_bytes)
        finally:
            # This also runs on failure, when no process has that memory.
            with self._lock:
                del self._claims[name]
                if arena is not None:
                    self._arenas[name] = arena
        return arena

    def _claim(self, name: str, need_bytes: int) -> None:
        if name in self._claims:
            raise ArenaError(f"{name} is already being reserved; try again", arena=name)
        used = sum(arena.size_bytes for arena in self._arenas.values())
        used += sum(self._claims.values())
        left = self._available() - _SPARE_BYTES - sum(self._claims.values())
        if used + need_bytes > self.budget_bytes:
            why = f"{used} of the node's {self.budget_bytes} are taken"
        elif need_bytes > left:
            why = f"the node has {max(0, left)} left"
        else:
            self._claims[name] = need_bytes
            return
        raise ArenaError(
            f"snapshots of {name} need {need_bytes} bytes ({NUM_BUFFERS} buffers); {why}: raise "
            "snapshot.node_memory_mib, take nodes with more memory, or put fewer workers on one",
            arena=name,
            need_bytes=need_bytes,
            budget_bytes=self.budget_bytes,
        )


def _check_fits(name: str, arena: Arena, body_bytes: int) -> None:
    if arena.body_bytes < body_bytes:
        raise ArenaError(
            f"the buffers of {name} have {arena.body_bytes} bytes, {body_bytes} are needed: "
            "reserve the next generation",
            arena=name,
        )
