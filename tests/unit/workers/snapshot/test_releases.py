"""Which share of a snapshot leaves where in a step, over simulated pipelines."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.pipeline_times import Span, Stage, one_forward_one_backward
from workers.snapshot.device import SPREAD, bucket_releases

#: Marks of which a forward pass takes a second.
BUCKET_S = 0.05
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


def _gaps(stage: Stage) -> list[float]:
    return [
        later.at_s - mark.at_s if mark.ends and not later.ends else 0.0
        for mark, later in pairwise(stage.marks)
    ]


def _copies(stage: Stage, num_buckets: int, gaps_s: list[float]) -> list[Span]:
    """Return when buckets leave, one after the other."""
    copies: list[Span] = []
    for (at_s, _), share in zip(
        stage.marks, bucket_releases(num_buckets, gaps_s, BUCKET_S), strict=False
    ):
        while len(copies) < share:
            low_s = max(at_s, copies[-1].high_s if copies else 0.0)
            copies.append(Span(low_s, low_s + BUCKET_S))
    return copies


def _beside(copies: list[Span], busy: list[Span]) -> float:
    """Return how long copies were under way while the device computed."""
    return sum(
        max(0.0, min(copy.high_s, work.high_s) - max(copy.low_s, work.low_s))
        for copy in copies
        for work in busy
    )


@pytest.mark.parametrize("num_stages", [2, 4, 8])
@pytest.mark.parametrize("backward_s", [1.0, 2.0])
def test_a_state_that_fits_a_stages_waits_leaves_in_these_alone(
    num_stages: int, backward_s: float
) -> None:
    """Under 1F1B with twice as many micro-batches as stages; two blocks each."""
    for stage in one_forward_one_backward(num_stages, 2 * num_stages, 1.0, backward_s, 2):
        num_buckets = sum(int(gap_s / BUCKET_S) for gap_s in _gaps(stage))
        copies = _copies(stage, num_buckets, _gaps(stage))
        assert len(copies) == num_buckets > 0
        assert _beside(copies, stage.busy) == pytest.approx(0.0, abs=1e-6)
        # As a model that is not cut into stages would have it.
        assert _beside(_copies(stage, num_buckets, [0.0] * len(_gaps(stage))), stage.busy) > 0.5


def test_stages_take_turns() -> None:
    """Four of them: the last copies where the step begins, the first when all have begun."""
    stages = one_forward_one_backward(4, 8, 1.0, 2.0, 2)
    copies = [_copies(stage, 20, _gaps(stage)) for stage in stages]
    # The first waits behind its four first forward passes for the backward ones of the others.
    for one, low_s, high_s in ((copies[0], 4.0, 5.0), (copies[3], 0.0, 1.0)):
        assert one[0].low_s == pytest.approx(low_s)
        assert one[-1].high_s == pytest.approx(high_s)


def test_no_more_than_does_not_fit_leaves_beside_the_passes() -> None:
    """Twice as much as a stage waits."""
    for stage in one_forward_one_backward(4, 8, 1.0, 2.0, 2):
        num_fit = sum(int(gap_s / BUCKET_S) for gap_s in _gaps(stage))
        copies = _copies(stage, 2 * num_fit, _gaps(stage))
        assert len(copies) == 2 * num_fit
        assert _beside(copies, stage.busy) <= num_fit * BUCKET_S + 1e-6
