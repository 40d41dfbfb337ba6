"""The snapshot memory of one node: arenas, descriptor and peer server, storage and copies.

The keeper's actor owns one. Each part has its own threads, so that a store that stalls or a silent
peer does not delay a report.
"""

import os
import threading
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from ucp_core.errors import UcpError
from ucp_core.storage import open_store
from workers.errors import WorkerError
from workers.keeper.arena_table import ArenaTable
from workers.keeper.budget import Budget
from workers.keeper.descriptor_server import DescriptorServer
from workers.keeper.peers import Mirrors, WireServer
from workers.keeper.persister import Persister
from workers.keeper.trainer_watch import dead_workers
from workers.memory import Arena, LocalPart, descriptor_socket, is_parity
from workers.parity import read_record
from workers.protocol import Covered, Held, Inventory, KeeperOrder, PartRef
from workers.settings import Settings

_SECRET_BYTES: Final = 32
#: Trainers run at Ray's 15. Sending competes with them, because loaders wait for it; copying only
#: uses the time that they leave.
_NICENESS_SENDING: Final = 15
_NICENESS_COPYING: Final = 19

#: Maximum number of lines of a report; people read them.
_NUM_MAX: Final = 32


class NodeMemory:
    """A keeper's services for snapshots, beside its watch of trainers.

    ``claim`` is the run's, until an order names a later one. Peers and loaders read at ``address``
    and must prove that they know ``secret``.
    """

    def __init__(
        self,
        *,
        node: str,
        host: str,
        directory: Path,
        run_url: str,
        settings: Settings,
        claim: int = 0,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        store, path = open_store(run_url)
        self._node = node
        self.secret = os.urandom(_SECRET_BYTES)
        self._problems = Problems()
        self._refused: set[str] = set()
        self._obeying = threading.Lock()
        self._budget = Budget(directory, settings.snapshot.node_memory_mib)
        self._table = ArenaTable(
            budget_bytes=self._budget.num_bytes,
            dead=partial(dead_workers, directory),
        )
        self._table.claim = claim
        self._wire = WireServer(
            self._table,
            host=host,
            secret=self.secret,
            bytes_per_s=settings.snapshot.send_mib_per_s << 20,
            niceness=_NICENESS_SENDING,
        )
        self.address = self._wire.address
        self._mirrors = Mirrors(self._table, _NICENESS_COPYING)
        self._persister = Persister(
            self._table, store, path, settings.checkpoint, self._problems.note
        )
        self._descriptors = DescriptorServer(
            descriptor_socket(directory), self._table, self._note_refused
        )

    @property
    def stored(self) -> tuple[int, int]:
        """Return the attempt and step of the newest commit seen in storage; 0, 0 if none."""
        return self._persister.stored

    def inventory(self) -> Inventory:
        """Return the parts of ranks that the node holds, own and copied, and the parities."""
        parts: list[PartRef] = []
        parities: list[PartRef] = []
        for name, arena in self._table.arenas().items():
            for held in arena.versions():
                ref = PartRef(node=self._node, arena=name, held=held)
                if not is_parity(name):
                    parts.append(ref)
                elif (covered := _covered(arena, held)) is not None:
                    parities.append(replace(ref, covered=covered))
        return Inventory(
            node=self._node,
            parts=tuple(parts),
            parities=tuple(parities),
            budget_bytes=self._budget.num_bytes,
        )

    def problems(self) -> tuple[str, ...]:
        """Return a line for each problem that reduces the requested protection."""
        silence = self._persister.silence
        found = (silence, *self._problems.lines(), *self._mirrors.problems())
        return tuple(line for line in found if line)[:_NUM_MAX]

    def fence(self, order: KeeperOrder) -> bool:
        """Refuse everything older than the order; return whether to obey the order."""
        if order.attempt < self._table.attempt:
            return False
        self._table.fence(order.attempt, order.lineage)
        self._table.claim = max(self._table.claim, order.claim)
        self._table.quarantine(order.bad)
        return True

    def obey(self, order: KeeperOrder) -> None:
        """Protect the nodes that the order names, and no others."""
        with self._obeying:
            if order.attempt == self._table.attempt:
                self._mirrors.follow(order.copies_of, order.parity)

    def flush(self, attempt: int, step: int) -> bool:
        """Store the node's parts of a version; return whether the version is committed."""
        return self._persister.flush(attempt, step)

    def tend(self, living: Collection[str]) -> None:
        """Free memory that is not needed, given the living workers of the node."""
        # The descriptor server's threads add entries in the meantime.
        for owner in list(self._refused):
            if owner.rpartition("/")[2] not in living:
                self._note_refused(owner, "")
        self._table.reap(living=living, stored_step=self.stored[1])

    def stop_storing(self) -> None:
        """Store nothing from now on, because the run is over; safe to repeat."""
        self._persister.close()

    def close(self) -> None:
        """Stop serving and free the memory."""
        self._descriptors.close()
        self._mirrors.stop()
        self.stop_storing()
        self._wire.close()
        for name in self._table.arenas():
            self._table.drop(name)
        self._budget.close()

    def _note_refused(self, owner: str, why: str) -> None:
        self._problems.note(f"memory of {owner}", why)
        if why:
            self._refused.add(owner)
        else:
            self._refused.discard(owner)


class Problems:
    """The problems of one keeper by subject. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: dict[str, str] = {}

    def note(self, subject: str, line: str) -> None:
        """Set the problem of a subject; "" clears it."""
        with self._lock:
            self._lines.pop(subject, None)
            if line:
                self._lines[subject] = line

    def lines(self) -> tuple[str, ...]:
        """Return the problems, newest first."""
        with self._lock:
            return tuple(reversed(self._lines.values()))


def _covered(arena: Arena, held: Held) -> Covered | None:
    """Return the parts that the parities in a buffer cover; None if it is damaged or was freed."""
    try:
        record = read_record(LocalPart(arena, held))
    except (UcpError, WorkerError, ValueError):
        return None
    return Covered(tolerance=record.tolerance, place=record.place, members=record.members)
