"""How the virtual cluster loads a version: holder after holder, and nothing that is damaged.

An attempt is given the holders that the controller knows of, as the shell gives them. Damaged
bytes are only noticed when they are read: by the rank that reads them, which says so when it
leaves, or when it has formed because another holder had the same.
"""

from orchestrator.core import actions as act
from orchestrator.policies import bad_sources, versions
from tests.simulation.world.parts import Loading
from tests.simulation.world.wires import World
from workers.protocol import Inventory, Source, stored_source


def begin(world: World, action: act.StartAttempt) -> Loading:
    """Find the holders of the version that an attempt is to resume from."""
    version = (action.resume_step, action.resume_attempt)
    found = world.memory.inventories(world.nodes.values(), world.now_s)
    held = bad_sources.good(found, action.bad, action.unreached)
    held_parts = [
        each.parts for each in versions.complete(held, ()) if (each.step, each.attempt) == version
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
        loading.is_loaded = _from_memory(world, loading, members, damaged, unread)
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
    world: World,
    loading: Loading,
    members: list[str],
    damaged: list[Source],
    unread: list[Source],
) -> bool:
    """Try the holders of each part until one has it; return whether every part was had."""
    found = _reached(world, members)
    there = {part.source for one in found for part in one.parts}
    places = list(loading.places or ())
    world.rng.shuffle(places)
    loaded: set[int] = set()
    for place in places:
        source = place.source
        if place.held.rank in loaded:
            continue
        if source not in there:
            unread.append(source)
        elif source in world.damaged:
            damaged.append(source)
        else:
            loaded.add(place.held.rank)
    # Parts without a holder may be computed from parities.
    left = bad_sources.good(found, (*loading.bad, *damaged))
    return any((each.step, each.attempt) == loading.version for each in versions.complete(left, ()))


def _reached(world: World, members: list[str]) -> list[Inventory]:
    """Return what keepers hold that every member reaches."""
    nodes = {world.workers[name].node.name for name in members if name in world.workers}
    found = world.memory.inventories(world.nodes.values(), world.now_s)
    return [one for one in found if not world.lost_way({*nodes, one.node})]
