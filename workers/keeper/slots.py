"""The slots: all arenas of one node, within a budget, and the news of what was put into them."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Final

from workers.errors import ArenaError
from workers.memory import (
    NUM_SLOTS,
    Arena,
    HeldArena,
    in_use,
    is_guard,
    owner_of,
    reapable,
    split_name,
)
from workers.protocol import Held

__all__ = ["NodeSlots", "available_bytes", "be_nice"]

#: Of a node's memory this much is left to everybody else when an arena is made.
_SPARE_BYTES: Final = 64 << 20
#: What a dead worker left is handed on to one that needs at least a part of this of it.
_WASTE_MAX: Final = 2

_MEMINFO = Path("/proc/meminfo")
_CGROUPS = Path("/sys/fs/cgroup")


def available_bytes(meminfo: Path = _MEMINFO, cgroups: Path = _CGROUPS) -> int:
    """Return how much memory could be taken now without anything being paged out or killed.

    Args:
        meminfo: What the kernel says of the machine.
        cgroups: What it says of this container, whose limit may be lower; either version.
    """
    found = [_meminfo_bytes(meminfo)]
    for directory, limit, usage, idle in (
        (cgroups, "memory.max", "memory.current", "inactive_file"),
        (
            cgroups / "memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        ),
    ):
        # No such limit: neither the file nor a number in it.
        with contextlib.suppress(OSError, ValueError):
            left = int((directory / limit).read_text()) - int((directory / usage).read_text())
            found.append(left + _stat_bytes(directory / "memory.stat", idle))
    return max(0, min(found))


def _meminfo_bytes(path: Path) -> int:
    for line in path.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise ValueError(f"{path} does not say what is available")


def _stat_bytes(path: Path, name: str) -> int:
    """Return a count: what the kernel would give up at once is charged to the container too."""
    for line in path.read_text().splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


class NodeSlots:
    """The arenas of one node by name, within a budget. Safe to call from several threads.

    An arena of the node's own workers is named ``"{worker}.{generation}"``, the copy of one of
    another node ``"{node[:12]}/{worker}.{generation}"``, and what is such a copy but was written
    by a worker of this node, which has the same state, ``"replica{number}/{worker}.{generation}"``,
    or ``"replica-parity/{worker}.{generation}"`` if it is a parity of several.

    Args:
        budget_bytes: Memory that all arenas together may take.
        available: How much the node has left.
        dead: Workers of the node whose process is known to be gone: what they left is handed on.
    """

    def __init__(
        self,
        *,
        budget_bytes: int,
        available: Callable[[], int] = available_bytes,
        dead: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self._budget_bytes = budget_bytes
        self._available = available
        self._dead = dead
        self._arenas: dict[str, Arena] = {}
        self._claims: dict[str, int] = {}
        #: Under which name what once had another is held now, and since which attempt.
        self._renamed: dict[str, tuple[str, int]] = {}
        self._asked: dict[str, int] = {}
        self._listed: dict[str, frozenset[str]] = {}
        self._lock = threading.Lock()
        self._news, self._num_news = threading.Condition(), 0
        self._pins, self._num_pins = threading.Condition(), 0
        self.attempt = 0
        self.lineage: tuple[tuple[int, int], ...] = ()

    def reserve(self, name: str, *, body_bytes: int) -> Arena:
        """Return the arena of that name; a new one if there is none. Its memory is claimed now.

        A worker that takes the place of a dead one is given that one's arena, with what it holds:
        the writer spares what may still be needed, no memory is faulted in, and the budget need
        not have room for both.

        Raises:
            ArenaError: It does not fit into the budget or into memory, or has smaller slots.
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
                self._claim(name, NUM_SLOTS * body_bytes)
        if arena is None:
            arena = self._create(name, body_bytes)
        self.tell()
        return arena

    def leave(self, name: str) -> None:
        """Take note that nobody writes into an arena any more: it goes once it is not needed."""
        with self._lock:
            self._ask(owner_of(name), split_name(name)[2] + 1)

    def adopt(self, name: str, fd: int) -> None:
        """Take in an arena that a worker still holds; after a restart the slots is empty.

        Raises:
            ArenaError: The file is no arena.
        """
        with self._lock:
            held = self._arenas.get(name)
            if held is not None and os.path.sameopenfile(held.fd, fd):
                os.close(fd)
                return
            arena = self._arenas[name] = Arena(fd)
            # Whoever copied it was connected to the keeper before.
            arena.set_followed(False)
        if held is not None:
            held.close()
        self.tell()

    def hand_out(self, name: str) -> int:
        """Return a new file descriptor of an arena, to give away.

        Raises:
            ArenaError: There is none of that name.
        """
        with self._lock:
            arena = self._find(name)
            if arena is None:
                raise ArenaError(f"no snapshot of {name} is held on this node", arena=name)
            return os.dup(arena.fd)

    def arena(self, name: str) -> Arena | None:
        """Return the arena of that name, if there is one."""
        with self._lock:
            return self._arenas.get(name)

    def find(self, name: str) -> Arena | None:
        """Return the arena that has that name, or had it not long ago: to read from."""
        with self._lock:
            return self._find(name)

    def drop(self, name: str) -> None:
        """Let go of an arena; its memory is free once nobody else holds it."""
        with self._lock:
            held = self._arenas.pop(name, None)
        if held is not None:
            # Outside of the lock: to free a large one takes a while.
            held.close()
        self.tell()

    def arenas(self) -> dict[str, Arena]:
        """Return all arenas by name."""
        with self._lock:
            return dict(sorted(self._arenas.items()))

    def versions(self) -> dict[str, list[Held]]:
        """Return what is held, by arena, oldest first."""
        return {name: arena.versions() for name, arena in self.arenas().items()}

    def tell(self) -> None:
        """Wake those who wait for news, and for pins if there are any: something changed.

        Not for what is copied: nobody waits for that.
        """
        with self._news:
            self._num_news += 1
            self._news.notify_all()
        if any(arena.pinned() is not None for arena in self.arenas().values()):
            self.tell_pins()

    def tell_pins(self) -> None:
        """Wake whoever waits for pins."""
        with self._pins:
            self._num_pins += 1
            self._pins.notify_all()

    def wait_news(self, after: int, timeout_s: float) -> int:
        """Return the number of the latest news, once there is a later one than ``after``.

        News is a finished slot, or an arena that came or went; on timeout it is the same number.
        """
        with self._news:
            self._news.wait_for(lambda: self._num_news > after, timeout_s)
            return self._num_news

    def wait_pins(self, after: int, timeout_s: float | None) -> int:
        """Do as ``wait_news``, for news while a slot waits to be stored."""
        with self._pins:
            self._pins.wait_for(lambda: self._num_pins > after, timeout_s)
            return self._num_pins

    def fence(self, attempt: int, lineage: Sequence[tuple[int, int]]) -> None:
        """Take note of a new attempt: nothing is reserved for older ones any more."""
        with self._lock:
            # Whoever was told of a name was told so before the attempt that is over now.
            self._renamed = {
                old: (new, since)
                for old, (new, since) in self._renamed.items()
                if since >= self.attempt
            }
            self.attempt, self.lineage = attempt, tuple(lineage)
        self.tell_pins()

    def quarantine(self, bad: Iterable[tuple[str, int, int]]) -> None:
        """Hold a version no longer that could not be loaded: nobody is offered it any more.

        Args:
            bad: ``(arena, slot, sequence)`` of each; what is in the slot by now is not meant.
        """
        has_changed = False
        for name, slot, sequence in bad:
            arena = self.find(name)
            held = arena.held(slot) if arena is not None else None
            if arena is not None and held is not None and held.sequence == sequence:
                with contextlib.suppress(ValueError):
                    # Another thread may let go of the arena.
                    arena.quarantine(held)
                has_changed = True
        if has_changed:
            self.tell()

    def note_listed(self, node: str, names: Collection[str]) -> None:
        """Take note of what another node has to copy; () once it is not followed any more."""
        with self._lock:
            self._listed[node[:12]] = frozenset(names)

    def reap(self, *, living: Collection[str], stored_step: int) -> list[str]:
        """Let go of every arena that nobody needs any more, and return their names.

        Args:
            living: Workers of this node whose process is there.
            stored_step: The newest step that is committed to storage and counts.
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
                # What is on its way to storage stays until it is there, or given up.
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
        """Give the smallest arena of a dead worker that is large enough that name, if any is."""
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
        # Whoever copies it has to find it under its new name first.
        arena.set_followed(False)
        self._renamed[old] = name, self.attempt
        for earlier, (now, since) in self._renamed.items():
            if now == old:
                self._renamed[earlier] = name, since
        return arena

    def _create(self, name: str, body_bytes: int) -> Arena:
        """Make an arena that was claimed, without the lock: to fault in a large one takes long."""
        arena = None
        try:
            arena = Arena.create(name, body_bytes=body_bytes)
        finally:
            # Whatever went wrong: what nobody has is claimed by nobody.
            with self._lock:
                del self._claims[name]
                if arena is not None:
                    self._arenas[name] = arena
        return arena

    def _claim(self, name: str, need_bytes: int) -> None:
        if name in self._claims:
            raise ArenaError(f"{name} is being reserved already; ask again", arena=name)
        used = sum(arena.size_bytes for arena in self._arenas.values())
        used += sum(self._claims.values())
        left = self._available() - _SPARE_BYTES - sum(self._claims.values())
        if used + need_bytes > self._budget_bytes:
            why = f"{used} of the node's {self._budget_bytes} are taken"
        elif need_bytes > left:
            why = f"the node has {max(0, left)} left"
        else:
            self._claims[name] = need_bytes
            return
        raise ArenaError(
            f"snapshots of {name} need {need_bytes} bytes ({NUM_SLOTS} slots); {why}: raise "
            "snapshot.node_memory_mib, take nodes with more memory, or put fewer workers on one",
            arena=name,
            need_bytes=need_bytes,
            budget_bytes=self._budget_bytes,
        )


def _check_fits(name: str, arena: Arena, body_bytes: int) -> None:
    if arena.body_bytes < body_bytes:
        raise ArenaError(
            f"the slots of {name} have {arena.body_bytes} bytes, {body_bytes} are needed: "
            "reserve the next generation",
            arena=name,
        )


def be_nice(niceness: int) -> None:
    """Give the calling thread at least this niceness, and no other thread of the process."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):
        if os.getpriority(os.PRIO_PROCESS, thread) < niceness:
            os.setpriority(os.PRIO_PROCESS, thread, niceness)
