"""ZeRO's ranges over random shapes and ranks: every element once, in the order of the ranks."""

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from ucp_core.formats.deepspeed.writing.spread import (
    PADDING,
    Span,
    group_spans,
    sub_groups,
    tensor_spans,
)

NUMELS = st.lists(st.integers(1, 40), min_size=1, max_size=8)
DP = st.integers(1, 17)


def _elements(spans: tuple[Span, ...]) -> list[tuple[int, int]]:
    return [(s.tensor, i) for s in spans for i in range(s.start, s.stop)]


@given(NUMELS, DP)
def test_the_ranks_of_stages_1_and_2_hold_the_group_side_by_side(
    numels: list[int], dp: int
) -> None:
    """A range may begin in one tensor and end in another, and the last ones may be empty."""
    parts = [group_spans(numels, dp, rank) for rank in range(dp)]
    elements = [element for part in parts for element in _elements(part)]
    total = sum(numels)

    assert elements[:total] == [(t, i) for t, n in enumerate(numels) for i in range(n)]
    assert all(tensor == PADDING for tensor, _ in elements[total:])
    assert len({len(_elements(part)) for part in parts}) == 1
    assert len(elements) % (2 * dp) == 0
    assert len(elements) - total < 2 * dp


@given(NUMELS, DP)
def test_the_ranks_of_stage_3_hold_equal_shares_of_every_tensor(numels: list[int], dp: int) -> None:
    """A tensor smaller than the number of ranks leaves some of them with padding alone."""
    parts = [_elements(tensor_spans(numels, dp, rank)) for rank in range(dp)]
    shares = [-(-numel // dp) for numel in numels]
    ends = [0, *accumulate(shares)]

    for tensor, numel in enumerate(numels):
        held = [part[ends[tensor] : ends[tensor + 1]] for part in parts]
        flat = [element for share in held for element in share]
        assert flat[:numel] == [(tensor, i) for i in range(numel)]
        assert all(owner == PADDING for owner, _ in flat[numel:])
    assert {len(part) for part in parts} == {ends[-1]}


@given(NUMELS, DP, st.integers(1, 60))
def test_sub_groups_keep_the_order_and_end_where_they_are_full(
    numels: list[int], dp: int, size: int
) -> None:
    """One tensor more or less in a sub-group shifts every element behind it."""
    groups = sub_groups(numels, dp, size)
    shares = [-(-numel // dp) for numel in numels]

    assert [index for group in groups for index in group] == list(range(len(numels)))
    assert all(groups)
    for group in groups[:-1]:
        assert sum(shares[i] for i in group) >= size
        assert sum(shares[i] for i in group[:-1]) < size
