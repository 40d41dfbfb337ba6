from typing import Any

import pytest

from workers.settings import Settings, TrainSettings, problems
from workers.train.executor.step import learning_rate


@pytest.mark.parametrize("shape", ["cosine", "linear"])
def test_the_rate_rises_to_its_peak_and_falls_to_its_least(shape: Any) -> None:
    """Steps count from 1, so both ends are easily missed by one."""
    train = TrainSettings(steps=100, lr=1.0, warmup_steps=10, schedule=shape, lr_min_ratio=0.1)
    rates = [learning_rate(train, step) for step in range(1, 101)]

    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == 1.0
    assert rates[-1] == pytest.approx(0.1)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_a_constant_rate_needs_no_warm_up() -> None:
    """Zero steps of warm-up must not divide by zero."""
    train = TrainSettings(steps=5, lr=0.5, warmup_steps=0, schedule="constant")

    assert [learning_rate(train, step) for step in (1, 5)] == [0.5, 0.5]


def test_a_run_that_is_all_warm_up_reaches_its_peak() -> None:
    """There is nothing left to decay over."""
    train = TrainSettings(steps=5, lr=0.5, warmup_steps=5)

    assert learning_rate(train, 5) == 0.5


@pytest.mark.parametrize(("steps", "peak"), [(10, 10), (100, 20)])
def test_a_short_run_has_a_short_warm_up(steps: int, peak: int) -> None:
    """To try something for ten steps one should not have to know of the warm-up."""
    train = TrainSettings(steps=steps, lr=0.5)

    assert learning_rate(train, peak - 1) < learning_rate(train, peak) == 0.5
    assert all("warmup" not in problem for problem in problems(Settings(train=train)))
