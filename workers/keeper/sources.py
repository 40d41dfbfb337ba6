"""Choose where to read the parts of a version in memory: near holders before far ones.

A part may be held on the node that wrote it and as copies on other nodes. If a holder fails,
because it is unreachable, overwritten or damaged, the next holder of the part is used and the
version is loaded again. A part without a holder is computed from the parities of its group, if
enough of them are left.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from ucp_core.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    StorageError,
    UcpError,
)
from ucp_core.native import Checkpoint
from ucp_core.reading import Mapped
from workers.errors import ArenaError, ParityError
from workers.keeper.peers import RemotePart, WireClient
from workers.memory import (
    Arena,
    LocalPart,
    MemoryTier,
    Part,
    ask_part,
    descriptor_socket,
    mapped_part,
    open_arena,
    open_version,
)
from workers.parity import damaged, lost_parts, read_record
from workers.protocol import (
    LOCAL_MEMORY,
    PARITY,
    PEER_MEMORY,
    Held,
    PartRef,
    Peer,
    Source,
)

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class MemorySources:
    """The holders of one version's parts, as one worker reaches them. Close it after use.

    Args:
        parts: Every holder of every rank's part, and of parities.
        keeper_directory: Directory of the node's keeper; None if it has none.

    Attributes:
        skipped: ``(which part, why)`` of the holders that failed.
        damaged: The failed holders whose bytes are not those that were written.
        unread: The other failed holders; also all holders of a version whose parts contradict each
            other.
        taken_bytes: Bytes read of the version that was loaded, by kind of source.
    """

    def __init__(
        self, parts: Sequence[PartRef], *, node: str, keeper_directory: Path | None
    ) -> None:
        near = node if keeper_directory is not None else ""
        self._left = sorted(parts, key=lambda part: part.node != near)
        self._near = near
        self._socket = descriptor_socket(keeper_directory or Path())
        self._arenas: dict[str, Arena] = {}
        self._clients: dict[Peer, WireClient] = {}
        self.skipped: list[tuple[str, str]] = []
        self.damaged: list[Source] = []
        self.unread: list[Source] = []
        self.taken_bytes: Counter[str] = Counter()

    def load(self, fill: Callable[[Checkpoint], _T]) -> _T:
        """Return the result of ``fill`` on the version; call it again if a holder fails.

        Raise ``UcpError`` if no holder of some part is left, or the parts do not belong together.
        """
        while True:
            chosen = self._choose()
            checkpoint = None
            try:
                checkpoint = open_version(chosen.parts)
                for part in chosen.parts.values():
                    part.sizes_bytes.clear()
                filled = fill(checkpoint)
            except (UcpError, ParityError) as error:
                self._reject(chosen, checkpoint, error)
                continue
            for part in chosen.parts.values():
                if size_bytes := sum(part.sizes_bytes):
                    self.taken_bytes[part.kind] += size_bytes
            return filled

    def close(self) -> None:
        """Close connections and arenas."""
        for client in self._clients.values():
            client.close()
        for arena in self._arenas.values():
            arena.close()

    def _choose(self) -> _Chosen:
        """Return the first holder of every part that can be opened, or sources to compute it."""
        parts: dict[int, _WatchedPart] = {}
        for place in list(self._left):
            rank = place.held.rank
            if rank >= 0 and rank not in parts and place in self._left:
                try:
                    parts[rank] = self._open(place)
                except ArenaError as error:
                    self._give_up_on([place], error)
        world_size = max((place.held.world_size for place in self._left), default=0)
        missing = [rank for rank in range(world_size or 1) if rank not in parts]
        if not missing:
            return _Chosen(parts)
        return self._compute(parts, missing)

    def _compute(self, parts: dict[int, _WatchedPart], missing: Sequence[int]) -> _Chosen:
        """Return the parts, with missing ones computed from the rest of their groups."""
        num_left = len(self._left)
        parities = self._open_parities()
        if len(self._left) < num_left:
            # The node that did not answer may also have been chosen for a part.
            return self._choose()
        # These are watched separately, because bytes read to compute a part do not count as taken.
        members = [_WatchedPart(part.place, part.part, part.kind) for part in parts.values()]
        reason = "there are no parities of it"
        computed: dict[int, _WatchedPart] = {}
        try:
            for part in lost_parts(parities, members):
                computed[part.held.rank] = _WatchedPart(None, part, PARITY)
        except ParityError as error:
            reason = str(error)
        except StorageError as error:
            # The node still answered when the record was read, so it failed since.
            self._give_up_on(_places(each for each in parities if each.is_lost), error)
            return self._choose()
        for rank in missing:
            if rank not in computed:
                raise CheckpointNotFoundError(
                    f"no readable memory has the part of rank {rank}, and it cannot be "
                    f"computed: {reason}",
                    rank=rank,
                )
        return _Chosen({**computed, **parts}, parities, members)

    def _open_parities(self) -> list[_WatchedPart]:
        """Return the parities whose record is intact; reject the others."""
        opened: list[_WatchedPart] = []
        for place in list(self._left):
            if place.held.rank < 0 and place in self._left:
                try:
                    parity = self._open(place)
                    read_record(parity)
                    opened.append(parity)
                except ParityError as error:
                    # Its checksum shows damage; an overwritten buffer raises another error.
                    self._give_up_on([place], error, is_damaged=True)
                except (ArenaError, StorageError) as error:
                    self._give_up_on([place], error)
        return opened

    def _open(self, place: PartRef) -> _WatchedPart:
        if place.node == self._near:
            arena = self._arenas.get(place.arena)
            if arena is None:
                arena = self._arenas[place.arena] = open_arena(self._socket, place.arena)
            return _WatchedPart(place, LocalPart(arena, place.held), LOCAL_MEMORY)
        peer = place.peer
        assert peer is not None, "a reader has the keepers' addresses"
        client = self._clients.get(peer)
        if client is None:
            client = WireClient((peer.host, peer.port), secret=peer.secret)
            self._clients[peer] = client
        return _WatchedPart(
            place, RemotePart(client, place.arena, place.held, is_unchecked=True), PEER_MEMORY
        )

    def _reject(
        self, chosen: _Chosen, checkpoint: Checkpoint | None, error: UcpError | ParityError
    ) -> None:
        every = [*chosen.parts.values(), *chosen.parities, *chosen.members]
        failed = _places(part for part in every if part.is_lost)
        part = _behind(chosen, checkpoint, error)
        if not failed and part is not None and part.place is not None:
            failed = [part.place]
        if failed:
            self._give_up_on(failed, error)
        elif chosen.parities and (part is not None or isinstance(error, ParityError)):
            self._reject_parities(chosen, error)
        else:
            self.unread += [place.source for place in _places(every)]
            raise error

    def _reject_parities(self, chosen: _Chosen, error: UcpError | ParityError) -> None:
        try:
            found = damaged(chosen.parities, chosen.members)
        except (UcpError, ParityError) as unread:
            error, found = unread, []
        found = found or [each for each in (*chosen.parities, *chosen.members) if each.is_lost]
        if not found:
            error = ParityError(f"one of them is damaged, but it is unknown which: {error}")
        self._give_up_on(_places(found or chosen.parities), error)

    def _give_up_on(
        self, places: Sequence[PartRef], error: Exception, *, is_damaged: bool = False
    ) -> None:
        away = {place.node for place in places if _is_silence(error)}
        for place in places:
            held = place.held
            what = f"of rank {held.rank}" if held.rank >= 0 else f"({place.arena})"
            name = f"step {held.step} {what} in the memory of node {place.node[:12]}"
            self.skipped.append((name, f"{type(error).__name__}: {error}"))
            log.warning("%s is not used: %s", name, error)
        # Do not ask a silent node for its other parts: each request would take as long.
        lost = [place for place in self._left if place in places or place.node in away]
        self._left = [place for place in self._left if place not in lost]
        is_damaged |= isinstance(error, CheckpointCorruptError)
        (self.damaged if is_damaged else self.unread).extend(place.source for place in lost)


@dataclass(slots=True, eq=False)
class _WatchedPart:
    """A part, or parities, that records the bytes read and a failure.

    ``place`` is None for a computed part.
    """

    place: PartRef | None
    part: Part
    kind: str
    #: Several readers append to this at once.
    sizes_bytes: deque[int] = field(default_factory=deque)
    is_lost: bool = False

    @property
    def held(self) -> Held:
        return self.part.held

    def fill(self, offset_bytes: int, targets: Sequence[memoryview]) -> None:
        try:
            self.part.fill(offset_bytes, targets)
        except StorageError:
            self.is_lost = True
            raise
        self.sizes_bytes.append(sum(map(len, targets)))

    def ahead(self, ranges: Sequence[tuple[int, int]]) -> None:
        ask_part(self.part, ranges)

    def mapped(self) -> Mapped | None:
        found = mapped_part(self.part)
        if found is None:
            return None

        def confirm(num_bytes: int) -> None:
            found.confirm(num_bytes)
            self.sizes_bytes.append(num_bytes)

        return Mapped(found.data, confirm)


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The sources from which a version is read."""

    parts: dict[int, _WatchedPart]  #: The part of every rank.
    parities: Sequence[_WatchedPart] = ()  #: The parities that some parts are computed from.
    members: Sequence[_WatchedPart] = ()  #: The parts that they are computed with.


def _behind(
    chosen: _Chosen, checkpoint: Checkpoint | None, error: UcpError | ParityError
) -> _WatchedPart | None:
    """Return the part that an error names, if any."""
    if "rank" in error.facts:
        return chosen.parts.get(error.facts["rank"])
    tier = checkpoint.store if checkpoint is not None else None
    if isinstance(tier, MemoryTier) and "path" in error.facts:
        return chosen.parts[tier.rank_of(error.facts["path"])]
    return None


def _places(parts: Iterable[_WatchedPart]) -> list[PartRef]:
    """Return the holders of parts, each once; a computed part has no holder."""
    return list(dict.fromkeys(part.place for part in parts if part.place is not None))


def _is_silence(error: Exception) -> bool:
    """Return whether a keeper could not be reached, as opposed to refusing."""
    if isinstance(error, ArenaError):
        return "path" in error.facts
    return isinstance(error, StorageError) and error.facts.get("refused") is False
