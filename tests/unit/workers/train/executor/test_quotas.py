from hypothesis import given
from hypothesis import strategies as st

from workers.train.executor.quotas import blocks, quota

SIZES = st.tuples(st.integers(1, 40), st.integers(1, 12))


@given(SIZES)
def test_every_micro_batch_counts_exactly_once(sizes: tuple[int, int]) -> None:
    """Ranks beyond the micro-batches and uneven blocks both repeat some, with weight zero."""
    num_micro_batches, num_ranks = sizes
    for fixed_tree in (False, True):
        plans = [
            quota(num_micro_batches, num_ranks, rank, fixed_tree=fixed_tree)
            for rank in range(num_ranks)
        ]
        counted = [one.micro_batch for plan in plans for one in plan.passes if one.counts]

        assert sorted(counted) == list(range(num_micro_batches))
        assert all(0 <= one.micro_batch < num_micro_batches for p in plans for one in p.passes)


@given(SIZES, st.booleans())
def test_ranks_make_the_same_collectives(sizes: tuple[int, int], fixed_tree: bool) -> None:  # noqa: FBT001
    """A rank with one pass or one reduction less would leave its peers waiting for ever."""
    num_micro_batches, num_ranks = sizes
    plans = [
        quota(num_micro_batches, num_ranks, rank, fixed_tree=fixed_tree)
        for rank in range(num_ranks)
    ]

    assert len({tuple(one.syncs for one in plan.passes) for plan in plans}) == 1
    assert len({plan.nodes for plan in plans}) == 1
    assert plans[0].passes[-1].syncs
    if fixed_tree:
        assert sum(one.syncs for one in plans[0].passes) == len(plans[0].nodes)


@given(SIZES)
def test_reductions_hand_in_every_leaf_of_the_tree_once(sizes: tuple[int, int]) -> None:
    """A pair that is not two siblings would be another tree for another number of ranks."""
    num_micro_batches, num_ranks = sizes
    plan = quota(num_micro_batches, num_ranks, 0, fixed_tree=True)

    nodes = [node for reduction in plan.nodes for node in reduction if node is not None]
    leaves = [leaf for level, at in nodes for leaf in range(at << level, (at + 1) << level)]

    assert sorted(leaves) == list(range(num_micro_batches))


@given(SIZES, st.integers(1, 8), st.booleans())
def test_passes_fill_the_rounds_of_interleaved_stages(
    sizes: tuple[int, int],
    round_of: int,
    fixed_tree: bool,  # noqa: FBT001
) -> None:
    """torch's schedule takes equal rounds only; what fills them does not count."""
    num_micro_batches, num_ranks = sizes
    plans = [
        quota(num_micro_batches, num_ranks, rank, fixed_tree=fixed_tree, round_of=round_of)
        for rank in range(num_ranks)
    ]

    (num_passes,) = {len(plan.passes) for plan in plans}
    fewest = len(quota(num_micro_batches, num_ranks, 0, fixed_tree=fixed_tree).passes)
    assert fewest <= num_passes < fewest + round_of
    assert num_passes % max(1, num_passes // round_of) == 0
    counted = [one.micro_batch for plan in plans for one in plan.passes if one.counts]
    assert sorted(counted) == list(range(num_micro_batches))
    assert plans[0].passes[-1].syncs


def test_two_siblings_on_one_rank_are_reduced_at_once() -> None:
    """Eight micro-batches on four ranks then need one reduction, as without the fixed tree."""
    assert len(quota(8, 4, 0, fixed_tree=True).nodes) == 1
    assert len(quota(8, 2, 0, fixed_tree=True).nodes) == 2
    assert len(quota(8, 3, 0, fixed_tree=True).nodes) == 3
    assert len(quota(8, 3, 0, fixed_tree=False).nodes) == 0


def test_blocks_are_contiguous_and_differ_by_at_most_one() -> None:
    """Uneven quotas are legal; unfair ones would make the fast wait for the slow."""
    assert blocks(8, 3) == ((0, 2), (2, 5), (5, 8))
    assert blocks(2, 3) == ((0, 0), (0, 1), (1, 2))
