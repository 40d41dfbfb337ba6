"""The share of a snapshot that may leave behind each pass of a step."""

import math

from hypothesis import given
from hypothesis import strategies as st

from workers.snapshot.device import SPREAD, bucket_releases

#: Behind where a snapshot begins, and then behind each pass.
GAPS = st.lists(st.floats(min_value=0, max_value=10), min_size=1, max_size=40)


@given(
    num_buckets=st.integers(min_value=1, max_value=1000),
    gaps_s=GAPS,
    bucket_s=st.floats(min_value=1e-4, max_value=10) | st.just(math.inf),
)
def test_shares_grow_to_all_and_take_no_more_of_a_gap_than_fits(
    num_buckets: int, gaps_s: list[float], bucket_s: float
) -> None:
    """All have left by the half of a step, but for what waits for a gap after it."""
    found = bucket_releases(num_buckets, gaps_s, bucket_s)
    assert len(found) == len(gaps_s)
    assert sorted(found) == found
    assert found[0] >= 0
    assert found[-1] <= num_buckets
    fits = [int(gap_s / bucket_s) for gap_s in gaps_s]
    beside = max(0, num_buckets - sum(fits))
    for index, share in enumerate(found):
        part = min(1.0, index / (SPREAD * len(gaps_s)))
        by_passes = math.ceil(beside * part)
        assert share == min(num_buckets - beside, sum(fits[: index + 1])) + by_passes
    if len(gaps_s) > 1:
        assert found[-1] == num_buckets


def test_without_gaps_buckets_leave_evenly_over_the_half_of_a_step() -> None:
    """A device has no waits to use if a model is not cut into stages."""
    assert bucket_releases(6, [0.0] * 8, 0.5) == [0, 2, 3, 5, 6, 6, 6, 6]
