from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.policies.versions import complete, newest, protection, ring, without
from workers.protocol import Held, HeldPart, Inventory

NODES = ("a", "b", "c")
TOTAL = 6


def _held(attempt: int, step: int, rank: int) -> Held:
    return Held(
        slot=0,
        sequence=2,
        attempt=attempt,
        step=step,
        rank=rank % ((attempt + step) % 3 + 1),
        world_size=(attempt + step) % 3 + 1,
        data_bytes=1,
        record_bytes=1,
    )


HELD = st.builds(_held, st.integers(1, 3), st.integers(1, TOTAL), st.integers(0, 2))
PARTS = st.lists(st.builds(HeldPart, arena=st.just("w"), held=HELD), max_size=8).map(tuple)
INVENTORIES = st.tuples(
    *(
        st.builds(Inventory, node=st.just(node), host=st.just(""), port=st.just(0), parts=PARTS)
        for node in NODES
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
    sizes, nodes = _holders(inventories, step, attempt)
    return any(sizes == {size} and set(range(size)) == set(nodes) for size in (1, 2, 3))


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
    left = [_naive([one for one in inventories if one.node != lost], lineage) for lost in NODES]
    protected = protection(inventories, lineage)

    versions = _naive(inventories, lineage)
    assert protected.step == (versions[0][0] if versions else 0)
    assert protected.node_losses_survived == int(all(left))


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
            assert all(part.node != lost for part in left.parts)


@given(num_nodes=st.integers(1, 9), copies=st.integers(0, 3))
def test_every_node_is_copied_as_often_as_asked(num_nodes: int, copies: int) -> None:
    """A node that copies itself, or the same one twice, protects nothing."""
    nodes = [f"n{index}" for index in range(num_nodes)]
    copies_of = ring(nodes, copies)

    wanted = min(copies, num_nodes - 1)
    assert set(copies_of) == set(nodes)
    for node, sources in copies_of.items():
        assert node not in sources
        assert len(set(sources)) == len(sources) == wanted
    for node in nodes:
        assert sum(node in sources for sources in copies_of.values()) == wanted
