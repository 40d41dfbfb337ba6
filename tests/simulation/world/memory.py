"""Simulated keepers' memory: parts live on nodes, and are lost with them.

An arena takes the last versions of one rank, as the real one does; copies on other nodes have
arenas of their own, and so have shares that are saved for replicas, and a node's parities of an
attempt. ``policies.versions`` says which versions can be read, as for the shell.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from orchestrator.policies import complete
from tests.simulation.world.parts import SimNode, SimWorker
from ucp_core.lineage import Lineage, counts
from workers.protocol import Held, Inventory, PartRef, Source

#: As ``workers.memory.arena``.
NUM_BUFFERS = 3


class Part(NamedTuple):
    """One rank's part of a version."""

    step: int
    attempt: int
    rank: int
    world_size: int

    def source(self, node: str, arena: str) -> Source:
        """Return it as a source, held in that arena."""
        return PartRef(node=node, arena=arena, held=self.held()).source

    def held(self) -> Held:
        """Return what a keeper says of it."""
        return _held(self)


@lru_cache(maxsize=1 << 16)
def _held(part: Part) -> Held:
    return Held(
        buffer=0,
        sequence=2,
        attempt=part.attempt,
        step=part.step,
        rank=part.rank,
        world_size=part.world_size,
        data_bytes=1,
        record_bytes=1,
    )


class Memory:
    """All that keepers hold.

    Args:
        budget_bytes: Each keeper's budget for snapshots; 0 if it reports none.

    Attributes:
        landed_s: When the last rank's part of a version was written, by (step, attempt).
        grew_s: When something that was there could be read again: a keeper came back.
        copied: When a copy, or a parity, was written, on which node, in which arena, and what.
    """

    def __init__(self, budget_bytes: int = 0) -> None:
        self.budget_bytes = budget_bytes
        self.landed_s: dict[tuple[int, int], float] = {}
        self.grew_s = 0.0
        self.copied: list[tuple[float, str, str, Part]] = []
        self._nodes: dict[str, dict[str, list[Part]]] = {}
        self._parities: dict[str, dict[str, list[PartRef]]] = {}
        self._ranks: dict[tuple[int, int], set[int]] = {}
        # By node, what its keeper says; made when it is asked and dropped with every change.
        self._said: dict[str, Inventory] = {}

    def write(self, node: str, arena: str, part: Part, lineage: Lineage) -> None:
        """Put a part where the least is lost: over what does not count, else over the oldest."""
        self._said.pop(node, None)
        parts = self._nodes.setdefault(node, {}).setdefault(arena, [])
        if len(parts) == NUM_BUFFERS:
            over = 0
            for index, old in enumerate(parts):
                if old.attempt != part.attempt and not counts(
                    step=old.step, attempt=old.attempt, lineage=lineage
                ):
                    over = index
                    break
            del parts[over]
        parts.append(part)

    def write_parity(self, node: str, parity: PartRef) -> None:
        """Put a node's parities over the oldest of the attempt."""
        self._said.pop(node, None)
        kept = self._parities.setdefault(node, {}).setdefault(parity.arena, [])
        kept[:] = [*kept[1 - NUM_BUFFERS :], parity]

    def finished(self, part: Part, now_s: float) -> bool:
        """Note that a rank's snapshot is done; return whether the version is committed by it."""
        version = (part.step, part.attempt)
        ranks = self._ranks.setdefault(version, set())
        ranks.add(part.rank)
        if len(ranks) == part.world_size:
            self.landed_s.setdefault(version, now_s)
        return len(ranks) == part.world_size

    def has(self, node: str, arena: str, part: Part) -> bool:
        """Return whether the part is still there."""
        return part in self._nodes.get(node, {}).get(arena, ())

    def lose_node(self, node: str) -> None:
        """Lose all that was held on a node."""
        self._said.pop(node, None)
        self._nodes.pop(node, None)
        self._parities.pop(node, None)

    def lose_keeper(self, node: SimNode) -> None:
        """Lose what only the keeper held: living workers hold their own arenas too."""
        self._said.pop(node.name, None)
        arenas = self._nodes.get(node.name, {})
        for arena in [arena for arena in arenas if arena.rpartition("/")[2] not in node.workers]:
            del arenas[arena]
        self._parities.pop(node.name, None)

    def lose_worker(self, worker: SimWorker) -> None:
        """Lose the arenas of a worker that dies while there is no keeper."""
        self._said.pop(worker.node.name, None)
        arenas = self._nodes.get(worker.node.name, {})
        for arena in [arena for arena in arenas if arena.rpartition("/")[2] == worker.name]:
            del arenas[arena]

    def inventories(self, nodes: Iterable[SimNode], now_s: float) -> list[Inventory]:
        """Return what the keepers that answer say."""
        return [self._inventory(node.name) for node in nodes if answers(node, now_s)]

    def _inventory(self, node: str) -> Inventory:
        said = self._said.get(node)
        if said is None:
            said = self._said[node] = Inventory(
                node=node,
                budget_bytes=self.budget_bytes,
                parts=tuple(
                    PartRef(node=node, arena=arena, held=part.held())
                    for arena, parts in self._nodes.get(node, {}).items()
                    for part in parts
                ),
                parities=tuple(
                    parity
                    for parities in self._parities.get(node, {}).values()
                    for parity in parities
                ),
            )
        return said

    def copied_since(self, at_s: float) -> list[Source]:
        """Return the copies and parities that were written since then."""
        return [
            part.source(node, arena)
            for copied_s, node, arena, part in self.copied
            if copied_s >= at_s
        ]

    def holds(self, version: tuple[int, int], nodes: Iterable[SimNode], now_s: float) -> bool:
        """Return whether a version (step, attempt) could be loaded now."""
        found = complete(self.inventories(nodes, now_s), ())
        return any((each.step, each.attempt) == version for each in found)


def serves(node: SimNode, now_s: float) -> bool:
    """Return whether the node has a keeper."""
    return node.alive and node.has_keeper and now_s >= node.keeper_back_s


def answers(node: SimNode, now_s: float) -> bool:
    """Return whether the controller can reach the node's keeper."""
    return serves(node, now_s) and not node.cut_off
