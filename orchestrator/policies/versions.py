"""Decide which version to resume from, and which node losses it survives.

Pure. A version in memory exists if keepers hold the parts of all its ranks, or parities from which
to compute them. It counts by the same rule as a commit in storage (``ucp_core/SPEC.md``, 5). Memory
can be lost with a node, so every answer holds only for the inventories that it is based on.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from ucp_core.lineage import Lineage, counts
from workers.protocol import Inventory, Member, PartRef, parity_places

#: The tiers from which a version is loaded.
MEMORY = "memory"
STORAGE = "storage"


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """A version from which a run can resume."""

    step: int  #: The step after which the state was taken.
    attempt: int  #: The attempt that took it.
    source: str  #: "memory" or "storage".
    #: In memory, every holder of every rank's part, by rank; () in storage. A part without a holder
    #: is computed from parities.
    parts: tuple[PartRef, ...] = ()
    parities: tuple[PartRef, ...] = ()  #: In memory, every holder of parities of the version.

    @property
    def world_size(self) -> int:
        """Return the number of ranks that saved it; 0 for a version in storage."""
        return next(iter(_world_sizes(self)), 0)

    def members(self) -> dict[int, Member]:
        """Return the known facts about every part that went into a parity, by rank."""
        return {
            member.rank: member
            for one in self.parities
            for member in (one.covered.members if one.covered else ())
            if member is not None
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """How well snapshots in memory protect the run."""

    step: int  #: Step of the newest version that is complete in memory; 0 if there is none.
    #: How many nodes, whichever they are, may be lost so that a complete version stays in memory:
    #: 0, 1 or 2.
    node_losses_survived: int


def complete(inventories: Iterable[Inventory], lineage: Lineage) -> list[Version]:
    """Return the versions that count and whose parts are all available, newest first."""
    return list(_complete(inventories, lineage))


def _complete(inventories: Iterable[Inventory], lineage: Lineage) -> Iterator[Version]:
    parts: dict[tuple[int, int], list[PartRef]] = {}
    parities: dict[tuple[int, int], list[PartRef]] = {}
    for one in inventories:
        for found, refs in ((parts, one.parts), (parities, one.parities)):
            for ref in refs:
                found.setdefault((ref.held.step, ref.held.attempt), []).append(ref)
    every = (
        Version(
            step=step,
            attempt=attempt,
            source=MEMORY,
            parts=tuple(
                sorted(parts.get((step, attempt), ()), key=lambda part: part.held.rank),
            ),
            parities=tuple(parities.get((step, attempt), ())),
        )
        for step, attempt in sorted(parts.keys() | parities.keys(), reverse=True)
        if counts(step=step, attempt=attempt, lineage=lineage)
    )
    return filter(_is_whole, every)


def _is_whole(version: Version) -> bool:
    """Return whether every rank's part is held, or can be computed."""
    sizes = _world_sizes(version)
    if len(sizes) != 1:
        return False
    every = set(range(*sizes))
    held = {part.held.rank for part in version.parts}
    if held == every:
        return True
    if held | version.members().keys() != every:
        return False
    return all(dependency.is_left(()) for dependency in _dependencies(version))


def _world_sizes(version: Version) -> set[int]:
    return {part.held.world_size for part in (*version.parts, *version.parities)}


def newest(
    inventories: Iterable[Inventory],
    stored: tuple[int, int],
    lineage: Lineage,
    *,
    total_steps: int,
) -> Version | None:
    """Return the version to resume from; None if the run must start from the beginning.

    Args:
        inventories: The inventories of the living keepers.
        stored: ``(step, attempt)`` of the newest version in storage that counts, (0, 0) if none.
        lineage: Says which versions count.
        total_steps: Length of the run. The last step is only done once it is in storage, so the run
            cannot resume from a snapshot of it: no work would be left.
    """
    held = (v for v in _complete(inventories, lineage) if v.step < total_steps)
    found = next(held, None)
    step, attempt = stored
    # At the same step, the one in memory is faster.
    if step and (found is None or step > found.step):
        return Version(step=step, attempt=attempt, source=STORAGE)
    return found


def protection(inventories: Sequence[Inventory], lineage: Lineage) -> Protection:
    """Return how well the run is protected by memory."""
    versions = complete(inventories, lineage)
    if not versions:
        return Protection(step=0, node_losses_survived=0)
    dependencies = [_dependencies(version) for version in versions]
    known = {
        dependency: dependency.fatal()
        for dependency in frozenset[_Dependency]().union(*dependencies)
    }
    fatal = [
        frozenset[frozenset[str]]().union(*(known[dependency] for dependency in each))
        for each in dependencies
    ]
    nodes = {inventory.node for inventory in inventories}
    return Protection(step=versions[0].step, node_losses_survived=_survived(fatal, nodes))


def protects(
    inventories: Iterable[Inventory],
    lineage: Lineage,
    *,
    attempt: int,
    nodes: Collection[str],
    tolerance: int,
    total_steps: int,
) -> bool:
    """Return whether ``nodes`` alone hold a version of ``attempt`` that survives enough losses.

    Enough is ``tolerance``. All other keepers then hold nothing that the run needs. As in
    ``newest``, the last step does not count.
    """

    def helps(ref: PartRef) -> bool:
        return ref.held.attempt == attempt and ref.held.step < total_steps

    own = [one.only(helps) for one in inventories if one.node in nodes]
    found = protection(own, lineage)
    return bool(found.step) and found.node_losses_survived >= tolerance


def without(version: Version, is_lost: Callable[[str], bool]) -> Version | None:
    """Return the rest of a version in memory after nodes are lost; None if a part is missing."""
    left = replace(
        version,
        parts=tuple(part for part in version.parts if not is_lost(part.node)),
        parities=tuple(one for one in version.parities if not is_lost(one.node)),
    )
    return left if _is_whole(left) else None


@dataclass(frozen=True, slots=True)
class _Dependency:
    """Parts that are lost together: one part, or those of a group with parities."""

    #: By place, the nodes that hold its part; None if there is no part.
    parts: tuple[frozenset[str] | None, ...]
    parities: tuple[frozenset[str], ...] = ()  #: By place, the nodes that hold its parities.
    #: How many blocks of a stripe may be missing if all its parities are held.
    tolerance: int = 0

    def is_left(self, lost: Iterable[str]) -> bool:
        """Return whether all parts are left, or can be computed, without some nodes."""
        gone = frozenset(lost)
        missing = {
            place for place, nodes in enumerate(self.parts) if nodes is not None and nodes <= gone
        }
        if not missing or not self.tolerance:
            return not missing
        left = {place for place, nodes in enumerate(self.parities) if not nodes <= gone}
        size, tolerance = len(self.parts), self.tolerance
        holders = (
            set(parity_places(stripe, num_nodes=size, tolerance=tolerance))
            for stripe in range(size)
        )
        return all(len(missing - kept_by) <= len(left & kept_by) for kept_by in holders)

    def fatal(self) -> frozenset[frozenset[str]]:
        """Return the single nodes, and pairs of other nodes, whose loss would lose a part."""
        nodes = frozenset[str]().union(*(part for part in self.parts if part), *self.parities)
        alone = {node for node in nodes if not self.is_left([node])}
        pairs = combinations(sorted(nodes - alone), 2)
        return frozenset(frozenset([node]) for node in alone) | {
            frozenset(pair) for pair in pairs if not self.is_left(pair)
        }


def _dependencies(version: Version) -> frozenset[_Dependency]:
    holders: dict[int, set[str]] = {rank: set() for rank in range(version.world_size)}
    for part in version.parts:
        holders[part.held.rank].add(part.node)
    groups: dict[tuple[int, tuple[Member | None, ...]], dict[int, set[str]]] = {}
    for one in version.parities:
        if (covered := one.covered) is not None:
            group = groups.setdefault((covered.tolerance, covered.members), {})
            group.setdefault(covered.place, set()).add(one.node)
    dependencies = set()
    left = set(holders)
    # If two groups have the same rank, use the one with more parities held.
    for (tolerance, members), kept in sorted(groups.items(), key=lambda each: -len(each[1])):
        ranks = {member.rank for member in members if member is not None}
        if ranks <= left:
            left -= ranks
            dependency = _Dependency(
                tuple(None if each is None else frozenset(holders[each.rank]) for each in members),
                tuple(frozenset(kept.get(place, ())) for place in range(len(members))),
                tolerance,
            )
            dependencies.add(dependency)
    return frozenset(dependencies | {_Dependency((frozenset(holders[rank]),)) for rank in left})


def _survived(fatal: Sequence[Collection[frozenset[str]]], nodes: Collection[str]) -> int:
    """Return how many lost nodes, at most two, always leave one of several versions.

    ``fatal`` has the result of ``_Dependency.fatal`` for every version.
    """
    alone = [{node for lost in each if len(lost) == 1 for node in lost} for each in fatal]
    if set.intersection(*alone):
        return 0
    first = min(range(len(fatal)), key=lambda number: len(alone[number]))
    pairs = {lost for lost in fatal[first] if len(lost) > 1}
    pairs |= {frozenset([one, other]) for one in alone[first] for other in nodes if other != one}
    ends = (
        all(pair in each or pair & single for each, single in zip(fatal, alone, strict=True))
        for pair in pairs
    )
    return 1 if any(ends) else 2


def newest_stored(known: int, read: int, damaged: Collection[int]) -> int:
    """Return the newest step in storage; no attempt may resume from an older one.

    ``known`` is the current one, 0 if nothing was ever committed. ``read`` is the newest that
    storage has now, 0 for none. ``damaged`` are newer steps that storage has with damaged bytes:
    only because of these may the run resume from an older step. It never restarts from the
    beginning, because a person may repair one.
    """
    return max(read, 1) if known in damaged else max(read, known)
