"""How the virtual cluster loads a version: holder after holder, and nothing that is damaged.

An attempt is given the holders that the controller knows of, as the shell gives them. Damaged
bytes are only noticed when they are read: by the rank that reads them, which says so when it
leaves, or when it has formed because another holder had the same.
"""

from __future__ import annotations

from orchestrator.core import StartAttempt
from orchestrator.policies import quarantine, versions
from orchestrator.simulation.world.parts import Loading, source_of
from orchestrator.simulation.world.wires import World
from workers.protocol import Inventory, Source, held_source, stored_source


def begin(world: World, action: StartAttempt) -> Loading:
    """Find the holders of the version that an attempt is to resume from."""
    version = (action.resume_step, action.resume_attempt)
    held = quarantine.good(_inventories(world), action.bad)
    held_parts = [
        found.parts
        for found in versions.complete(held, ())
        if (found.step, found.attempt) == version
    ]
    return Loading(version=version, places=held_parts[0] if held_parts else None, bad=action.bad)


def load(world: World, loading: Loading, members: list[str]) -> None:
    """Read everything; each source that fails is found so by one of the members."""
    loading.is_done = True
    if not loading.version[0]:
        return
    damaged: list[Source] = []
    unread: list[Source] = []
    if loading.places is not None:
        loading.is_loaded = _from_memory(world, loading, damaged, unread)
    else:
        source = stored_source(*loading.version)
        commit = world.storage.commits.get(loading.version)
        if commit is None:
            unread.append(source)
        elif commit.damaged or source in world.damaged:
            damaged.append(source)
        loading.is_loaded = not (damaged or unread)
    for source in damaged:
        name = world.rng.choice(members)
        loading.damaged[name] = (*loading.damaged.get(name, ()), source)
    for source in unread:
        name = world.rng.choice(members)
        loading.unread[name] = (*loading.unread.get(name, ()), source)


def _from_memory(
    world: World, loading: Loading, damaged: list[Source], unread: list[Source]
) -> bool:
    """Try the holders of each part until one has it; return whether every part was had."""
    inventories = _inventories(world)
    there = {
        held_source(one.node, part.arena, part.held) for one in inventories for part in one.parts
    }
    places = list(loading.places or ())
    world.rng.shuffle(places)
    loaded: set[int] = set()
    for place in places:
        source = source_of(place)
        if place.held.rank in loaded:
            continue
        if source not in there:
            unread.append(source)
        elif source in world.damaged:
            damaged.append(source)
        else:
            loaded.add(place.held.rank)
    # What no holder has may be computed from parities.
    left = quarantine.good(inventories, (*loading.bad, *damaged))
    return any(
        (found.step, found.attempt) == loading.version for found in versions.complete(left, ())
    )


def _inventories(world: World) -> list[Inventory]:
    return world.memory.inventories(world.nodes.values(), world.now_s)
