"""Which version to resume from, and what its loss would cost: judged from what keepers hold.

Pure. A version in memory is there when the parts of all its ranks are, wherever they are held;
it counts by the same rule as a commit in storage (``ucp_core/SPEC.md``, 5). Memory can be lost
with a node, so every answer is about the inventories that it was made from and about no others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ucp_core.lineage import Lineage, counts
from workers.protocol import Held, Inventory

__all__ = [
    "MEMORY",
    "STORAGE",
    "Holding",
    "Protection",
    "Version",
    "complete",
    "newest",
    "protection",
    "ring",
    "without",
]

#: Where a version is loaded from.
MEMORY = "memory"
STORAGE = "storage"


@dataclass(frozen=True, slots=True)
class Holding:
    """One rank's part of a version in the memory of one keeper.

    Attributes:
        node: Ray node id, hex.
        host: Where the keeper serves bytes.
        port: Its port.
        arena: Name of the arena on the node.
        held: What is in one of its slots.
    """

    node: str
    host: str
    port: int
    arena: str
    held: Held

    @property
    def is_copy(self) -> bool:
        """Return whether it is another node's snapshot, copied (``workers.keeper.shelf``)."""
        return "/" in self.arena


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """A version that can be resumed from.

    Attributes:
        step: The step after which the state was taken.
        attempt: The attempt that took it.
        source: "memory" or "storage".
        parts: In memory, every holder of every rank's part, by rank; () in storage.
    """

    step: int
    attempt: int
    source: str
    parts: tuple[Holding, ...] = ()

    @property
    def world_size(self) -> int:
        """Return the number of ranks that took it; 0 in storage, where nobody asks."""
        return self.parts[0].held.world_size if self.parts else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """What stands between the run and storage.

    Attributes:
        step: Step of the newest version that is complete in memory; 0 if there is none.
        node_losses_survived: How many nodes may be lost, whichever, with a version left that is
            complete in memory: 0 or 1.
    """

    step: int
    node_losses_survived: int


def complete(inventories: Iterable[Inventory], lineage: Lineage) -> list[Version]:
    """Return the versions that count and of which every rank's part is held, newest first."""
    found: dict[tuple[int, int], list[Holding]] = {}
    for inventory in inventories:
        for part in inventory.parts:
            version = (part.held.step, part.held.attempt)
            holding = Holding(inventory.node, inventory.host, inventory.port, part.arena, part.held)
            found.setdefault(version, []).append(holding)
    return [
        Version(
            step=step,
            attempt=attempt,
            source=MEMORY,
            parts=tuple(sorted(parts, key=lambda part: part.held.rank)),
        )
        for (step, attempt), parts in sorted(found.items(), reverse=True)
        if _has_all_ranks(parts) and counts(step=step, attempt=attempt, lineage=lineage)
    ]


def _has_all_ranks(parts: Sequence[Holding]) -> bool:
    sizes = {part.held.world_size for part in parts}
    ranks = {part.held.rank for part in parts}
    return len(sizes) == 1 and ranks == set(range(sizes.pop()))


def newest(
    inventories: Iterable[Inventory],
    stored: tuple[int, int],
    lineage: Lineage,
    *,
    total_steps: int,
) -> Version | None:
    """Return the version to resume from; None if the run has to begin at its start.

    Args:
        inventories: What the living keepers hold.
        stored: ``(step, attempt)`` of the newest version in storage that counts, (0, 0) if none.
        lineage: Says which versions count.
        total_steps: Length of the run. Its last step is only done once it is in storage, so a
            snapshot of it is no place to resume from: nothing would be left to do.
    """
    held = (v for v in complete(inventories, lineage) if v.step < total_steps)
    found = next(held, None)
    step, attempt = stored
    # Of two at the same step the one in memory is faster.
    if step and (found is None or step > found.step):
        return Version(step=step, attempt=attempt, source=STORAGE)
    return found


def protection(inventories: Sequence[Inventory], lineage: Lineage) -> Protection:
    """Return how well the run is protected by memory."""
    versions = complete(inventories, lineage)
    if not versions:
        return Protection(step=0, node_losses_survived=0)
    fatal = set.intersection(*(_sole_holders(version) for version in versions))
    return Protection(step=versions[0].step, node_losses_survived=0 if fatal else 1)


def _sole_holders(version: Version) -> set[str]:
    """Return the nodes with which the version would be lost."""
    holders: dict[int, set[str]] = {}
    for part in version.parts:
        holders.setdefault(part.held.rank, set()).add(part.node)
    return {next(iter(nodes)) for nodes in holders.values() if len(nodes) == 1}


def without(version: Version, is_lost: Callable[[str], bool]) -> Version | None:
    """Return what is left of a version in memory when nodes are lost; None if a part is missing."""
    left = tuple(part for part in version.parts if not is_lost(part.node))
    if {part.held.rank for part in left} != set(range(version.world_size)):
        return None
    return Version(step=version.step, attempt=version.attempt, source=version.source, parts=left)


def ring(nodes: Sequence[str], copies: int) -> dict[str, tuple[str, ...]]:
    """Return whose snapshots each node keeps a copy of, so that each is kept on ``copies`` others.

    Args:
        nodes: The nodes that train, in the order of their first rank.
        copies: How many copies are wanted; with fewer nodes there are as many as other nodes.
    """
    num_copies = min(copies, len(nodes) - 1)
    return {
        node: tuple(nodes[index - distance] for distance in range(1, num_copies + 1))
        for index, node in enumerate(nodes)
    }
