"""Copy the versions of another node's ranks, so that losing that node costs no version.

A mirror follows one peer's keeper. It copies the newest version of each arena, skips missed ones,
and reads straight into a buffer of its own memory. The ranks there take no snapshot while their
newest one is not copied: they skip it instead of waiting. If they take one nevertheless, both sides
keep the newest version that all ranks have, and report it. When the peer is gone, its copies stay,
and this node serves them.

``workers.keeper.peers.server`` lists and sends versions, and ``workers.memory.arena`` keeps them.
"""

import time
from collections.abc import Sequence
from typing import Final, TypeAlias

from ucp_core.errors import StorageError
from workers.errors import ArenaError
from workers.keeper.arena_table import ArenaTable
from workers.keeper.peers.client import WireClient
from workers.keeper.peers.frames import Listed
from workers.keeper.peers.parity_mirror import ParityMirror
from workers.keeper.peers.replication import POLL_S, Replication
from workers.keeper.peers.streams import Streams
from workers.memory import Arena, copy_name, counts
from workers.protocol import Held, ParityGroup, Peer

Lineage: TypeAlias = Sequence[tuple[int, int]]

#: Memory that was refused is requested again after this: other arenas may be gone by then.
_REFUSED_S: Final = 10.0
#: After this many copies in a row that were overwritten while being made, a problem is reported.
_OVERTAKEN_MAX: Final = 2


def wanted(parts: Sequence[Held], lineage: Lineage) -> Held | None:
    """Return the version of an arena to copy, which is the newest that counts."""
    counting = [part for part in parts if counts(part, lineage)]
    return max(counting, key=lambda part: (part.attempt, part.step), default=None)


class Mirror(Replication):
    """Copies the newest versions of one peer's ranks, under ``copy_name``, until ``stop``."""

    def __init__(
        self,
        table: ArenaTable,
        peer: Peer,
        secret: bytes,
        niceness: int = 0,
    ) -> None:
        address = (peer.host, peer.port)
        self._client = WireClient(address, secret=secret)
        self._streams = Streams(self._client, address, secret=secret, niceness=niceness)
        what = f"copying the snapshots of node {peer.node}"
        super().__init__(what, {0: self._client}, niceness)
        self._table = table
        self._peer = peer
        #: Arenas without memory, and when to request it again.
        self._refused: dict[str, float] = {}
        #: Number of overtaken copies in a row, by arena.
        self._overtaken: dict[str, int] = {}
        self._thread.start()

    def stop(self) -> None:
        """Stop copying at once; finished copies stay."""
        self._streams.abort()
        super().stop()
        self._table.note_listed(self._peer.node, ())

    def _hang_up(self) -> None:
        self._streams.close()
        super()._hang_up()

    def _replicate(self) -> None:
        news, copied = -1, dict[str, Held]()
        while not self._stopping.is_set():
            now_s = time.monotonic()
            without = {name for name, until_s in self._refused.items() if now_s < until_s}
            listing = self._client.list_arenas(
                after=news, timeout_s=POLL_S, without=without, copied=copied
            )
            news = listing.news
            self._table.note_listed(self._peer.node, listing.arenas)
            for gone in self.problems.keys() - listing.arenas.keys():
                self._note_problem(gone, "")
            arenas = listing.arenas.items()
            there = [name for name, x in arenas if name not in without and self._copy(name, x)]
            copied = self._news_for(0, {name: listing.arenas[name].parts[-1] for name in there})
            self._is_well()

    def _copy(self, name: str, listed: Listed) -> bool:
        """Copy what is missing; return whether the version to copy from this listing is copied."""
        source = wanted(listed.parts, self._table.lineage)
        if source is None:
            return bool(listed.parts)
        if source.data_bytes + source.record_bytes > listed.body_bytes:
            raise StorageError(f"{name} is listed with more bytes than it can hold", arena=name)
        target = self._target(name, listed.body_bytes)
        if target is None:
            return False
        try:
            is_there = any(_content(held) == _content(source) for held in target.versions())
            return is_there or self._read(name, source, target, listed.kept)
        except ValueError:
            # The arena was freed in the meantime: the next listing shows it.
            return False

    def _target(self, name: str, body_bytes: int) -> Arena | None:
        try:
            arena = self._table.reserve(copy_name(self._peer.node, name), body_bytes=body_bytes)
        except ArenaError as error:
            self._note_problem(name, f"{name} of node {self._peer.node} is not copied: {error}")
            self._refused[name] = time.monotonic() + _REFUSED_S
            return None
        if self._refused.pop(name, None) is not None:
            self._note_problem(name, "")
        return arena

    def _read(self, name: str, source: Held, target: Arena, kept: tuple[int, int] | None) -> bool:
        buffer = target.choose(self._table.lineage, kept=kept)
        target.begin(
            buffer,
            attempt=source.attempt,
            step=source.step,
            rank=source.rank,
            world_size=source.world_size,
        )
        size_bytes = source.data_bytes + source.record_bytes
        try:
            self._streams.read(name, source, target.body(buffer)[:size_bytes])
        except StorageError as error:
            if error.facts["refused"]:
                # The version was overwritten or freed: the next listing shows the current ones.
                self._note_overtaken(name, source)
                return False
            raise
        if self._overtaken.pop(name, None) is not None:
            self._note_problem(name, "")
        target.finish(buffer, data_bytes=source.data_bytes, record_bytes=source.record_bytes)
        return True

    def _note_overtaken(self, name: str, source: Held) -> None:
        """Report ranks that outrun their copies; once may happen in a new attempt."""
        self._overtaken[name] = self._overtaken.get(name, 0) + 1
        if self._overtaken[name] >= _OVERTAKEN_MAX:
            self._note_problem(
                name,
                f"{name} of node {self._peer.node} is written faster than it can be copied, last "
                f"after step {source.step}: if that node is lost, the run goes back to an older "
                "copy, or to storage; raise snapshot.every_steps, or give the nodes a faster link",
            )


class Mirrors:
    """The mirrors and the parity mirror of one keeper, as its newest order names them."""

    def __init__(self, table: ArenaTable, niceness: int = 0) -> None:
        self._niceness = niceness
        self._table = table
        self._running: dict[Peer | ParityGroup, Replication] = {}

    def follow(self, peers: Sequence[Peer], group: ParityGroup | None = None) -> None:
        """Copy only from these peers and keep parities only of this group; keep running mirrors."""
        wanted_now: list[Peer | ParityGroup] = list(peers)
        if group is not None:
            wanted_now.append(group)
        for each in self._running.keys() - set(wanted_now):
            self._running.pop(each).stop()
        for each in wanted_now:
            if each not in self._running:
                # If no thread can be started, the next order with the same peers tries again.
                self._running[each] = (
                    Mirror(self._table, each, each.secret, self._niceness)
                    if isinstance(each, Peer)
                    else ParityMirror(self._table, each, self._niceness)
                )

    def problems(self) -> list[str]:
        """Return the current problems of copies and parities, one line each."""
        return [line for one in list(self._running.values()) for line in one.problems.values()]

    def stop(self) -> None:
        """Stop following; copies and parities stay."""
        self.follow(())


def _content(held: Held) -> tuple[int, ...]:
    about = held.attempt, held.step, held.rank, held.world_size
    return (*about, held.data_bytes, held.record_bytes)
