"""Where the parts of a version in memory are taken from: near before far, and each only if whole.

The parts of one version may be held several times: on the node that wrote them, and as copies
on others. A holder that fails (it cannot be reached, was written over, or has damaged bytes)
gives way to the next one of the same part, and what was loaded so far is loaded again.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

from ucp_core.checkpoint import Checkpoint
from ucp_core.errors import CheckpointNotFoundError, StorageError, UcpError
from workers.errors import ArenaError
from workers.keeper.arena import Arena
from workers.keeper.door import door_path, open_arena
from workers.keeper.wire import RemotePart, WireClient
from workers.protocol import Held, MemoryPart
from workers.snapshot.tier import LocalPart, MemoryTier, Part, open_version

__all__ = ["LOCAL_MEMORY", "PEER_MEMORY", "MemorySources"]

#: Kinds of sources, as ``Formed`` names them.
LOCAL_MEMORY: Final = "local memory"
PEER_MEMORY: Final = "peer memory"

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class MemorySources:
    """The holders of one version's parts, as one worker reaches them. Close it after use.

    Args:
        parts: Every holder of every rank's part.
        node: The node of this worker.
        keeper_directory: Where the keeper of the node has its door; None if it has none.

    Attributes:
        skipped: ``(which part, why)`` of the holders that failed.
        taken_bytes: Bytes that were read of the version that was loaded, by kind of source.
    """

    def __init__(
        self, parts: Sequence[MemoryPart], *, node: str, keeper_directory: Path | None
    ) -> None:
        near = node if keeper_directory is not None else ""
        self._left = sorted(parts, key=lambda part: part.node != near)
        self._near = near
        self._door = door_path(keeper_directory or Path())
        self._arenas: dict[str, Arena] = {}
        self._clients: dict[tuple[str, int], WireClient] = {}
        self.skipped: list[tuple[str, str]] = []
        self.taken_bytes: Counter[str] = Counter()

    def load(self, fill: Callable[[Checkpoint], _T]) -> _T:
        """Return what ``fill`` makes of the version.

        Args:
            fill: Loads from a checkpoint; called again if a holder fails.

        Raises:
            UcpError: No holder of some part is left, or the parts do not belong together.
        """
        while True:
            parts = self._choose()
            checkpoint = None
            try:
                checkpoint = open_version(parts)
                for part in parts.values():
                    part.sizes_bytes.clear()
                filled = fill(checkpoint)
            except UcpError as error:
                self._give_up_on(_culprits(parts, checkpoint, error), error)
                continue
            for part in parts.values():
                self.taken_bytes[part.kind] += sum(part.sizes_bytes)
            return filled

    def close(self) -> None:
        """Let go of connections and memory."""
        for client in self._clients.values():
            client.close()
        for arena in self._arenas.values():
            arena.close()

    def _choose(self) -> dict[int, _Watched]:
        """Return the first holder of every part that can be opened."""
        parts: dict[int, _Watched] = {}
        for place in list(self._left):
            if place.held.rank not in parts and place in self._left:
                try:
                    parts[place.held.rank] = self._open(place)
                except ArenaError as error:
                    self._give_up_on([place], error)
        world_size = max((place.held.world_size for place in self._left), default=0)
        for rank in range(world_size or 1):
            if rank not in parts:
                raise CheckpointNotFoundError(
                    f"the part of rank {rank} is in no memory that can be read", rank=rank
                )
        return parts

    def _open(self, place: MemoryPart) -> _Watched:
        if place.node == self._near:
            arena = self._arenas.get(place.arena)
            if arena is None:
                arena = self._arenas[place.arena] = open_arena(self._door, place.arena)
            return _Watched(place, LocalPart(arena, place.held), LOCAL_MEMORY)
        address = (place.host, place.port)
        client = self._clients.get(address)
        if client is None:
            client = self._clients[address] = WireClient(address, secret=place.secret)
        return _Watched(place, RemotePart(client, place.arena, place.held), PEER_MEMORY)

    def _give_up_on(self, places: Sequence[MemoryPart], error: Exception) -> None:
        """Read no more from holders that failed; without one to blame there is no next try."""
        if not places:
            raise error
        away = {place.node for place in places if _is_silence(error)}
        for place in places:
            held = place.held
            name = f"step {held.step} of rank {held.rank} in the memory of node {place.node[:12]}"
            self.skipped.append((name, f"{type(error).__name__}: {error}"))
            log.warning("snapshot_skipped", extra={"part": name, "reason": str(error)})
        # A node that does not answer is not asked for its other parts: each would take as long.
        self._left = [
            place for place in self._left if place not in places and place.node not in away
        ]


@dataclass(slots=True, eq=False)
class _Watched:
    """A part that notes how much is taken from it."""

    place: MemoryPart
    part: Part
    kind: str
    #: Appended to by several readers at once.
    sizes_bytes: deque[int] = field(default_factory=deque)

    @property
    def held(self) -> Held:
        return self.part.held

    def fill(self, offset_bytes: int, targets: Sequence[memoryview]) -> None:
        self.part.fill(offset_bytes, targets)
        self.sizes_bytes.append(sum(map(len, targets)))


def _culprits(
    parts: dict[int, _Watched], checkpoint: Checkpoint | None, error: UcpError
) -> list[MemoryPart]:
    """Return whose bytes were not there, or not what they should be."""
    if "rank" in error.facts:
        return [parts[error.facts["rank"]].place]
    tier = checkpoint.store if checkpoint is not None else None
    if isinstance(tier, MemoryTier) and "path" in error.facts:
        return [parts[tier.rank_of(error.facts["path"])].place]
    return []


def _is_silence(error: Exception) -> bool:
    """Return whether a keeper could not be reached, other than that it refused something."""
    if isinstance(error, ArenaError):
        return "path" in error.facts
    return isinstance(error, StorageError) and error.facts.get("refused") is False
