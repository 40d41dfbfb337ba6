"""How the virtual cluster loads a version: holder after holder, and nothing that is damaged.

An attempt is given the holders that the controller knows of, as the shell gives them. Damaged
bytes are only noticed when they are read: by the rank that reads them, which says so when it
leaves, or when it has formed because another holder had the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orchestrator.core import StartAttempt
from orchestrator.policies import Holding, quarantine, versions
from workers.protocol import Inventory, Source, held_source, stored_source

if TYPE_CHECKING:
    from orchestrator.simulation.world.cluster import SimCluster


@dataclass(slots=True)
class Loading:
    """What one attempt loads from.

    Attributes:
        version: (step, attempt) to load; (0, 0) if there is nothing to load.
        places: The holders of its parts in memory; None if it is to come from storage. There may
            be none at all where all parts can be computed from parities.
        bad: What the controller leaves out.
        is_done: Whether it is known how it went.
        is_loaded: How it went.
        damaged: By member: what it found damaged.
        unread: By member: what it could not read.
    """

    version: tuple[int, int]
    places: tuple[Holding, ...] | None
    bad: tuple[Source, ...]
    is_done: bool = False
    is_loaded: bool = True
    damaged: dict[str, tuple[Source, ...]] = field(default_factory=dict)
    unread: dict[str, tuple[Source, ...]] = field(default_factory=dict)

    def sources(self) -> list[Source]:
        """Return what may be read from."""
        if self.places is not None:
            return [_source(place) for place in self.places]
        return [stored_source(*self.version)] if self.version[0] else []


def begin(cluster: SimCluster, action: StartAttempt) -> Loading:
    """Find the holders of the version that an attempt is to resume from."""
    version = (action.resume_step, action.resume_attempt)
    held = quarantine.good(_inventories(cluster), action.bad)
    held_parts = [
        found.parts
        for found in versions.complete(held, ())
        if (found.step, found.attempt) == version
    ]
    return Loading(version=version, places=held_parts[0] if held_parts else None, bad=action.bad)


def load(cluster: SimCluster, loading: Loading, members: list[str]) -> None:
    """Read everything; each source that fails is found so by one of the members."""
    loading.is_done = True
    if not loading.version[0]:
        return
    damaged: list[Source] = []
    unread: list[Source] = []
    if loading.places is not None:
        loading.is_loaded = _from_memory(cluster, loading, damaged, unread)
    else:
        source = stored_source(*loading.version)
        commit = cluster.storage.commits.get(loading.version)
        if commit is None:
            unread.append(source)
        elif commit.damaged or source in cluster.damaged:
            damaged.append(source)
        loading.is_loaded = not (damaged or unread)
    for source in damaged:
        name = cluster.rng.choice(members)
        loading.damaged[name] = (*loading.damaged.get(name, ()), source)
    for source in unread:
        name = cluster.rng.choice(members)
        loading.unread[name] = (*loading.unread.get(name, ()), source)


def _from_memory(
    cluster: SimCluster, loading: Loading, damaged: list[Source], unread: list[Source]
) -> bool:
    """Try the holders of each part until one has it; return whether every part was had."""
    inventories = _inventories(cluster)
    there = {
        held_source(one.node, part.arena, part.held) for one in inventories for part in one.parts
    }
    places = list(loading.places or ())
    cluster.rng.shuffle(places)
    loaded: set[int] = set()
    for place in places:
        source = _source(place)
        if place.held.rank in loaded:
            continue
        if source not in there:
            unread.append(source)
        elif source in cluster.damaged:
            damaged.append(source)
        else:
            loaded.add(place.held.rank)
    # What no holder has may be computed from parities.
    left = quarantine.good(inventories, (*loading.bad, *damaged))
    return any(
        (found.step, found.attempt) == loading.version for found in versions.complete(left, ())
    )


def _inventories(cluster: SimCluster) -> list[Inventory]:
    return cluster.memory.inventories(cluster.nodes.values(), cluster.now_s)


def _source(place: Holding) -> Source:
    return held_source(place.node, place.arena, place.held)
