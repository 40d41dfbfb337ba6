"""Compute the recovery that would follow if machines or processes were lost now.

Pure, and by the same rules as the controller and the loaders: the newest version first, memory
before storage, a rank's own node before another one.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from orchestrator.errors import ConfigError
from orchestrator.policies.layout import (
    LayoutRules,
    Refused,
    Rooms,
    choose,
    expected_step_s,
    rooms_of,
    spread,
)
from orchestrator.policies.versions import MEMORY, STORAGE, Version, without
from ucp_core.layout import ParallelLayout
from workers.protocol import LOCAL_MEMORY, PARITY, PEER_MEMORY, PartRef

#: Kinds of source, the fastest first.
SOURCES = (LOCAL_MEMORY, PEER_MEMORY, PARITY, STORAGE)
#: Prefix of an entry of ``lose`` that names a worker instead of a node.
_WORKER = "worker:"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlace:
    """A worker process that trains or waits as a standby."""

    worker: str
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredVersion:
    """The newest version in storage that counts; ``step`` 0 and no parts if there is none."""

    step: int = 0
    attempt: int = 0
    part_bytes: tuple[int, ...] = ()  #: Size of each rank's data.


@dataclass(frozen=True, slots=True, kw_only=True)
class LossFacts:
    """The run as it is now."""

    step: int  #: Last completed step.
    num_members: int  #: Workers that train.
    reservations: Mapping[str, int]  #: Number of reservations by node, for every node of the run.
    leaving: frozenset[str] = frozenset()  #: Nodes that are about to be taken away.
    #: Processes that could train: members in the order of ranks, then standbys.
    workers: tuple[WorkerPlace, ...]
    #: Versions that are complete in memory, newest first (``versions.complete``).
    held: tuple[Version, ...]
    stored: StoredVersion
    min_workers: int
    max_workers: int
    layout: LayoutRules  #: The rules that a layout must satisfy.
    refused: tuple[Refused, ...] = ()  #: Layouts that cannot train.
    #: Layouts that trained, each with its seconds per step.
    steps: tuple[tuple[ParallelLayout, float], ...] = ()

    @property
    def rules(self) -> LayoutRules:
        """Return the rules of layouts, with what the run has learned."""
        return replace(self.layout, refused=self.refused, steps=self.steps)

    def choose(self, rooms: Rooms) -> ParallelLayout | None:
        """Return the layout for workers with these rooms; None if there is none."""
        return choose(rooms, self.max_workers, self.rules, self.min_workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSource:
    """A source for a part of one rank, or for some of it."""

    rank: int  #: The rank that saved it.
    #: One of ``SOURCES``; "local" and "peer" are from the view of the workers that would load it.
    source: str
    node: str  #: The node that holds it; "" in storage, or if it is computed from several.
    size_bytes: int  #: Its size.


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPlan:
    """The recovery that would follow."""

    lost_nodes: tuple[str, ...]  #: Nodes that are assumed lost, whole ids.
    lost_workers: tuple[str, ...]  #: Workers that would be gone, those on the lost nodes included.
    step: int  #: Training would resume after this step; 0 is the beginning.
    attempt: int  #: The attempt that took that version.
    source: str  #: "memory", "storage", or "" if there is none.
    lost_steps: int  #: Completed steps that would be redone.
    #: Where each rank's part of the version would come from, if every worker loaded an equal share
    #: of the state in the order of ranks.
    parts: tuple[PartSource, ...]
    bytes_by_source: Mapping[str, int]  #: The sums by source.
    workers_before: int  #: Workers that train now.
    workers_after: int  #: Workers that would train; 0 if the run would wait for capacity.
    layout_after: str  #: Their layout, for people.
    step_s_after: float  #: Estimated step time, from steps of this run; 0.0 if unknown.

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        return asdict(self)


def plan_recovery(facts: LossFacts, lose: Sequence[str]) -> RecoveryPlan:
    """Return what the run would do if all of ``lose`` were lost at once, now.

    ``lose`` has ids of nodes, or the beginning of one; ``worker:w0003`` for a single process. Raise
    ``ConfigError`` if something in it is not in the run, or could be several nodes.
    """
    lost_nodes, lost_workers = _resolve(facts, lose)
    usable = _usable(facts, lost_nodes, lost_workers)
    rooms = rooms_of(usable.values())
    layout = facts.choose(rooms)
    survivors = (without(version, lost_nodes.__contains__) for version in facts.held)
    held = next((version for version in survivors if version is not None), None)
    stored = facts.stored
    if held is not None and held.step >= stored.step:
        used = [0] * len(usable) if layout is None else spread([*usable.values()], layout)
        readers = [node for node, num in zip(usable, used, strict=True) for _ in range(num)]
        parts = _from_memory(held, readers)
        step, attempt, source = held.step, held.attempt, MEMORY
    else:
        parts = [
            PartSource(rank=rank, source=STORAGE, node="", size_bytes=size_bytes)
            for rank, size_bytes in enumerate(stored.part_bytes)
        ]
        step, attempt, source = stored.step, stored.attempt, STORAGE if stored.step else ""
    bytes_by_source = Counter[str]()
    for part in parts:
        bytes_by_source[part.source] += part.size_bytes
    return RecoveryPlan(
        lost_nodes=tuple(sorted(lost_nodes)),
        lost_workers=tuple(sorted(lost_workers)),
        step=step,
        attempt=attempt,
        source=source,
        lost_steps=max(facts.step - step, 0),
        parts=tuple(parts),
        bytes_by_source=dict(bytes_by_source),
        workers_before=facts.num_members,
        workers_after=layout.world_size if layout is not None else 0,
        layout_after=str(layout) if layout is not None else "",
        step_s_after=expected_step_s(layout, facts.rules) if layout is not None else 0.0,
    )


def _resolve(facts: LossFacts, lose: Sequence[str]) -> tuple[set[str], set[str]]:
    """Return the nodes and the workers that ``lose`` names."""
    nodes: set[str] = set()
    workers: set[str] = set()
    known = {place.worker for place in facts.workers}
    problems: list[str] = []
    for name in lose:
        if name.startswith(_WORKER):
            workers.add(name.removeprefix(_WORKER))
            if name.removeprefix(_WORKER) not in known:
                problems.append(f"{name} is not in the run; it has {_listed(known)}")
            continue
        found = [node for node in facts.reservations if name and node.startswith(name)]
        nodes.update(found)
        if len(found) != 1:
            what = (
                f"is the beginning of {len(found)} nodes" if found else "is not a node of the run"
            )
            problems.append(f"{name!r} {what}; it has {_listed(facts.reservations)}")
    if problems:
        raise ConfigError("; ".join(problems), problems=problems)
    workers |= {place.worker for place in facts.workers if place.node in nodes}
    return nodes, workers


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _usable(facts: LossFacts, lost_nodes: set[str], lost_workers: set[str]) -> dict[str, int]:
    """Return how many workers would train on each node, if all could, in the order of ranks.

    Like ``core.formation``, count leaving nodes only if the run would stop without them.
    """
    nodes = (*(place.node for place in facts.workers), *facts.reservations)
    left = dict.fromkeys((node for node in nodes if node not in lost_nodes), 0)
    for place in facts.workers:
        if place.node in left and place.worker not in lost_workers:
            left[place.node] += 1
    # A worker needs a reservation.
    usable = {node: min(number, facts.reservations.get(node, 0)) for node, number in left.items()}
    staying = {node: number for node, number in usable.items() if node not in facts.leaving}
    rooms = rooms_of(staying.values())
    if facts.choose(rooms) is not None:
        return staying
    return staying | usable


def _from_memory(version: Version, readers: Sequence[str]) -> list[PartSource]:
    """Return the sources that each worker would load from.

    ``version`` is the rest of the version. ``readers`` is the node of each worker that would load
    it, by rank; empty if the run waits.
    """
    holders: dict[int, list[PartRef]] = {}
    for part in sorted(version.parts, key=lambda part: (part.held.rank, part.is_copy)):
        holders.setdefault(part.held.rank, []).append(part)
    size_bytes: dict[tuple[int, str, str], int] = {}
    for rank, parts in holders.items():
        nodes = [part.node for part in parts]
        data_bytes = parts[0].held.data_bytes
        for reader, num_bytes in _shares(rank, version.world_size, readers, data_bytes):
            is_local = reader in nodes
            key = (rank, LOCAL_MEMORY, reader) if is_local else (rank, PEER_MEMORY, nodes[0])
            size_bytes[key] = size_bytes.get(key, 0) + num_bytes
    for rank, member in sorted(version.members().items()):
        if rank not in holders:
            size_bytes[rank, PARITY, ""] = member.data_bytes
    return [
        PartSource(rank=rank, source=source, node=node, size_bytes=num_bytes)
        for (rank, source, node), num_bytes in size_bytes.items()
    ]


def _shares(
    rank: int, world_size: int, readers: Sequence[str], total: int
) -> list[tuple[str, int]]:
    """Return (node, bytes) of each worker that needs some of a rank's part of ``total`` bytes."""
    num_readers = len(readers)
    if not readers:
        return [("", total)]
    shares: list[tuple[str, int]] = []
    # Both divide the state evenly, so in units of 1 / (world_size * num_readers) all bounds are
    # whole numbers.
    first = rank * num_readers
    for number, node in enumerate(readers):
        start = max(number * world_size, first)
        stop = min((number + 1) * world_size, first + num_readers)
        if start < stop:
            ends = (total * (edge - first) // num_readers for edge in (stop, start))
            shares.append((node, next(ends) - next(ends)))
    return shares
