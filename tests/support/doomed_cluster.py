"""A few nodes on this machine with what a run has of them in memory, and no orchestrator.

Keepers are processes that die on request. This module writes the trainers' versions by hand, so
that who has finished what is known; what a run would resume from after a loss is decided by the
orchestrator's own rules, from what the keepers that are left say they hold.
"""

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from orchestrator.policies import versions
from tests.support.doomed import DoomedNode, newest, places_of
from tests.support.memory_versions import State, local_tensors, make_state, write_version
from tests.support.snapshots import eventually
from ucp_core.native import Checkpoint, find_committed, load
from ucp_core.storage import LocalStore
from workers.keeper import MemorySources
from workers.memory import Arena, SnapshotMemory
from workers.protocol import CHECKPOINTS, GroupPlace, KeeperOrder, ParityGroup, Peer, Source
from workers.settings import CheckpointSettings, Settings, SnapshotSettings

_BODY_BYTES = 1 << 17
#: Time that it takes to notice a dead keeper.
_SETTLE_S_MAX = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Protect:
    """How the nodes protect each other."""

    copies: int = 0  #: On so many others; 0 for parities.
    parities: int = 0  #: In each group.
    group_size: int = 0  #: Nodes of a group; 0 makes one group of all.


@dataclass(frozen=True, slots=True)
class Loaded:
    """The version that a run continues from, and the damage found on the way."""

    step: int  #: Step of the version.
    source: str  #: "memory" or "storage".
    bad: tuple[Source, ...] = ()  #: Sources that were damaged or could not be read.


class Cluster:
    """Nodes with one rank each. ``close`` ends them."""

    def __init__(self, directory: Path, num_nodes: int, protect: Protect) -> None:
        settings = Settings(
            checkpoint=CheckpointSettings(keep=2),
            snapshot=SnapshotSettings(node_memory_mib=16),
        )
        self._protect = protect
        self._run = directory / "run"
        self.nodes = [
            DoomedNode(f"{number:02d}" * 8, directory / str(number), self._run, settings)
            for number in range(num_nodes)
        ]
        self.arenas: dict[int, Arena] = {}
        self._memories = [
            SnapshotMemory(node.directory, f"w{number:04d}")
            for number, node in enumerate(self.nodes)
        ]
        self.attempt = 0
        self.lineage: tuple[tuple[int, int], ...] = ()
        self.members: tuple[int, ...] = ()

    def close(self) -> None:
        """End all processes and let go of all memory."""
        for number in range(len(self.nodes)):
            self.lose(number)

    def begin(self, members: Sequence[int], *, resume: int) -> None:
        """Begin the next attempt on some nodes, as the orchestrator does."""
        self.attempt += 1
        self.lineage = (*self.lineage, (self.attempt, resume))
        self.members = tuple(members)
        self.order()
        for member in members:
            self.arenas[member] = self._memories[member].ensure(
                _BODY_BYTES, attempt=self.attempt, for_cuda=False
            )

    def order(self) -> None:
        """Tell the members' keepers whom to protect; one that has died hears nothing."""
        peers = {member: self.nodes[member].peer() for member in self.members}
        for member, order in self._orders(peers).items():
            with contextlib.suppress(EOFError, OSError):
                self.nodes[member].order(order)

    def take(self, step: int, *, pin: bool = False) -> None:
        """Have every rank finish its snapshot of a step."""
        state = state_of(self.attempt, step)
        for rank, member in enumerate(self.members):
            arena = self.arenas[member]
            held = write_version(
                arena, state, step=step, rank=rank, world_size=len(self.members),
                attempt=self.attempt, lineage=self.lineage,
            )  # fmt: skip
            if pin:
                arena.pin(held.buffer)
            self._memories[member].tell()

    def settle(self) -> None:
        """Return once all that was finished is protected and stored, or a keeper has died."""
        assert eventually(lambda: self._is_settled() or self._has_died(), within_s=_SETTLE_S_MAX)

    def lose(self, number: int) -> None:
        """Lose a node: its keeper and its trainer."""
        self.nodes[number].kill()
        self.arenas.pop(number, None)
        self._memories[number].leave()

    def revive(self, number: int) -> None:
        """Start the keeper of a node again; its trainer lives and gives it back the memory."""
        node = self.nodes[number]
        node.kill()
        node.start()
        self._memories[number].tell()
        self.order()

    def left(self) -> list[DoomedNode]:
        """Return the nodes that live."""
        return [node for node in self.nodes if node.is_alive]

    def recover(self) -> Loaded:
        """Return what a run would go on from; every bit of it, and of what is older, is right.

        Every version that is said to be complete is loaded, on the first and on the last node.
        """
        left = self.left()
        inventories = [node.inventory() for node in left]
        bad: list[Source] = []
        for version in versions.complete(inventories, self.lineage):
            for near in {left[0], left[-1]}:
                bad += self.load(version, near)
        found = newest(left, self.lineage, self.stored())
        if found is None:
            return Loaded(0, "")
        return Loaded(found.step, found.source, tuple(bad))

    def stored(self) -> tuple[int, int]:
        """Return step and attempt of the newest checkpoint, of which every bit is right."""
        directory = f"{self._run}/{CHECKPOINTS}"
        found = find_committed(LocalStore(), directory, lineage=self.lineage)
        if found is None:
            return 0, 0
        _check(found.checkpoint)
        return found.step, found.checkpoint.attempt

    def newest(self) -> versions.Version:
        """Return the newest version that is complete in memory."""
        inventories = [node.inventory() for node in self.left()]
        return versions.complete(inventories, self.lineage)[0]

    def load(self, version: versions.Version, near: DoomedNode) -> list[Source]:
        """Load a version on a node, check every bit, and return what was bad."""
        places = places_of(version, self.nodes)
        sources = MemorySources(places, node=near.node, keeper_directory=near.directory)
        with closing(sources):
            sources.load(_check)
        return [*sources.damaged, *sources.unread]

    def _is_settled(self) -> bool:
        arenas = [self.arenas[member] for member in self.members if member in self.arenas]
        if any(arena.copy_behind() or arena.pinned() is not None for arena in arenas):
            return False
        try:
            inventories = [node.inventory() for node in self.left()]
        except (EOFError, OSError):
            return False
        # A rank knows only the reports of its present followers; here all followers count.
        parts = Counter(
            (part.held.attempt, part.held.step, part.held.rank)
            for one in inventories
            for part in one.parts
        )
        kept = Counter(
            (each.held.attempt, each.held.step) for one in inventories for each in one.parities
        )
        wanted = len(self.members) if self._protect.parities else 0
        newest = [held for arena in arenas if (held := arena.newest()) is not None]
        return all(
            parts[held.attempt, held.step, held.rank] > self._protect.copies
            and (held.attempt < self.attempt or kept[held.attempt, held.step] >= wanted)
            for held in newest
        )

    def _has_died(self) -> bool:
        return not all(self.nodes[member].is_alive for member in self.members)

    def _orders(self, peers: Mapping[int, Peer]) -> dict[int, KeeperOrder]:
        members = self.members
        num_copies = min(self._protect.copies, len(members) - 1)
        return {
            member: KeeperOrder(
                attempt=self.attempt,
                lineage=self.lineage,
                # In a ring: each has those before it.
                copies_of=tuple(
                    peers[members[place - distance]] for distance in range(1, num_copies + 1)
                ),
                parity=self._group_of(member, peers),
            )
            for place, member in enumerate(members)
        }

    def _group_of(self, member: int, peers: Mapping[int, Peer]) -> ParityGroup | None:
        if not self._protect.parities:
            return None
        size = self._protect.group_size or len(self.members)
        first = self.members.index(member) // size * size
        places = tuple(
            GroupPlace(peer=None if other == member else peers[other], ranks=(rank,))
            for rank, other in list(enumerate(self.members))[first : first + size]
        )
        return ParityGroup(attempt=self.attempt, tolerance=self._protect.parities, places=places)


def state_of(attempt: int, step: int) -> State:
    """Return the state after a step; of another attempt it is another one."""
    return make_state(1000 * attempt + step)


def _check(checkpoint: Checkpoint) -> None:
    """Assert that a version is bit for bit what was written."""
    state = state_of(checkpoint.attempt, checkpoint.step)
    need = local_tensors({fqn: value * 0 for fqn, value in state.items()}, 0, 1)
    load(checkpoint, need)
    for got, expected in zip(need, local_tensors(state, 0, 1), strict=True):
        where = (checkpoint.attempt, checkpoint.step, got.fqn)
        assert bytes(got.data) == bytes(expected.data), where
