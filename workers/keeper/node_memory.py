"""The snapshot memory of one node: slots, door, network, storage and copies, put together.

The keeper's actor owns one. Everything here runs in threads of its own, so that neither a store
that stalls nor a peer that is silent delays a report.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Final

from ucp_core.errors import UcpError
from ucp_core.storage import open_store
from workers.errors import WorkerError
from workers.keeper.descriptor_server import DescriptorServer
from workers.keeper.peers import Mirrors, ParityMirror, WireServer
from workers.keeper.persister import Persister
from workers.keeper.slots import NodeSlots, available_bytes
from workers.keeper.watch import dead_workers
from workers.memory import Arena, LocalPart, descriptor_socket, is_parity
from workers.parity import read_record
from workers.protocol import Held, HeldParity, HeldPart, Inventory, KeeperOrder, ParityGroup
from workers.settings import Settings

__all__ = ["NodeMemory", "Problems", "budget_bytes"]

_SECRET_BYTES: Final = 32
_BUDGET_NAME: Final = "budget"
#: Ray's workers run at 15, and so do trainers: sending takes a share beside them, because loaders
#: wait for it too, and copying what they leave.
_NICENESS_SENDING: Final = 15
_NICENESS_COPYING: Final = 19

#: How long a problem is reported that nobody says the end of.
_TOLD_S: Final = 60.0
#: A line is for people; a thousand of them are for nobody.
_NUM_MAX: Final = 32


class NodeMemory:
    """What a keeper has beside its watch when snapshots are taken.

    Args:
        node: Ray node id.
        host: Address of this node that its peers reach.
        directory: Of the node's pages and rings; the door is there.
        run_url: The run directory.
        settings: Of the training.

    Attributes:
        secret: What peers and loaders have to know.

    Raises:
        OSError: No socket could be opened.
        StorageError: The run directory cannot be opened.
    """

    def __init__(
        self, *, node: str, host: str, directory: Path, run_url: str, settings: Settings
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        store, path = open_store(run_url)
        self._node = node
        self.secret = os.urandom(_SECRET_BYTES)
        self._problems = Problems()
        self._refused: set[str] = set()
        self._obeying = threading.Lock()
        self._budget_bytes = budget_bytes(directory, settings.snapshot.node_memory_mib)
        self._slots = NodeSlots(
            budget_bytes=self._budget_bytes,
            dead=partial(dead_workers, directory),
        )
        self._wire = WireServer(
            self._slots,
            host=host,
            secret=self.secret,
            bytes_per_s=settings.snapshot.send_mib_per_s << 20,
            niceness=_NICENESS_SENDING,
        )
        self._mirrors = Mirrors(self._slots, self._problems.tell, _NICENESS_COPYING)
        self._group: ParityGroup | None = None
        self._parity_mirror: ParityMirror | None = None
        self._persister = Persister(
            self._slots, store, path, settings.checkpoint, self._problems.note
        )
        self._door = DescriptorServer(descriptor_socket(directory), self._slots, self._note_refused)

    @property
    def address(self) -> tuple[str, int]:
        """Return where peers and loaders read."""
        return self._wire.address

    @property
    def stored_step(self) -> int:
        """Return the newest step that was seen committed to storage; 0 if none."""
        return self._persister.stored_step

    def inventory(self) -> Inventory:
        """Return what is held of ranks, own and copies, and of groups."""
        host, port = self.address
        parts: list[HeldPart] = []
        parities: list[HeldParity] = []
        for name, arena in self._slots.arenas().items():
            for held in arena.versions():
                if not is_parity(name):
                    parts.append(HeldPart(arena=name, held=held))
                elif (parity := _parity(name, arena, held)) is not None:
                    parities.append(parity)
        return Inventory(
            node=self._node,
            host=host,
            port=port,
            parts=tuple(parts),
            parities=tuple(parities),
            budget_bytes=self._budget_bytes,
        )

    def problems(self) -> tuple[str, ...]:
        """Return what protects less than was asked for, a line each."""
        silence = self._persister.silence
        return (*([silence] if silence else []), *self._problems.lines())

    def fence(self, order: KeeperOrder) -> bool:
        """Refuse what is older than the order, at once; return whether it is to be obeyed."""
        if order.attempt < self._slots.attempt:
            return False
        self._slots.fence(order.attempt, order.lineage)
        self._slots.quarantine(order.bad)
        return True

    def obey(self, order: KeeperOrder) -> None:
        """Protect whom the order names; may take as long as it takes to leave others."""
        with self._obeying:
            if order.attempt == self._slots.attempt:
                self._mirrors.follow(order.copies_of)
                self._protect(order.parity)

    def flush(self, attempt: int, step: int) -> bool:
        """Store what is held of a version; return whether it is committed then."""
        return self._persister.flush(attempt, step)

    def tend(self, living: Collection[str]) -> None:
        """Let go of memory that nobody needs any more.

        Args:
            living: Workers of this node whose process is there.
        """
        # Threads of the door note others meanwhile.
        for owner in list(self._refused):
            if owner.rpartition("/")[2] not in living:
                self._note_refused(owner, "")
        self._slots.reap(living=living, stored_step=self.stored_step)

    def stop_storing(self) -> None:
        """Store nothing any more: the run is over. Safe to call again."""
        self._persister.close()

    def close(self) -> None:
        """Serve nobody any more and let go of the memory."""
        self._door.close()
        self._mirrors.stop()
        self._protect(None)
        self.stop_storing()
        self._wire.close()
        for name in self._slots.arenas():
            self._slots.drop(name)

    def _protect(self, group: ParityGroup | None) -> None:
        """Keep parities of this group and of no other; of the same one it goes on."""
        if group == self._group:
            return
        if self._parity_mirror is not None:
            self._parity_mirror.stop()
            self._parity_mirror = self._group = None
        if group is not None:
            self._parity_mirror = ParityMirror(
                self._slots, group, self._problems.tell, _NICENESS_COPYING
            )
        # Last: where no thread was left, the same order is obeyed when it comes again.
        self._group = group

    def _note_refused(self, owner: str, why: str) -> None:
        self._problems.note(f"memory of {owner}", why)
        if why:
            self._refused.add(owner)
        else:
            self._refused.discard(owner)


class Problems:
    """The problems of one keeper by subject. Safe to call from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: dict[str, str] = {}
        self._told: dict[str, float] = {}

    def note(self, subject: str, line: str) -> None:
        """Take note of how a subject is; "" if it is in no problem any more."""
        with self._lock:
            self._lines.pop(subject, None)
            if line:
                self._lines[subject] = line

    def tell(self, line: str) -> None:
        """Take note of something that happened; it is forgotten after a while."""
        with self._lock:
            self._told[line] = time.monotonic()

    def lines(self) -> tuple[str, ...]:
        """Return what there is, the newest first where it is too much."""
        with self._lock:
            now_s = time.monotonic()
            self._told = {k: at_s for k, at_s in self._told.items() if now_s - at_s < _TOLD_S}
            lines = dict.fromkeys([*self._lines.values(), *self._told])
        return tuple(reversed(lines))[:_NUM_MAX]


def _parity(name: str, arena: Arena, held: Held) -> HeldParity | None:
    """Return what a slot of parities is of; None if it is damaged, or was let go of."""
    try:
        record = read_record(LocalPart(arena, held))
    except (UcpError, WorkerError, ValueError):
        return None
    return HeldParity(
        arena=name,
        held=held,
        num_parities=record.num_parities,
        place=record.place,
        members=record.members,
    )


def budget_bytes(directory: Path, node_memory_mib: int) -> int:
    """Return what a node's snapshots may take.

    Half of what a node has available when its first keeper starts: to one that starts later the
    snapshots that are there already would look like memory that is not.

    Args:
        directory: Where the answer is kept for a keeper that is started again.
        node_memory_mib: What the user said; 0 leaves it to the node.
    """
    if node_memory_mib:
        return node_memory_mib << 20
    path = directory / _BUDGET_NAME
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text())
    found = available_bytes() // 2
    path.write_text(str(found))
    return found
