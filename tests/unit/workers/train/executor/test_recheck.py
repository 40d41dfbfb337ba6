"""Which worker has computed something wrong."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.settings import Settings, problems
from workers.train.executor.recheck import odd_results


@pytest.mark.parametrize(
    ("results", "odd"),
    [
        # It always errs, with the same result or with others.
        ([[7, 7], [8, 8], [7, 7]], (1,)),
        ([[7, 7], [8, 9], [7, 7]], (1,)),
        # It erred once: the second time it has the result of the others.
        ([[7, 7], [7, 7], [8, 7]], (2,)),
        ([[8, 7], [7, 7]], (0,)),
        # Each of two has its own, or four are two pairs.
        ([[7, 7], [8, 8]], (0, 1)),
        ([[7, 7], [8, 9]], (0, 1)),
        ([[7, 7], [7, 7], [8, 8], [8, 8]], (0, 1, 2, 3)),
        ([[7, 7], [8, 8], [9, 7]], (0, 1, 2)),
        # Kernels whose results vary.
        ([[7, 8], [9, 7], [7, 7]], None),
        ([[7, 8], [9, 6]], None),
    ],
    ids=str,
)
def test_what_stands_alone_is_wrong(results: list[list[int]], odd: tuple[int, ...] | None) -> None:
    """A healthy machine is never blamed for what kernels or a tie do."""
    assert odd_results(results) == odd


@given(st.integers(3, 8), st.data())
def test_any_one_of_three_or_more_that_errs_is_named(num_ranks: int, data: st.DataObject) -> None:
    """Whether it errs once, sometimes or always, and whatever it makes of it."""
    bad = data.draw(st.integers(0, num_ranks - 1))
    wrong = data.draw(st.lists(st.integers(0, 3), min_size=4, max_size=4).filter(any))
    results = [[0] * 4 for _ in range(num_ranks)]
    results[bad] = wrong

    assert odd_results(results) == (bad,)


def test_what_cannot_be_compared_is_refused_by_name() -> None:
    """A check that compares nothing would be trusted all the same."""
    assert problems(_chosen(deterministic=True)) == []
    (found,) = problems(_chosen(deterministic=False))
    assert found.startswith("train.recheck: compares bits")
    (found,) = problems(_chosen(deterministic=True, tp=2))
    assert found.startswith("parallel.tp: train.recheck")


def test_the_cost_is_known_before_a_run() -> None:
    """It is one of the micro-batches of one worker, so it grows with their number."""
    train = replace(_chosen(deterministic=True).train, global_batch=32, micro_batch=2, recheck=100)

    assert train.recheck_cost(4).endswith("0.25 % of a run with 4 micro-batches a step on each")
    # One of five workers has four, which the others wait for.
    assert train.recheck_cost(5).endswith("0.25 % of a run with 4 micro-batches a step on each")
    assert train.recheck_cost(16).endswith("1 % of a run with 1 micro-batch a step on each")
    assert not replace(train, recheck=0).recheck_cost(4)


def _chosen(*, deterministic: bool, tp: int = 1) -> Settings:
    chosen = Settings()
    train = replace(chosen.train, deterministic=deterministic, recheck=10)
    return replace(chosen, train=train, parallel=replace(chosen.parallel, tp=tp))
