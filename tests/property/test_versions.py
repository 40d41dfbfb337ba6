from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.policies import complete
from orchestrator.policies.versions import newest, protection, without
from tests.support.made import held_of
from workers.errors import ParityError
from workers.parity import ParityRecord, lost_parts
from workers.protocol import Covered, Held, Inventory, Member, PartRef

NODES = ("a", "b", "c", "d")
TOTAL = 6
#: Bytes of every part, so that no block of it is empty.
SIZE_BYTES = 6400


def _held(attempt: int, step: int, rank: int) -> Held:
    return held_of(
        step,
        rank % ((attempt + step) % 3 + 1),
        attempt=attempt,
        world_size=(attempt + step) % 3 + 1,
        data_bytes=SIZE_BYTES,
        record_bytes=0,
    )


def _record(attempt: int, step: int, place: int) -> ParityRecord:
    """Return what the parities of a version are of: in every other one a node has no part."""
    world_size = (attempt + step) % 3 + 1
    ranks: list[int | None] = [*range(world_size), *[None] * (len(NODES) - world_size)]
    turned = ranks[step % 2 :] + ranks[: step % 2]
    return ParityRecord(
        attempt=attempt,
        step=step,
        world_size=world_size,
        tolerance=(attempt + step) % 2 + 1,
        place=place,
        members=tuple(
            None if rank is None else Member(rank=rank, data_bytes=SIZE_BYTES, record_bytes=0)
            for rank in turned
        ),
    )


def _parity(version: tuple[int, int], place: int) -> PartRef:
    record = _record(*version, place)
    held = held_of(
        record.step,
        -1 - place,
        attempt=record.attempt,
        world_size=record.world_size,
        data_bytes=0,
        record_bytes=len(record.to_bytes()),
    )
    covered = Covered(tolerance=record.tolerance, place=place, members=record.members)
    return PartRef(node=NODES[place], arena="parity/0.1", held=held, covered=covered)


@dataclass(frozen=True)
class _Buffer:
    """The record that a loader would read from a buffer before it computes anything."""

    held: Held
    data: bytes = b""

    def fill(self, offset_bytes: int, targets: Sequence[memoryview]) -> None:
        (target,) = targets
        target[:] = self.data[offset_bytes:]


VERSIONS = st.tuples(st.integers(1, 3), st.integers(1, TOTAL))
HELD = st.builds(_held, st.integers(1, 3), st.integers(1, TOTAL), st.integers(0, 2))
INVENTORIES = st.tuples(
    *(
        st.builds(
            Inventory,
            node=st.just(node),
            parts=st.lists(
                st.builds(PartRef, node=st.just(node), arena=st.just("w"), held=HELD), max_size=8
            ).map(tuple),
            parities=st.sets(VERSIONS, max_size=3).map(
                lambda versions, place=place: tuple(  # type: ignore[misc]
                    _parity(version, place) for version in sorted(versions)
                )
            ),
        )
        for place, node in enumerate(NODES)
    )
)
LINEAGES = st.lists(st.integers(0, TOTAL), min_size=1, max_size=4).map(
    lambda steps: tuple((number, step) for number, step in enumerate(steps, start=1))
)
STORED = st.one_of(st.just((0, 0)), st.tuples(st.integers(1, TOTAL), st.integers(1, 3)))


def _holders(
    inventories: Sequence[Inventory], step: int, attempt: int
) -> tuple[set[int], dict[int, set[str]]]:
    """Return the world sizes that the parts of a version name, and the nodes of each rank."""
    sizes: set[int] = set()
    nodes: dict[int, set[str]] = {}
    for inventory in inventories:
        for part in inventory.parts:
            if (part.held.step, part.held.attempt) == (step, attempt):
                sizes.add(part.held.world_size)
                nodes.setdefault(part.held.rank, set()).add(inventory.node)
    return sizes, nodes


def _is_there(inventories: Sequence[Inventory], step: int, attempt: int) -> bool:
    """Return whether a loader would find, or could compute, the parts of all ranks."""
    _, nodes = _holders(inventories, step, attempt)
    parts = [_Buffer(_held(attempt, step, rank)) for rank in nodes]
    parities = [
        _Buffer(parity.held, _record(attempt, step, parity.covered.place).to_bytes())
        for inventory in inventories
        for parity in inventory.parities
        if parity.covered and (parity.held.step, parity.held.attempt) == (step, attempt)
    ]
    try:
        computed = lost_parts(parities, parts)
    except ParityError:
        return False
    world_size = (attempt + step) % 3 + 1
    return nodes.keys() | {part.held.rank for part in computed} == set(range(world_size))


def _is_history(step: int, attempt: int, lineage: Any) -> bool:
    began_before = [resume for later, resume in lineage if later > attempt and resume < step]
    return not began_before


def _naive(inventories: Sequence[Inventory], lineage: Any) -> list[tuple[int, int]]:
    return [
        (step, attempt)
        for step in range(TOTAL, 0, -1)
        for attempt in (3, 2, 1)
        if _is_there(inventories, step, attempt) and _is_history(step, attempt, lineage)
    ]


@given(inventories=INVENTORIES, lineage=LINEAGES)
def test_a_version_is_there_when_all_its_ranks_are_held(inventories: Any, lineage: Any) -> None:
    """A part alone looks like a version; and one of a fenced attempt looks like the newest."""
    found = complete(inventories, lineage)

    assert [(version.step, version.attempt) for version in found] == _naive(inventories, lineage)
    for version in found:
        _, nodes = _holders(inventories, version.step, version.attempt)
        places = {(part.held.rank, part.node) for part in version.parts}
        assert places == {(rank, node) for rank, names in nodes.items() for node in names}


@given(inventories=INVENTORIES, lineage=LINEAGES, stored=STORED)
def test_the_newest_of_both_tiers_is_taken(inventories: Any, lineage: Any, stored: Any) -> None:
    """Storage may be ahead of what memory lost; and the last step is only done in storage."""
    held = [v for v in _naive(inventories, lineage) if v[0] < TOTAL]
    found = newest(inventories, stored, lineage, total_steps=TOTAL)

    if held and held[0][0] >= stored[0]:
        assert found is not None
        assert (found.step, found.attempt, found.source) == (*held[0], "memory")
    elif stored[0]:
        assert found is not None
        assert (found.step, found.attempt, found.source) == (*stored, "storage")
    else:
        assert found is None


@given(inventories=INVENTORIES, lineage=LINEAGES)
def test_a_survived_loss_leaves_a_version(inventories: Any, lineage: Any) -> None:
    """The alarm must come when the next loss would reach storage, neither before nor after."""
    survived = 0
    for num_lost in (1, 2):
        left = [
            _naive([one for one in inventories if one.node not in lost], lineage)
            for lost in combinations(NODES, num_lost)
        ]
        survived += survived == num_lost - 1 and all(left)
    protected = protection(inventories, lineage)

    versions = _naive(inventories, lineage)
    assert protected.step == (versions[0][0] if versions else 0)
    assert protected.node_losses_survived == survived


@given(inventories=INVENTORIES, lineage=LINEAGES, lost=st.sampled_from(NODES))
def test_what_is_left_of_a_version_is_what_the_others_hold(
    inventories: Any, lineage: Any, lost: str
) -> None:
    """A plan for a loss must not count on what would be lost."""
    others = [one for one in inventories if one.node != lost]
    for version in complete(inventories, lineage):
        left = without(version, lambda node: node == lost)
        there = _is_there(others, version.step, version.attempt)
        assert (left is not None) == there
        if left is not None:
            assert lost not in {part.node for part in left.parts}
            assert lost not in {one.node for one in left.parities}
