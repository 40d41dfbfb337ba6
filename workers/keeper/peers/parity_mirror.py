"""Keep parities of a group of nodes instead of copies: each of k nodes keeps 1/(k-1) of a part.

Every node of the group runs one of these. It waits until all ranks of the group have finished the
same version, reads the blocks that its parities cover from the other nodes, and keeps the parities.
Each byte is sent once, or twice for double parity. Ranks take no snapshot until every node of their
group has made its parities of the newest one.

Row i of a group is the i-th rank of each node; a node with fewer ranks is not in the last rows. If
the ranks of a row are replicas, each rank has made its parity itself, and only the records of the
other parts are sent.

``workers.parity.rebuild`` reads parts from the rest of a group.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ucp_core.errors import StorageError
from workers.errors import ArenaError, ParityError
from workers.keeper.arena_table import ArenaTable
from workers.keeper.peers.client import RemotePart, WireClient
from workers.keeper.peers.frames import Listed
from workers.keeper.peers.replication import POLL_S, Replication
from workers.memory import Arena, LocalPart, Part, is_copy, is_parity
from workers.parity import ParityRecord, buffer_bytes, complete_draft, write
from workers.protocol import Held, Member, ParityGroup

#: Takes the place of a node in the names of copies; parities are never copied (``is_parity``).
_PREFIX: Final = "parity"


def parity_name(row: int, attempt: int, number: int = 0) -> str:
    """Return the name of the arena with a node's parities of a row.

    ``number`` counts the row's earlier arenas, which became too small.
    """
    return f"{_PREFIX}/{row}{f'-{number}' if number else ''}.{attempt}"


@dataclass(frozen=True, slots=True)
class _FoundVersion:
    """A version of a rank, of the group's attempt."""

    arena: str
    body_bytes: int
    held: Held


#: The versions of a node by rank, then by step.
_Versions = Mapping[int, Mapping[int, _FoundVersion]]


class ParityMirror(Replication):
    """Keeps this node's parities of a group, under ``parity_name``, until ``stop``."""

    def __init__(self, table: ArenaTable, group: ParityGroup, niceness: int = 0) -> None:
        peers = {
            index: WireClient((place.peer.host, place.peer.port), secret=place.peer.secret)
            for index, place in enumerate(group.places)
            if place.peer is not None and place.ranks
        }
        what = f"protecting a group of {len(group.places)} nodes by parity"
        super().__init__(what, peers, niceness)
        self._table = table
        self._group = group
        #: The newest version that all ranks have, with parities on all nodes.
        self._kept: tuple[int, int] | None = None
        self._thread.start()

    def stop(self) -> None:
        """Stop at once; the parities stay."""
        self._stopping.set()
        # The thread may be waiting for this node's own ranks.
        self._table.tell()
        super().stop()

    def _replicate(self) -> None:
        # A node without ranks keeps parities, but contributes nothing.
        news = {index: -1 for index, place in enumerate(self._group.places) if place.ranks}
        listed: dict[int, Mapping[str, Listed]] = {}
        steps = dict.fromkeys(news, 0)
        versions: dict[int, _Versions] = {}
        made = 0
        while not self._stopping.is_set():
            newest = max(steps.values())
            for place, after in list(news.items()):
                # This also sends a request to a node with the newest version, to show that this
                # node follows it.
                waits = newest <= made or steps[place] < newest
                timeout_s = POLL_S / len(news) if waits else 0.0
                news[place], listed[place] = self._list(place, after, timeout_s)
                versions[place] = _of_attempt(listed[place], self._group.attempt)
                steps[place] = _newest(versions[place], self._group.places[place].ranks)
            step = min(steps.values())
            self._kept = _kept(listed, self._group.attempt)
            if step > made and self._make(versions, step):
                made = step
            self._tell(listed, made)
            self._is_well()

    def _list(self, place: int, news: int, timeout_s: float) -> tuple[int, Mapping[str, Listed]]:
        if place in self._clients:
            listing = self._clients[place].list_arenas(after=news, timeout_s=timeout_s)
            return listing.news, listing.arenas
        news = self._table.wait_news(news, timeout_s)
        own = {name: arena for name, arena in self._table.arenas().items() if not is_copy(name)}
        return news, {
            name: Listed(arena.body_bytes, tuple(arena.versions()), arena.kept())
            for name, arena in own.items()
        }

    def _make(self, versions: Mapping[int, _Versions], step: int) -> bool:
        """Return whether the parities of a step exist for all rows; make those that are missing."""
        for row in range(self._group.num_rows):
            found = {
                index: versions[index][place.ranks[row]].get(step)
                for index, place in enumerate(self._group.places)
                if row < len(place.ranks)
            }
            there = {index: each for index, each in found.items() if each is not None}
            if len(there) < len(found):
                # Some ranks have overwritten it, so there is a newer version.
                return False
            try:
                if self._group.over_replicas:
                    self._complete_row(row, step, there)
                else:
                    self._make_row(row, step, there)
            except StorageError as error:
                if error.facts.get("refused", True):
                    # The version was overwritten: the next listing shows the current one.
                    return False
                raise
            except ValueError:
                # An arena was freed in the meantime.
                return False
        return True

    def _complete_row(self, row: int, step: int, found: Mapping[int, _FoundVersion]) -> None:
        """Add the members' records to the parity that this node's rank has made."""
        rank = self._group.places[self._group.place].ranks[row]
        arena, made = self._made(rank, step)
        parts = {index: self._part(index, each) for index, each in found.items()}
        try:
            complete_draft(made, parts, arena.body(made.held.buffer))
        except ParityError as error:
            raise ArenaError(f"the parity of rank {rank} cannot be used: {error}") from error

    def _part(self, index: int, found: _FoundVersion) -> Part:
        if index in self._clients:
            return RemotePart(self._clients[index], found.arena, found.held)
        own = self._table.arena(found.arena)
        if own is None:
            raise StorageError(f"{found.arena} was freed", arena=found.arena)
        return LocalPart(own, found.held)

    def _made(self, rank: int, step: int) -> tuple[Arena, LocalPart]:
        """Return the parity that a rank of this node has made from its replica.

        Raise ``ArenaError`` if there is none. A rank makes it before it finishes its own part.
        """
        version = (self._group.attempt, step, -1 - rank)
        for name, arena in self._table.arenas().items():
            for held in arena.versions() if is_parity(name) else ():
                if (held.attempt, held.step, held.rank) == version:
                    return arena, LocalPart(arena, held)
        raise ArenaError(
            f"rank {rank} has made no parity of step {step}: it may have been refused memory",
            rank=rank,
        )

    def _make_row(self, row: int, step: int, found: Mapping[int, _FoundVersion]) -> None:
        group = self._group
        places = range(len(group.places))
        sizes = [found[index].body_bytes if index in found else 0 for index in places]
        arena = self._reserve(row, buffer_bytes(sizes, tolerance=group.tolerance))
        if any((held.attempt, held.step) == (group.attempt, step) for held in arena.versions()):
            return
        world_size = next(iter(found.values())).held.world_size
        record = ParityRecord(
            attempt=group.attempt,
            step=step,
            world_size=world_size,
            tolerance=group.tolerance,
            place=group.place,
            members=tuple(_member(found.get(index)) for index in places),
        )
        others = {index: each for index, each in found.items() if index != group.place}
        parts = {index: self._part(index, each) for index, each in others.items()}
        buffer = arena.choose(self._table.lineage, kept=self._kept)
        # Not a rank, so that a reader cannot mistake the parity for a rank's part.
        rank = -1 - group.place
        arena.begin(buffer, attempt=group.attempt, step=step, rank=rank, world_size=world_size)
        data_bytes, record_bytes = write(record, parts, arena.body(buffer))
        arena.finish(buffer, data_bytes=data_bytes, record_bytes=record_bytes)

    def _reserve(self, row: int, body_bytes: int) -> Arena:
        """Return memory for parities of a row; larger parts get a new arena beside the old ones.

        The old arenas protect the older versions until the attempt is over.
        """
        names = (parity_name(row, self._group.attempt, number) for number in itertools.count())
        found = ((name, self._table.arena(name)) for name in names)
        name = next(name for name, one in found if one is None or one.body_bytes >= body_bytes)
        return self._table.reserve(name, body_bytes=body_bytes)

    def _tell(self, listed: Mapping[int, Mapping[str, Listed]], made: int) -> None:
        """Report to the peers the newest versions that their ranks need not wait for."""
        for place, client in self._clients.items():
            newest = {name: each.parts[-1] for name, each in listed[place].items() if each.parts}
            safe = {
                name: held
                for name, held in newest.items()
                if held.attempt != self._group.attempt or held.step <= made
            }
            if news := self._news_for(place, safe):
                client.note_copied(news)


def _of_attempt(arenas: Mapping[str, Listed], attempt: int) -> _Versions:
    versions: dict[int, dict[int, _FoundVersion]] = {}
    for name, listed in arenas.items():
        for held in listed.parts:
            if held.attempt == attempt:
                found = _FoundVersion(name, listed.body_bytes, held)
                versions.setdefault(held.rank, {})[held.step] = found
    return versions


def _newest(versions: _Versions, ranks: Sequence[int]) -> int:
    """Return the newest step that all of a node's ranks have finished; 0 if there is none."""
    return min(max(versions.get(rank, {0: None})) for rank in ranks)


def _kept(listed: Mapping[int, Mapping[str, Listed]], attempt: int) -> tuple[int, int] | None:
    """Return the version that no rank overwrites, although a rank may already name a newer one.

    Ranks of an older attempt are ignored.
    """
    said = [each.kept for arenas in listed.values() for each in arenas.values()]
    return min((kept for kept in said if kept is not None and kept[0] == attempt), default=None)


def _member(found: _FoundVersion | None) -> Member | None:
    if found is None:
        return None
    held = found.held
    return Member(rank=held.rank, data_bytes=held.data_bytes, record_bytes=held.record_bytes)
