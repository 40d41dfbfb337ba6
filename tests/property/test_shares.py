"""Replicas save disjoint shares: every element once, whatever the shapes and the layout."""

from itertools import pairwise
from math import prod

from hypothesis import given
from hypothesis import strategies as st

from ucp_core.geometry import DTYPE_BYTES, Box, Fragment, StateMap, TensorEntry, TensorKey
from ucp_core.layout import ParallelLayout
from workers.state import ReplicaShare, replicas_of
from workers.state.replica_shares import cut

SHAPES = st.lists(
    st.tuples(
        st.lists(st.integers(0, 7), max_size=3).map(tuple), st.sampled_from(["F32", "F64", "BF16"])
    ),
    min_size=1,
    max_size=6,
)
LAYOUTS = st.builds(ParallelLayout, dp_replicate=st.integers(1, 5), dp_shard=st.integers(1, 4))


def _shard(shape: tuple[int, ...], number: int, num_shards: int) -> Box:
    """Return the rows that FSDP leaves to a rank; what has none is whole on the first."""
    if not shape:
        return Box.full(shape) if number == 0 else Box((0,), (0,))
    rows = -(-shape[0] // num_shards)
    low, high = (min(shape[0], at * rows) for at in (number, number + 1))
    return Box.full(shape).with_dim(0, low, high)


@given(SHAPES, LAYOUTS)
def test_all_ranks_together_save_every_element_once(
    shapes: list[tuple[tuple[int, ...], str]], layout: ParallelLayout
) -> None:
    """Uneven shards, fewer rows than replicas, and tensors without rows or elements."""
    found: dict[int, list[Box]] = {number: [] for number in range(len(shapes))}
    for rank in range(layout.world_size):
        shard = layout.coordinates(rank)["dp_shard"]
        parts = [
            (_shard(shape, shard, layout.dp_shard), DTYPE_BYTES[dtype]) for shape, dtype in shapes
        ]
        sharing = ReplicaShare.of(replicas_of(layout, rank), rank)
        for number, box in cut(parts, sharing.num_shares)[sharing.share]:
            assert parts[number][0].contains(box)
            found[number].append(box)
    entries = {}
    for number, (shape, dtype) in enumerate(shapes):
        key = TensorKey(str(number), "weight")
        fragments = tuple(
            Fragment(box, "file", 0, box.num_elements * DTYPE_BYTES[dtype], None, ())
            for box in sorted(found[number])
        )
        entries[key] = TensorEntry(key=key, dtype=dtype, shape=shape, fragments=fragments)

    StateMap(entries=entries, block_bytes=1 << 20).prove_coverage()


@given(SHAPES, st.integers(1, 5))
def test_shares_differ_by_one_row_at_most(
    shapes: list[tuple[tuple[int, ...], str]], num_shares: int
) -> None:
    """A rank that got every remainder would be the one that all others wait for."""
    parts = [(Box.full(shape), DTYPE_BYTES[dtype]) for shape, dtype in shapes]
    sizes = [
        sum(box.num_elements * parts[number][1] for number, box in share)
        for share in cut(parts, num_shares)
    ]

    largest = max(prod(box.shape[1:]) * item_bytes for box, item_bytes in parts)
    assert max(sizes) - min(sizes) <= largest
    assert sum(sizes) == sum(box.num_elements * item_bytes for box, item_bytes in parts)


@given(LAYOUTS)
def test_replicas_are_the_ranks_of_one_shard_in_one_order(layout: ParallelLayout) -> None:
    """Each rank finds its share alone; two that count differently leave a hole."""
    groups = {replicas_of(layout, rank) for rank in range(layout.world_size)}

    assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
    for group in groups:
        assert len({layout.coordinates(rank)["dp_shard"] for rank in group}) == 1
        assert [ReplicaShare.of(group, rank).share for rank in group] == list(range(len(group)))
        assert all(one < other for one, other in pairwise(group))
