"""Copies of what the ranks of another node write: the loss of that node costs no version.

A mirror follows one peer's keeper. It always takes the newest version of each arena and skips
what it has missed, straight from the connection into a slot of its own memory. The ranks over
there take no snapshot while their newest one is not copied, so a mirror hardly ever chases them,
and they never wait for it either. Once they go on without, both sides keep the newest version that
all have, and it is problem. When the peer is gone its copies stay and are served from here.

Counterparts: ``workers.keeper.peers.server`` lists and sends, ``workers.memory.arena`` keeps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from ucp_core.errors import StorageError
from workers.errors import ArenaError
from workers.keeper.peers.client import WireClient
from workers.keeper.peers.frames import Listed
from workers.keeper.peers.replication import POLL_S, Replication
from workers.keeper.slots import NodeSlots
from workers.memory import Arena, copy_name, counts
from workers.protocol import Held, Peer

__all__ = ["Mirror", "Mirrors", "wanted"]

Lineage: TypeAlias = Sequence[tuple[int, int]]

#: Memory that was refused is asked for again, other arenas may have been let go of.
_REFUSED_S: Final = 10.0
#: It is problem when so many copies in a row were written over while they were made.
_OVERTAKEN_MAX: Final = 2


def wanted(parts: Sequence[Held], lineage: Lineage) -> Held | None:
    """Return which of an arena's versions to hold a copy of: the newest that counts."""
    counting = [part for part in parts if counts(part, lineage)]
    return max(counting, key=lambda part: (part.attempt, part.step), default=None)


class Mirror(Replication):
    """Copies the newest versions of one peer's ranks in a thread of its own until ``stop``.

    Args:
        slots: Takes the copies, under ``copy_name`` of the peer's node and the arena; its lineage
            says which versions are dead.
        peer: Whose.
        secret: Of the peer's keeper.
        on_problem: Called from the thread with a line for each thing that is in the way, and twice
            a minute again while it is.
        niceness: Of the thread.
    """

    def __init__(
        self,
        slots: NodeSlots,
        peer: Peer,
        secret: bytes,
        on_problem: Callable[[str], object],
        niceness: int = 0,
    ) -> None:
        self._client = WireClient((peer.host, peer.port), secret=secret)
        what = f"copying what the ranks of node {peer.node} write"
        super().__init__(what, [self._client], on_problem, niceness)
        self._slots = slots
        self._peer = peer
        #: What the peer knows to be copied, by arena; and how many connections were made by then.
        self._told: dict[str, Held] = {}
        self._told_over = 0
        #: Arenas that there is no memory for, and when to ask again.
        self._refused: dict[str, float] = {}
        #: How many copies in a row were overtaken, by arena.
        self._overtaken: dict[str, int] = {}
        self._start()

    def stop(self) -> None:
        """Copy nothing any more, at once; what was copied stays."""
        super().stop()
        self._slots.note_listed(self._peer.node, ())

    def _replicate(self) -> None:
        news, copied = -1, dict[str, Held]()
        while not self._stopping.is_set():
            now_s = time.monotonic()
            without = {name for name, until_s in self._refused.items() if now_s < until_s}
            listing = self._client.list_arenas(
                after=news, timeout_s=POLL_S, without=without, copied=copied
            )
            news = listing.news
            self._slots.note_listed(self._peer.node, listing.arenas)
            arenas = listing.arenas.items()
            there = [name for name, x in arenas if name not in without and self._copy(name, x)]
            copied = self._news_of({name: listing.arenas[name].parts[-1] for name in there})
            self._is_well()

    def _news_of(self, newest: dict[str, Held]) -> dict[str, Held]:
        """Return which of these the peer has to be told of: nothing before need be waited for.

        All of them over a new connection: to go on with a copy may have taken one.
        """
        if self._told_over != self._client.num_connections:
            self._told_over = self._client.num_connections
            self._told.clear()
        news = {name: held for name, held in newest.items() if self._told.get(name) != held}
        self._told.update(news)
        return news

    def _copy(self, name: str, listed: Listed) -> bool:
        """Return whether a copy is held of all that counts and is listed."""
        source = wanted(listed.parts, self._slots.lineage)
        if source is None:
            return bool(listed.parts)
        if source.data_bytes + source.record_bytes > listed.body_bytes:
            raise StorageError(f"{name} is said to hold more than it can", arena=name)
        target = self._target(name, listed.body_bytes)
        if target is None:
            return False
        try:
            return _holds(target, source) or self._read(name, source, target, listed.kept)
        except ValueError:
            # The arena was let go of under our hands: the next listing finds that out.
            return False

    def _target(self, name: str, body_bytes: int) -> Arena | None:
        try:
            arena = self._slots.reserve(copy_name(self._peer.node, name), body_bytes=body_bytes)
        except ArenaError as error:
            self._report_problem(name, f"{name} of node {self._peer.node} is not copied: {error}")
            self._refused[name] = time.monotonic() + _REFUSED_S
            return None
        self._refused.pop(name, None)
        self._reported.pop(name, None)
        return arena

    def _read(self, name: str, source: Held, target: Arena, kept: tuple[int, int] | None) -> bool:
        slot = target.choose(self._slots.lineage, kept=kept)
        target.begin(
            slot,
            attempt=source.attempt,
            step=source.step,
            rank=source.rank,
            world_size=source.world_size,
        )
        size_bytes = source.data_bytes + source.record_bytes
        try:
            self._client.read(name, source, 0, [target.body(slot)[:size_bytes]])
        except StorageError as error:
            if error.facts["refused"]:
                # Written over, or let go of: the next listing has what is there now.
                self._note_overtaken(name, source)
                return False
            raise
        self._overtaken.pop(name, None)
        self._reported.pop(name, None)
        target.finish(slot, data_bytes=source.data_bytes, record_bytes=source.record_bytes)
        return True

    def _note_overtaken(self, name: str, source: Held) -> None:
        """Tell of ranks that did not wait any longer; once it is what a new attempt does."""
        self._overtaken[name] = self._overtaken.get(name, 0) + 1
        if self._overtaken[name] >= _OVERTAKEN_MAX:
            self._report_problem(
                name,
                f"{name} of node {self._peer.node} is written faster than it can be copied, last "
                f"after step {source.step}: if that node is lost, the run goes back to an older "
                "copy, or to storage; raise snapshot.every_steps, or give the nodes a faster link",
            )


class Mirrors:
    """The mirrors of one keeper: of the peers that its newest order names.

    Args:
        slots: Takes the copies.
        on_problem: See ``Mirror``.
        niceness: See ``Mirror``.
    """

    def __init__(
        self, slots: NodeSlots, on_problem: Callable[[str], object], niceness: int = 0
    ) -> None:
        self._niceness = niceness
        self._slots = slots
        self._on_problem = on_problem
        self._mirrors: dict[Peer, Mirror] = {}

    def follow(self, peers: Sequence[Peer]) -> None:
        """Follow these and nobody else; who is followed already goes on."""
        for peer in self._mirrors.keys() - set(peers):
            self._mirrors.pop(peer).stop()
        for peer in peers:
            if peer not in self._mirrors:
                self._mirrors[peer] = Mirror(
                    self._slots, peer, peer.secret, self._on_problem, self._niceness
                )

    def stop(self) -> None:
        """Follow nobody; what was copied stays."""
        for peer in list(self._mirrors):
            self._mirrors.pop(peer).stop()


def _holds(arena: Arena, source: Held) -> bool:
    """Return whether a copy is there, which only differs in where it is."""
    return any(_content(held) == _content(source) for held in arena.versions())


def _content(held: Held) -> tuple[int, ...]:
    about = held.attempt, held.step, held.rank, held.world_size
    return (*about, held.data_bytes, held.record_bytes)
